"""A conversation in the terminal: its messages, and what a typed line means."""

import json
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path


class Do(Enum):
    """What the user wants with a line."""

    NOTHING = auto()
    SAY = auto()
    SYSTEM = auto()
    RESET = auto()
    SAVE = auto()
    HELP = auto()
    EXIT = auto()
    WRONG = auto()


HELP = """\
/system TEXT   set the system message and start anew; without TEXT show it
/reset         forget the conversation, keep the system message
/save FILE     write the conversation to FILE as JSON (chat --load FILE goes on with it)
/help          this
/exit          leave, like Ctrl-D
//...          say something that begins with a slash
Ctrl-C stops an answer; what came of it stays in the conversation."""
_COMMANDS = {
    "/system": Do.SYSTEM,
    "/reset": Do.RESET,
    "/save": Do.SAVE,
    "/help": Do.HELP,
    "/exit": Do.EXIT,
    "/quit": Do.EXIT,
}


def parse_line(line: str) -> tuple[Do, str]:
    """What a line means, and the text that belongs to it: what is said, an argument, or what is wrong."""
    text = line.strip()
    if not text:
        return Do.NOTHING, ""
    if not text.startswith("/"):
        return Do.SAY, text
    if text.startswith("//"):
        return Do.SAY, text[1:]
    word, _, argument = text.partition(" ")
    argument = argument.strip()
    do = _COMMANDS.get(word)
    if do is None:
        return Do.WRONG, f"{word} is no command; /help lists them"
    if do is Do.SAVE and not argument:
        return Do.WRONG, "/save needs a file name"
    if do in (Do.RESET, Do.HELP, Do.EXIT) and argument:
        return Do.WRONG, f"{word} takes no argument"
    return do, argument


class ConversationError(ValueError):
    """A file does not hold a conversation."""


@dataclass(slots=True)
class Conversation:
    """A system message, or none, and turns of the user and the assistant in turn."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def say(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget a message of the user that got no answer."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def set_system(self, text: str) -> None:
        self.system = text
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write the messages to a new or existing file. Raises OSError."""
        path.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """What `save` wrote. Raises ConversationError, OSError."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8-sig"))["messages"]
            found = [(str(m["role"]), m["content"]) for m in messages]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConversationError(f"{path} is not a saved conversation: {error!r}") from None
        system = found.pop(0)[1] if found and found[0][0] == "system" else None
        roles = [role for role, _ in found]
        if roles != ["user", "assistant"] * (len(roles) // 2) or not all(type(c) is str for _, c in found):
            raise ConversationError(f"{path} is not a saved conversation: user and assistant must take turns in text")
        return cls(system, [{"role": role, "content": content} for role, content in found])
