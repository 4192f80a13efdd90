"""Prompts that are cut to a number of tokens, as vLLM cuts them."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from common.fields import IntArray
from common.messages import ErrorCode, Generate, Tokenize, ints
from common.prompts import kept
from tokenizer_proc.limits import Limits, Refused


@dataclass(frozen=True, slots=True)
class Truncation:
    """At most `most` tokens of a prompt are kept: the last ones, but the first with `side` right. A text keeps the
    tokens that the tokenizer puts around it where no side is asked for."""

    most: int
    side: str  # left, right, or empty

    @classmethod
    def of(cls, msg: Generate | Tokenize, limits: Limits) -> "Truncation | None":
        """What a request asks for. Raises Refused for more tokens than any prompt may have."""
        most = msg.truncate_prompt_tokens
        if most is None:
            return None
        if most > limits.context_len:
            problem = f"truncate_prompt_tokens: {most} is more than this model's context of {limits.context_len} tokens"
            raise Refused(ErrorCode.INVALID, problem, "truncate_prompt_tokens", limits.context_len)
        return cls(limits.max_prompt if most < 0 else most, msg.truncation_side)

    def of_tokens(self, tokens: IntArray) -> IntArray:
        return kept(tokens, self.most, self.side)

    def of_text(self, text: str, chars: int) -> str:
        """What is worth tokenizing of a text where so many characters have more tokens than are kept."""
        if len(text) <= chars:
            return text
        return text[:chars] if self.side == "right" else text[-chars:]

    def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> IntArray:
        """The tokens of a text. The tokenizer's own count."""
        if self.side or not add_special_tokens:
            (found,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return self.of_tokens(ints(*found.ids))
        (found,) = tokenizer.encode_batch([text], add_special_tokens=False)
        room = max(0, self.most - tokenizer.num_special_tokens_to_add(is_pair=False))
        if len(found.ids) > room:
            found.truncate(room, direction="left")
        return self.of_tokens(ints(*tokenizer.post_process(found, add_special_tokens=True).ids))
