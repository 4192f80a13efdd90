"""One answer: the reasoning first, then content and calls."""

import secrets
import string
from collections.abc import Callable

from common.parsers.deltas import ArgumentsDelta, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from common.parsers.driver import TextParser
from common.parsers.formats import LISTS, Reasoning, ToolFormat
from common.parsers.harmony import HarmonyParser
from common.parsers.hermes import HermesParser
from common.parsers.llama3 import Llama3Parser
from common.parsers.marked import DEEPSEEK_MARKS, FUNCTION_GEMMA_MARKS, GEMMA_MARKS, KIMI_MARKS, MarkedParser
from common.parsers.mistral import APERTUS, COHERE, GRANITE, HUNYUAN, MISTRAL, MistralParser
from common.parsers.pythonic import PythonicParser
from common.parsers.reasoning import THINK, ReasoningPasser, ReasoningSplitter, Split, Tags, Unwrapper
from common.parsers.tag_forms import DSML, HERMES, HUNYUAN3, MINIMAX, SEED
from common.parsers.tagged_call import Schemas

_LIST_FORMS = {
    ToolFormat.MISTRAL: MISTRAL,
    ToolFormat.GRANITE: GRANITE,
    ToolFormat.COHERE: COHERE,
    ToolFormat.HUNYUAN: HUNYUAN,
    ToolFormat.APERTUS: APERTUS,
}
_MARKS = {
    ToolFormat.GEMMA: GEMMA_MARKS,
    ToolFormat.FUNCTION_GEMMA: FUNCTION_GEMMA_MARKS,
    ToolFormat.DEEPSEEK: DEEPSEEK_MARKS,
    ToolFormat.KIMI: KIMI_MARKS,
}
_BLOCKS = {
    ToolFormat.HERMES: HERMES,
    ToolFormat.SEED: SEED,
    ToolFormat.MINIMAX: MINIMAX,
    ToolFormat.DSML: DSML,
    ToolFormat.HUNYUAN3: HUNYUAN3,
}
# Marks that models write without closing their reasoning, and that are tokens of their own, so that no text has them.
_ENDS_REASONING = {
    ToolFormat.GEMMA: (GEMMA_MARKS.call,),
    ToolFormat.DEEPSEEK: DEEPSEEK_MARKS.section,
    ToolFormat.KIMI: KIMI_MARKS.section,
    ToolFormat.DSML: DSML.opens,
    ToolFormat.MINIMAX: MINIMAX.opens,
    ToolFormat.SEED: SEED.opens,
    ToolFormat.HUNYUAN3: HUNYUAN3.opens,
    ToolFormat.MISTRAL: MISTRAL.markers,
    ToolFormat.COHERE: COHERE.markers,
    ToolFormat.APERTUS: APERTUS.markers,
}
_ID_LETTERS = string.ascii_letters + string.digits


class AnswerParser:
    """See the package's docstring. Without a splitter all is content and calls, without tools all is content. Of calls
    beyond `most` nothing is shown (None: of all calls everything is). What is around content in some formats goes
    through `unwrapper`."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        tools: TextParser | None,
        most: int | None = None,
        unwrapper: Unwrapper | None = None,
    ) -> None:
        self._splitter = splitter
        self._unwrapper = unwrapper
        self._tools = tools
        self._most = most

    @property
    def called(self) -> bool:
        return self._tools is not None and self._tools.calls > 0

    def feed(self, text: str) -> list[Delta]:
        return self._read(self._splitter.feed(text) if self._splitter is not None else Split("", text))

    def finish(self) -> list[Delta]:
        split = self._splitter.finish() if self._splitter is not None else Split("", "")
        deltas = self._read(split, final=True)
        return deltas + (self._wanted(self._tools.finish()) if self._tools is not None else [])

    def _read(self, split: Split, *, final: bool = False) -> list[Delta]:
        content = split.content
        if self._unwrapper is not None:
            content = self._unwrapper.feed(content, final=final)
        deltas: list[Delta] = []
        if split.reasoning:
            passed = isinstance(self._splitter, ReasoningPasser)
            deltas.append(ContentDelta(split.reasoning) if passed else ReasoningDelta(split.reasoning))
        if self._tools is not None:
            return deltas + self._wanted(self._tools.feed(content))
        return deltas + ([ContentDelta(content)] if content else [])

    def _wanted(self, deltas: list[Delta]) -> list[Delta]:
        if self._most is None:
            return deltas
        return [d for d in deltas if not isinstance(d, ToolCallDelta | ArgumentsDelta) or d.index < self._most]


def make_parser(
    *,
    tools: ToolFormat | None = None,
    reasoning: Reasoning = Reasoning.NONE,
    tags: Tags = THINK,
    offered: Schemas | None = None,
    forced: bool = False,
    parallel: bool = True,
    together: bool = False,
    verbatim: bool = False,
    new_id: Callable[[], str] | None = None,
) -> AnswerParser:
    """A parser for one choice. Reasoning is between the `tags`. `tools` is None where none are offered (or tool_choice
    is "none"), `offered` has the JSON schemas of the parameters of those that are, by their names (None: every name is
    one), `forced` says that the grammar of `force_call` was used, and `new_id` makes the ids of calls. Without
    `parallel` only the first call is shown. `together` shows reasoning as content, tags and all. `verbatim`: without
    `tools`, calls are content just as the model wrote them."""
    most = None if parallel else 1
    if reasoning is Reasoning.CHANNEL or tools is ToolFormat.HARMONY:
        separate, calls = reasoning is Reasoning.CHANNEL and not together, tools is ToolFormat.HARMONY
        harmony = HarmonyParser(new_id or _call_id, reasoning=separate, calls=calls, headers=verbatim)
        return AnswerParser(None, harmony, most)
    splitter = None
    if reasoning is not Reasoning.NONE:
        until = _ENDS_REASONING.get(tools, ()) if tools is not None else ()
        kind = ReasoningPasser if together else ReasoningSplitter
        splitter = kind(opened=reasoning is Reasoning.OPENED, tags=tags, until=until)
    parser = None if tools is None else _tool_parser(tools, offered, forced, new_id)
    return AnswerParser(splitter, parser, most, Unwrapper(tags.around) if tags.around else None)


def _tool_parser(
    tools: ToolFormat, offered: Schemas | None, forced: bool, new_id: Callable[[], str] | None
) -> TextParser:
    ids = new_id or (_short_id if tools is ToolFormat.MISTRAL else _call_id)
    if forced and tools in LISTS:
        return MistralParser(ids, forced=True)
    if tools in _LIST_FORMS:
        return MistralParser(ids, _LIST_FORMS[tools])
    if tools in _MARKS:
        return MarkedParser(ids, _MARKS[tools], offered)
    if tools in _BLOCKS:
        return HermesParser(ids, offered, _BLOCKS[tools])
    return PythonicParser(ids, offered) if tools is ToolFormat.PYTHONIC else Llama3Parser(ids, offered)


def needs_special_tokens(tools: ToolFormat | None, reasoning: Reasoning, tags: Tags = THINK) -> bool:
    """Whether the markers may be special tokens, which the answer must then show (`skip_special_tokens=False`):
    `<tool_call>` is one in Granite 4's vocabulary and none in Qwen's."""
    marked = tags.special and reasoning is not Reasoning.NONE
    return reasoning is Reasoning.CHANNEL or tools is not None or marked


def _call_id() -> str:
    return "call_" + _random(24)


def _short_id() -> str:
    """Mistral's templates insist on nine letters and digits."""
    return _random(9)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(length))
