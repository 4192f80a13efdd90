"""One answer: the reasoning first, then content and calls."""

import secrets
import string
from collections.abc import Callable

from common.parsers.deltas import ArgumentsDelta, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from common.parsers.driver import TextParser
from common.parsers.formats import Reasoning, ToolFormat
from common.parsers.harmony import HarmonyParser
from common.parsers.hermes import HermesParser
from common.parsers.llama3 import Llama3Parser
from common.parsers.mistral import GRANITE, MistralParser
from common.parsers.reasoning import ReasoningPasser, ReasoningSplitter, Split
from common.parsers.tagged_call import Schemas

_ID_LETTERS = string.ascii_letters + string.digits


class AnswerParser:
    """See the package's docstring. Without a splitter all is content and calls, without tools all is content. Of calls
    beyond `most` nothing is shown (None: of all calls everything is)."""

    def __init__(self, splitter: ReasoningSplitter | None, tools: TextParser | None, most: int | None = None) -> None:
        self._splitter = splitter
        self._tools = tools
        self._most = most

    @property
    def called(self) -> bool:
        return self._tools is not None and self._tools.calls > 0

    def feed(self, text: str) -> list[Delta]:
        return self._read(self._splitter.feed(text) if self._splitter is not None else Split("", text))

    def finish(self) -> list[Delta]:
        deltas = self._read(self._splitter.finish()) if self._splitter is not None else []
        return deltas + (self._wanted(self._tools.finish()) if self._tools is not None else [])

    def _read(self, split: Split) -> list[Delta]:
        deltas: list[Delta] = []
        if split.reasoning:
            passed = isinstance(self._splitter, ReasoningPasser)
            deltas.append(ContentDelta(split.reasoning) if passed else ReasoningDelta(split.reasoning))
        if self._tools is not None:
            return deltas + self._wanted(self._tools.feed(split.content))
        return deltas + ([ContentDelta(split.content)] if split.content else [])

    def _wanted(self, deltas: list[Delta]) -> list[Delta]:
        if self._most is None:
            return deltas
        return [d for d in deltas if not isinstance(d, ToolCallDelta | ArgumentsDelta) or d.index < self._most]


def make_parser(
    *,
    tools: ToolFormat | None = None,
    reasoning: Reasoning = Reasoning.NONE,
    offered: Schemas | None = None,
    forced: bool = False,
    parallel: bool = True,
    together: bool = False,
    verbatim: bool = False,
    new_id: Callable[[], str] | None = None,
) -> AnswerParser:
    """A parser for one choice. `tools` is None where none are offered (or tool_choice is "none"), `offered` has the
    JSON schemas of the parameters of those that are, by their names (None: every name is one), `forced` says that the
    grammar of `force_call` was used, and `new_id` makes the ids of calls. Without `parallel` only the first call is
    shown. `together` shows reasoning as content, tags and all. `verbatim`: without `tools`, calls are content just as
    the model wrote them."""
    most = None if parallel else 1
    if reasoning is Reasoning.CHANNEL or tools is ToolFormat.HARMONY:
        separate, calls = reasoning is Reasoning.CHANNEL and not together, tools is ToolFormat.HARMONY
        harmony = HarmonyParser(new_id or _call_id, reasoning=separate, calls=calls, headers=verbatim)
        return AnswerParser(None, harmony, most)
    splitter = None
    if reasoning is not Reasoning.NONE:
        splitter = (ReasoningPasser if together else ReasoningSplitter)(opened=reasoning is Reasoning.OPENED)
    parser: TextParser | None = None
    match tools:
        case ToolFormat.HERMES:
            parser = HermesParser(new_id or _call_id, offered)
        case ToolFormat.LLAMA3_JSON:
            parser = Llama3Parser(new_id or _call_id, offered)
        case ToolFormat.MISTRAL:
            parser = MistralParser(new_id or _short_id, forced=forced)
        case ToolFormat.GRANITE:
            parser = MistralParser(new_id or _call_id, GRANITE, forced=forced)
    return AnswerParser(splitter, parser, most)


def needs_special_tokens(tools: ToolFormat | None, reasoning: Reasoning) -> bool:
    """Whether the markers may be special tokens, which the answer must then show (`skip_special_tokens=False`):
    `<tool_call>` is one in Granite 4's vocabulary and none in Qwen's."""
    return reasoning is Reasoning.CHANNEL or tools is not None


def _call_id() -> str:
    return "call_" + _random(24)


def _short_id() -> str:
    """Mistral's templates insist on nine letters and digits."""
    return _random(9)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(length))
