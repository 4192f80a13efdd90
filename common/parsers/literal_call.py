"""Reads calls whose arguments are literals: Python's `name(key='x')`, Gemma 4's `call:name{key:<|"|>x<|"|>}`."""

import re
from collections.abc import Callable

from common.parsers.call import Call
from common.parsers.deltas import DeltaWriter
from common.parsers.literals import ArgumentsLiteral, Dialect
from common.parsers.schema_types import is_text
from common.parsers.tagged_call import Schemas

_MAX_HEADER = 256  # characters before the arguments
_NAME = r"[^\s()\[\]{}<>=,:;'\"|]"
_PYTHON = re.compile(rf"({_NAME}+)\s*(?=\(\s*(?:\)|\w+\s*=))")
_PYTHON_BEGUN = re.compile(rf"{_NAME}+\s*(?:\(\s*(?:\w+\s*)?)?")
_GEMMA = re.compile(r"\s*(?:call)?\s*:\s*([^\s{}<>\"]+)\s*(?=\{|<tool_call\|>|<end_function_call>)")
_GEMMA_BEGUN = re.compile(r"\s*(?:c|ca|cal|(?:call)?\s*(?::\s*[^\s{}<>\"]*\s*<?[a-z_]*\|?)?)")


class LiteralCall(Call):
    """`schemas` are those of the offered tools, and `accepts` says which names are calls."""

    def __init__(
        self,
        writer: DeltaWriter,
        dialect: Dialect,
        schemas: Schemas | None = None,
        accepts: Callable[[str], bool] = lambda name: True,
    ) -> None:
        super().__init__(writer)
        self._dialect = dialect
        self._schemas = schemas or {}
        self._accepts = accepts
        self._arguments: ArgumentsLiteral | None = None

    def _read(self, text: str, final: bool) -> int:
        at = 0
        if self._arguments is None:
            begun = text[:_MAX_HEADER]
            python = self._dialect is Dialect.PYTHON
            found = (_PYTHON if python else _GEMMA).match(begun)
            if found is None or not self._accepts(found[1]):
                may_come = (_PYTHON_BEGUN if python else _GEMMA_BEGUN).fullmatch(begun)
                if found is not None or final or len(begun) == _MAX_HEADER or not may_come:
                    self.broken = True
                return 0
            at = self._begin(found[1], found.end())
            if text[at] == "<":  # a call without arguments
                self._writer.arguments("{}")
                self.done = True
                return at
        assert self._arguments is not None
        at = self._arguments.feed(text, at, final=final)
        self._writer.arguments(self._arguments.take())
        self.done, self.broken = self._arguments.done, self._arguments.broken
        return at

    def _begin(self, name: str, at: int) -> int:
        schema = self._schemas.get(name)
        self._arguments = ArgumentsLiteral(self._dialect, lambda key: is_text(schema, key))
        self.began = True
        self._writer.start_call(name)
        return at
