"""Reads calls that are a header with the name and then arguments in JSON, as DeepSeek's V3 and V3.1 and Kimi K2 write
them between marks (marked.py):

    function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```        NAME<｜tool▁sep｜>{...}
    functions.NAME:0<|tool_call_argument_begin|>{...}
"""

import re
from dataclasses import dataclass

from common.parsers.call import Call
from common.parsers.deltas import DeltaWriter
from common.parsers.scanning import JsonValue

_MAX_HEADER = 256  # characters
_FENCE = "```"


@dataclass(frozen=True, slots=True)
class Header:
    """`pattern` finds the name, and the id where the model gives one, before arguments that begin with a brace; or that
    were left out, before the mark `end`."""

    pattern: re.Pattern[str]
    end: str


_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_KIMI_END = "<|tool_call_end|>"
DEEPSEEK = Header(
    re.compile(
        r"\s*(?:function<｜tool▁sep｜>\s*(?P<typed>[^\s<>{}]+)\s*(?:```\w*)?|(?P<name>[^\s<>{}]+)\s*<｜tool▁sep｜>)"
        rf"\s*(?=\{{|{_DEEPSEEK_END})"
    ),
    _DEEPSEEK_END,
)
KIMI = Header(
    re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>{}:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
        rf"\s*(?=\{{|{re.escape(_KIMI_END)})"
    ),
    _KIMI_END,
)


class HeadedCall(Call):
    def __init__(self, writer: DeltaWriter, header: Header) -> None:
        super().__init__(writer)
        self._header = header
        self._value = JsonValue()

    def _read(self, text: str, final: bool) -> int:
        at = 0
        if not self.began:
            begun = text[:_MAX_HEADER]
            found = self._header.pattern.match(begun)
            if found is None:
                ended = "{" in begun or self._header.end in begun or len(begun) == _MAX_HEADER
                self.broken = ended or final
                return 0
            self._begin(found)
            at = found.end()
            if text[at] != "{":
                self._writer.arguments("{}")
                self.done = True
                return at
        if not self._value.done:
            at = self._value.feed(text, at)
            self._writer.arguments(self._value.take())
            self.broken = self._value.broken
        if self._value.done:
            at = self._behind_value(text, at, final)
        return at

    def _begin(self, found: re.Match[str]) -> None:
        groups = found.groupdict()
        call_id = groups.get("id") or ""
        self.began = True
        self._writer.start_call(groups["name"] or groups["typed"], call_id if ":" in call_id else "")

    def _behind_value(self, text: str, at: int, final: bool) -> int:
        """A fence around the arguments belongs to the call."""
        begun = text[at:].lstrip()
        if not final and (not begun or (begun != _FENCE and _FENCE.startswith(begun))):
            return at
        self.done = True
        fence = _FENCE if begun.startswith(_FENCE) else begun if _FENCE.startswith(begun) else ""
        return len(text) - len(begun) + len(fence) if fence else at
