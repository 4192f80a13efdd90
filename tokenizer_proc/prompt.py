"""From a Generate message to prompt tokens."""

from array import array
from collections.abc import Iterable
from typing import assert_never

from tokenizers import Tokenizer

from common.fields import FieldError, IntArray
from common.harmony import speaks_harmony
from common.messages import MAX_PROMPT_END, Detokenize, ErrorCode, Generate, Text, Tokenize, Tokens
from common.sampling_params import MAX_BAD_WORD_TOKENS
from tokenizer_proc.chat_request import parse_messages, parse_template_args, parse_tools
from tokenizer_proc.chat_template import ChatTemplate, ChatTemplateError
from tokenizer_proc.conversation import one_by_one
from tokenizer_proc.harmony_prompt import harmony_messages, harmony_tools
from tokenizer_proc.limits import Limits, Refused
from tokenizer_proc.tool_prompt import describe_tools
from tokenizer_proc.truncation import Truncation

SHORT = 4096  # characters of a text that may keep other threads waiting: some milliseconds
MAX_RENDERED = 2**20  # characters of the prompt whose end is looked at


class PromptEncoder:
    """Turns requests into prompt tokens within the limits. Without state, so threads may share it. While the library
    works on a batch, even of one, other threads run; with its calls for a single text they wait.

    Text is encoded with the special tokens that the tokenizer itself adds (such as BOS); a chat is not, because its
    template writes them; token ids are used as they are. `chat_template` is None where the model has none, or the
    words that say why it cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | str | None, limits: Limits):
        self._tokenizer = tokenizer
        self._template = chat_template
        self._limits = limits

    def encode(self, msg: Generate) -> IntArray:
        """Raises Refused with the field and the limit."""
        cut = Truncation.of(msg, self._limits)
        if msg.token_ids is not None:
            field, tokens = "token_ids", msg.token_ids if cut is None else cut.of_tokens(msg.token_ids)
        elif msg.text is not None:
            field, tokens = "text", self._tokens_of(msg.text, "text", cut, add_special_tokens=True)
        else:
            field, tokens = "chat", self._tokens_of(self._render(msg), "chat", cut, add_special_tokens=False)
        self._limits.check_prompt(tokens, field)
        return tokens

    def bad_words(self, words: Iterable[str]) -> tuple[IntArray, ...]:
        """The tokens of each word without the space that it may begin with, and those with one, where these are as many
        and begin with another token: the words of vLLM. Raises Refused with the field and the limit."""
        found = []
        for i, word in enumerate(words):
            field, text = f"params.bad_words[{i}]", word.lstrip()
            alone, inside = (self._ids(start + text, add_special_tokens=False) for start in ("", " "))
            if not alone:
                raise Refused(ErrorCode.INVALID, f"{field}: has no tokens", field, 1)
            if len(alone) > MAX_BAD_WORD_TOKENS:
                problem = f"{field}: has {len(alone)} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed"
                raise Refused(ErrorCode.INVALID, problem, field, MAX_BAD_WORD_TOKENS)
            found += [alone, inside] if len(inside) == len(alone) and inside[0] != alone[0] else [alone]
        for tokens in found:
            self._limits.check_token_ids(tokens, "params.bad_words")
        return tuple(found)

    def tokenize(self, msg: Tokenize) -> Tokens:
        """Answer a question about tokens, of any number. Raises Refused with the field and the limit."""
        if msg.text is not None:
            field, text, special = "text", msg.text, msg.add_special_tokens
        else:
            field, text, special = "chat", self._render(msg), False
        tokens = self._tokens_of(text, field, Truncation.of(msg, self._limits), add_special_tokens=special)
        return Tokens(msg.rid, tokens, self._pieces(tokens) if msg.with_pieces else ())

    def detokenize(self, msg: Detokenize) -> Text:
        """The text of tokens. Raises Refused where there are too many or the model does not have one."""
        if len(msg.token_ids) > self._limits.max_chars:
            problem = (
                f"token_ids: at most {self._limits.max_chars} tokens are turned into text, got {len(msg.token_ids)}"
            )
            raise Refused(ErrorCode.TOO_LONG, problem, "token_ids", self._limits.max_chars)
        self._limits.check_token_ids(msg.token_ids, "token_ids")
        texts = self._tokenizer.decode_batch([list(msg.token_ids)], skip_special_tokens=msg.skip_special_tokens)
        return Text(msg.rid, texts[0])

    @property
    def chat_template_source(self) -> str:
        """The text of the template that renders chats; empty where none does."""
        return self._template.source if isinstance(self._template, ChatTemplate) else ""

    @property
    def takes_tools(self) -> bool:
        """Whether that template shows tools to the model itself."""
        return isinstance(self._template, ChatTemplate) and self._template.takes_tools

    def _render(self, msg: Generate | Tokenize) -> str:
        match self._template:
            case None:
                raise Refused(ErrorCode.INVALID, "chat: this model has no chat template; send text", "chat")
            case str() as problem:
                raise Refused(ErrorCode.INVALID, problem, "chat")
            case ChatTemplate() as template:
                try:
                    return self._render_with(template, msg)
                except FieldError as error:
                    raise Refused(ErrorCode.INVALID, str(error), error.field) from None
                except ChatTemplateError as error:
                    raise Refused(ErrorCode.INVALID, str(error), "chat") from None
            case other:
                assert_never(other)

    def _render_with(self, template: ChatTemplate, msg: Generate | Tokenize) -> str:
        assert msg.chat is not None
        messages, tools = parse_messages(msg.chat), parse_tools(msg.tools)
        if not template.takes_tools:
            messages, tools = describe_tools(messages, tools), None
        if speaks_harmony(template.source):
            messages, tools = harmony_messages(messages), harmony_tools(tools)
        elif template.one_call:
            messages = one_by_one(messages)
        arguments = parse_template_args(msg.template_args, template.variables)
        most = self._limits.max_chars if msg.truncate_prompt_tokens is None else self._limits.max_frame
        if msg.continue_final_message:
            return template.render_open(messages, most, tools=tools, arguments=arguments)
        return template.render(
            messages, most, tools=tools, arguments=arguments, add_generation_prompt=msg.add_generation_prompt
        )

    def _tokens_of(self, text: str, field: str, cut: Truncation | None, *, add_special_tokens: bool) -> IntArray:
        if cut is not None:
            text = cut.of_text(text, self._limits.max_chars)
            return cut.encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
        self._limits.check_chars(len(text), field)
        return self._ids(text, add_special_tokens=add_special_tokens)

    def _ids(self, text: str, *, add_special_tokens: bool) -> IntArray:
        if len(text) <= SHORT:  # handing the turn over and back takes longer, where the event loop is busy
            return array("i", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return array("i", self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def _pieces(self, tokens: IntArray) -> tuple[str, ...]:
        pieces = {token: self._tokenizer.id_to_token(token) or "" for token in set(tokens)}
        return tuple(map(pieces.__getitem__, tokens))


def chars_of(msg: Generate | Tokenize) -> int:
    """Characters to tokenize, as far as the message itself tells."""
    return len(msg.text or "") + len(msg.tools) + sum(len(m.content) + len(m.extra) for m in msg.chat or ())


def prompt_end(template: ChatTemplate | str | None) -> str:
    """How a chat template ends its prompts, found by rendering a short one; empty where it refuses that."""
    if not isinstance(template, ChatTemplate):
        return ""
    messages = [{"role": "user", "content": "Hello"}]
    if speaks_harmony(template.source):
        messages = harmony_messages(messages)
    try:
        return template.render(messages, MAX_RENDERED, add_generation_prompt=True)[-MAX_PROMPT_END:]
    except ChatTemplateError:
        return ""
