"""An answer's text to what OpenAI's schema wants: reasoning, content and tool calls, while the text still comes.

    formats = detect_formats(chat_template_text)                      # ToolFormat or None, Reasoning and its tags
    parser = make_parser(tools=ToolFormat.HERMES, reasoning=Reasoning.TAGS, offered={"get_weather": {...}})
    for row in rows:
        deltas = parser.feed(row.text)                                # list[Delta], in the order of the text
    deltas = parser.finish()                                          # once, after the last text: what was held back

A Delta is ContentDelta(text), ReasoningDelta(text), ToolCallDelta(index, id, name) or ArgumentsDelta(index, text).
Every call begins with one ToolCallDelta and goes on with ArgumentsDeltas, whose texts together are the JSON text of
its arguments, as the model wrote it where it wrote JSON, but for control characters in strings, which are escaped.
Adjacent deltas of a kind are merged within one `feed`; however a text is split, the deltas of all feeds merged are
the same (the property that the tests check). Text that looks like a call and turns out not to be one is content, so
nothing that the model said is lost but the markers and the white space around calls and reasoning. `parser.called`
says whether there was a call: the finish reason is then "tool_calls" instead of "stop". One parser reads one choice.

With tools, and always with a model that speaks HARMONY, ask for the answer with `skip_special_tokens=False`
(`needs_special_tokens`): the markers of many models are special tokens.

`tool_choice` "required" or a function's name: `force_call([(name, schema), ...], format)` gives the Grammar to
generate under, and `make_parser(..., forced=True)` reads what it allows. `offer_calls` gives the one for calls that may
be made and must then be right, as parts of a text or instead of JSON. `after_reasoning(grammar, reasoning)` lets a
model think first under any grammar.

Everything here is plain objects without sockets, clocks, torch, tokenizer or grammar library.
"""

from common.parsers.answer import AnswerParser, make_parser, needs_special_tokens
from common.parsers.deltas import ArgumentsDelta, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from common.parsers.formats import Formats, Reasoning, ToolFormat, detect_formats, tags_of
from common.parsers.grammars import after_reasoning, force_call, offer_calls
from common.parsers.reasoning import THINK, Tags

__all__ = [
    "THINK",
    "AnswerParser",
    "ArgumentsDelta",
    "ContentDelta",
    "Delta",
    "Formats",
    "Reasoning",
    "ReasoningDelta",
    "Tags",
    "ToolCallDelta",
    "ToolFormat",
    "after_reasoning",
    "detect_formats",
    "force_call",
    "make_parser",
    "needs_special_tokens",
    "offer_calls",
    "tags_of",
]
