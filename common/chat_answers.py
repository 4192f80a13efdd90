"""Answers to chats as clients of the cluster's own socket read them: the model's reasoning apart from the text.

By which tags or channels it tells them apart is in its chat template (`common/parsers`). The gateway does more: it
reads calls too. Pure.
"""

from dataclasses import dataclass, replace

from common.messages import ChatMessage, Finish, Info
from common.parsers import (
    AnswerParser,
    ContentDelta,
    Reasoning,
    ReasoningDelta,
    after_reasoning,
    detect_formats,
    make_parser,
    needs_special_tokens,
)
from common.prompts import Prompt
from common.rows import Row
from common.sampling_params import SamplingParams


def is_read(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether an answer is one to a chat, and not wanted with special tokens, which is all that the model writes."""
    return bool(prompt) and isinstance(prompt[0], ChatMessage) and params.skip_special_tokens


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model answers chats that offer no tools."""

    reasoning: Reasoning

    @classmethod
    def of_model(cls, info: Info) -> "ChatFormat":
        return cls(detect_formats(info.chat_template, prompt=info.prompt_end).reasoning)

    def asked(self, params: SamplingParams) -> SamplingParams:
        """The same for an answer that will be read: with marks that are special tokens, and a grammar for what follows
        the reasoning, unless it says itself what comes before."""
        grammar = params.grammar
        if grammar is not None and not grammar.closing:
            grammar = after_reasoning(grammar, self.reasoning)
        return replace(params, grammar=grammar, skip_special_tokens=not needs_special_tokens(None, self.reasoning))

    def reader(self, n: int) -> "AnswerReader":
        """For the rows of a request with `n` choices."""
        return AnswerReader({choice: make_parser(reasoning=self.reasoning) for choice in range(n)})


class AnswerReader:
    """Reads the rows of one request, each choice's in order."""

    def __init__(self, parsers: dict[int, AnswerParser]):
        self._parsers = parsers

    @property
    def ended(self) -> bool:
        """Whether the last row of every choice has been read."""
        return not self._parsers

    def read(self, row: Row) -> Row:
        """A row as it came, as one whose text is the answer and whose reasoning is apart."""
        parser = self._parsers[row.choice]
        deltas = parser.feed(row.text)
        if row.finish is not Finish.NONE:
            deltas += parser.finish()
            del self._parsers[row.choice]
        text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        return replace(row, text=text, reasoning=reasoning)
