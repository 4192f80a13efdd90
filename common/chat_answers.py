"""Answers to chats as clients of the cluster's own socket read them: the model's reasoning apart from the text.

By which tags or channels it tells them apart is in its chat template (`common/parsers`). Calls of tools are text, as
the model wrote them; the gateway reads those too. Pure.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from common.fields import FieldError
from common.messages import ChatMessage, Finish, Info
from common.parsers import (
    THINK,
    AnswerParser,
    ContentDelta,
    Reasoning,
    ReasoningDelta,
    Tags,
    ToolFormat,
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
    """How a model answers a chat. `tools` is how it writes calls where tools are offered and this is known, `goes_on`
    says that the answer goes on with the last message."""

    reasoning: Reasoning
    tools: ToolFormat | None = None
    goes_on: bool = False
    tags: Tags = THINK  # around the reasoning

    @classmethod
    def of_model(
        cls,
        info: Info,
        *,
        tools: str = "",
        template_args: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **_: Any,
    ) -> "ChatFormat":
        """For a chat with these options of `submit`. Where an argument of the template switches thinking, its text has
        to tell how prompts end."""
        arguments = json.loads(template_args) if template_args else {}
        switch = arguments.get("enable_thinking", arguments.get("thinking"))
        prompt = info.prompt_end if switch is None else ""
        thinking = switch is None or bool(switch)
        formats = detect_formats(info.chat_template, takes_tools=info.takes_tools, thinking=thinking, prompt=prompt)
        reasoning = formats.reasoning
        if reasoning is Reasoning.OPENED and not add_generation_prompt:
            reasoning = Reasoning.TAGS  # the prompt ends with a message
        return cls(reasoning, formats.tools if tools else None, continue_final_message, formats.tags)

    def under(self, params: SamplingParams) -> "ChatFormat":
        """The same for an answer with these parameters: no grammar can name special tags, so what it rules is all."""
        bound = params.grammar is not None and not params.grammar.closing
        return replace(self, reasoning=Reasoning.NONE) if bound and self.tags.special else self

    def asked(self, params: SamplingParams) -> SamplingParams:
        """The same for an answer that will be read: with marks that are special tokens, and a grammar for what follows
        the reasoning, unless it says itself what comes before. Raises FieldError."""
        grammar = params.grammar
        if grammar is not None and not grammar.closing and not self.goes_on:
            grammar = after_reasoning(grammar, self.reasoning)
        marked = needs_special_tokens(self.tools, self.reasoning, self.tags)
        if marked and params.include_stop_str_in_output:  # the mark at the end would be taken for text
            raise FieldError("include_stop_str_in_output", "does not go with chats of this model")
        return replace(params, grammar=grammar, skip_special_tokens=not marked)

    def reader(self, n: int) -> "AnswerReader":
        """For the rows of a request with `n` choices."""
        verbatim = self.tools is not None
        return AnswerReader(
            {i: make_parser(reasoning=self.reasoning, tags=self.tags, verbatim=verbatim) for i in range(n)}
        )


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
