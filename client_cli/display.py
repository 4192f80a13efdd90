"""How an answer is shown: its text, and before it what the model thought, where a person reads it."""

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from common.connection import Row

DIM, BRIGHT = "\x1b[2m", "\x1b[22m"


def json_line(values: Any) -> str:
    """As JSON Lines have it, readable, unless there is something that UTF-8 cannot say."""
    text = json.dumps(values, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(values)
    return text + "\n"


def console() -> "Console":
    """rich's, except that a reader who goes away ends the program as everywhere else."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    return Ours()


class Display:
    """Writes one answer as it comes. Reasoning is dim with an empty line behind it, and left out where the output is no
    terminal: programs want the answer."""

    def __init__(self, out: TextIO):
        self._out = out
        self._shows_reasoning = out.isatty()
        self._marks = ("", "") if os.environ.get("TERM", "dumb") == "dumb" else (DIM, BRIGHT)
        self._thinking = False
        self.begun = False  # something has been written

    def add(self, row: "Row") -> None:
        self.write(row.reasoning, row.text)

    def write(self, reasoning: str, text: str) -> None:
        """More of an answer."""
        if reasoning and self._shows_reasoning:
            dim, bright = self._marks
            self._say(f"{dim}{reasoning}{bright}")
            self._thinking = True
        if text:
            self._say("\n\n" + text if self._thinking else text)
            self._thinking = False

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self.begun = True
