"""Calls between `<tool_call>` and `</tool_call>`, one or several: `{"name": ..., "arguments": {...}}` as Hermes, Qwen
2.5 and 3 write them, or parameters in tags as Qwen3-Coder and GLM do; and MiniCPM5's, which stand alone. The same
between other tags, for Seed-OSS, MiniMax M2 and DeepSeek V3.2 (tag_forms.py)."""

from collections.abc import Callable

from common.parsers.call import Call
from common.parsers.call_object import CallObject
from common.parsers.driver import CallParser
from common.parsers.tag_forms import HERMES, Block
from common.parsers.tagged_call import Schemas, TaggedCall


class HermesParser(CallParser):
    """`schemas` are those of the offered tools. In a block any name is a call's. Qwen3-Coder leaves `<tool_call>` out
    at times, MiniCPM5 always: then the name must be that of an offered tool, and so must GLM's, which has no tag."""

    def __init__(self, new_id: Callable[[], str], schemas: Schemas | None = None, block: Block = HERMES) -> None:
        super().__init__(new_id)
        self._block = block
        self._schemas = schemas
        self._marker = ""  # what began the call, with the white space before it
        self._opened = False  # behind an opening tag
        self._inside = False  # a block, of which nothing but calls has come
        self._unclosed = False  # a call has ended, its closing tag has not come

    def _step(self, *, final: bool) -> bool:
        if self._opened:
            return self._begin(final)
        block = self._block
        markers = (*block.opens, block.function, *(block.closes if self._unclosed else ()))
        self._text, marker = self._content.scan(self._text, markers, final=final)
        if marker.endswith(block.closes):
            self._content.after_call, self._inside = True, False
        elif marker.endswith(block.function):
            self._marker, self._text = marker.removesuffix(block.function), block.function + self._text
            self._call = self._tagged(known=self._inside and not self._content.said)
        elif marker:
            self._marker, self._opened = marker, True
        self._unclosed = self._unclosed and not marker
        return bool(marker)

    def _begin(self, final: bool) -> bool:
        """What stands behind the opening tag tells how the call is written."""
        text = self._text.lstrip()
        if not text and not final:
            return False
        self._marker += self._text[: len(self._text) - len(text)]
        self._text, self._opened, self._inside = text, False, True
        if text.startswith("{"):
            self._call = CallObject(self._writer)
        else:
            self._call = self._tagged(known=text.startswith("<"))
        return True

    def _tagged(self, *, known: bool) -> Call:
        """`known` to be a call by what stands before it."""
        schemas = self._schemas
        return TaggedCall(self._writer, schemas, lambda name: known or schemas is None or name in schemas, self._block)

    def _end_call(self, call: Call) -> None:
        if call.began:
            self._content.after_call = self._unclosed = True
            self._content.said = False
        else:
            self._content.restore(self._marker + call.raw)

    def _at_end(self) -> None:
        super()._at_end()
        if self._opened:
            self._content.restore(self._marker)
