"""One choice of a chat: its rows to messages and deltas in OpenAI's schema."""

from dataclasses import dataclass
from typing import Any

from common.messages import Finish
from common.parsers import ArgumentsDelta, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from common.rows import Row
from gateway_proc.conversation import Conversation
from gateway_proc.generation import finish_reason


@dataclass(frozen=True, slots=True)
class Piece:
    """One `delta` of a chunk."""

    delta: dict[str, Any]


class ChoiceReader:
    """Reads the rows of one choice in order, through a parser where the model writes reasoning or calls. `with_tokens`
    keeps them for `take_shown`."""

    def __init__(self, conversation: Conversation, *, with_tokens: bool = False):
        self._parser = conversation.parser() if conversation.is_read else None
        self._with_tokens = with_tokens
        self._show_reasoning = conversation.show_reasoning
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._reasoned = 0
        self._undecided: list[Row] = []
        self._thinking = False
        self._shown: list[Row] = []

    def feed(self, row: Row) -> list[Piece]:
        """What a row adds, as deltas of a stream."""
        if self._parser is None:
            self._show(row)
            return [Piece({"content": row.text})] if row.text else []
        deltas = self._deltas(row)
        return [piece for delta in deltas if (piece := self._piece(delta)) is not None]

    def collect(self, row: Row) -> None:
        """Take in a row, for `message`."""
        if self._parser is None:
            self._content.append(row.text)
            self._show(row)
            return
        for delta in self._deltas(row):
            match delta:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallDelta(_, call, name):
                    self._calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": ""}})
                case ArgumentsDelta(index, text):
                    self._calls[index]["function"]["arguments"] += text

    def message(self) -> dict[str, Any]:
        """The whole answer that was collected."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = content or None
        if self._reasoning and self._show_reasoning:
            message |= _thought("".join(self._reasoning))
        return message

    def finish_reason(self, finish: Finish) -> str | None:
        if finish is Finish.STOP and self._parser is not None and self._parser.called:
            return "tool_calls"
        return finish_reason(finish)

    def take_reasoning_tokens(self) -> int:
        """Tokens of reasoning since the last call."""
        reasoned, self._reasoned = self._reasoned, 0
        return reasoned

    def take_shown(self) -> list[Row]:
        """The rows since the last call whose tokens the client may see: not those of reasoning that is hidden."""
        shown, self._shown = self._shown, []
        return shown

    def _show(self, *rows: Row) -> None:
        if self._with_tokens:
            self._shown += rows

    def _deltas(self, row: Row) -> list[Delta]:
        assert self._parser is not None
        deltas = self._parser.feed(row.text)
        ended = row.finish is not Finish.NONE
        if ended:
            deltas += self._parser.finish()
        if self._show_reasoning:
            self._show(row)
        self._undecided.append(row)
        if deltas:  # tokens whose text was held back belong to what comes next
            self._thinking = all(isinstance(delta, ReasoningDelta) for delta in deltas)
            if self._thinking:
                self._reasoned += sum(len(each.token_ids) for each in self._undecided)
        if deltas or ended:
            if not self._show_reasoning and not self._thinking:
                self._show(*self._undecided)
            self._undecided.clear()
        return deltas

    def _piece(self, delta: Delta) -> Piece | None:
        match delta:
            case ContentDelta(text):
                return Piece({"content": text})
            case ReasoningDelta(text):
                return Piece(_thought(text)) if self._show_reasoning else None
            case ToolCallDelta(index, call, name):
                function = {"name": name, "arguments": ""}
                return Piece({"tool_calls": [{"index": index, "id": call, "type": "function", "function": function}]})
            case ArgumentsDelta(index, text):
                return Piece({"tool_calls": [{"index": index, "function": {"arguments": text}}]})


def _thought(text: str) -> dict[str, Any]:
    """Reasoning by both names that clients know: vLLM's, and the older one that SGLang still has."""
    return {"reasoning": text, "reasoning_content": text}
