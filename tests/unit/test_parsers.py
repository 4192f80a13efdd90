"""Tool-call and reasoning parsers: what they find, and that it does not depend on how the text is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsers import (
    ArgumentsDelta,
    ContentDelta,
    Formats,
    Reasoning,
    ToolCallDelta,
    ToolFormat,
    detect_formats,
    make_parser,
)
from common.parsers.formats import LISTS
from tests.helpers_parsers import parse, shown, split

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL
GRANITE, HARMONY = ToolFormat.GRANITE, ToolFormat.HARMONY
COHERE, HUNYUAN, APERTUS = ToolFormat.COHERE, ToolFormat.HUNYUAN, ToolFormat.APERTUS
CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}]"}], "c": "\\"<\\/tool_call>"}}'
ARGUMENTS = '{"a": [1, {"b": "}]"}], "c": "\\"<\\/tool_call>"}'
PIECES = (
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>",
    "</think>", "<tool_calls>", "</tool_calls>", "<|START_ACTION|>", "<|END_ACTION|>", '{"tool_name": "f"}',
    "<|tools_prefix|>", "<|tools_suffix|>", '{"f": {}}',
    CALL, '{"name": "g"}', '{"parameters": {}, "name": "f"}', '{"name": "f", "arguments": "{}"}', "[", "]", "{", "}",
    ",", ";", ":", '"', '"name"', '"arguments"', '"f"', "\\", "f", "g", "null", "1.5", " ", "\n", "é🙂", "<", "text",
    '"\\ud800"',
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
POINTS = st.lists(st.integers(0, 10**6), max_size=20)
FORMATS = st.sampled_from([None, *ToolFormat])


@given(TEXTS, POINTS, FORMATS, st.sampled_from(Reasoning), st.booleans())
def test_a_split_changes_nothing(text, points, tools, reasoning, together):
    whole = parse([text], tools, reasoning, together=together)
    assert parse(split(text, points), tools, reasoning, together=together) == whole
    assert parse(text, tools, reasoning, together=together) == whole, "character by character"


@given(TEXTS, POINTS)
def test_a_split_changes_nothing_with_names_or_forced(text, points):
    for more in ({"tools": LLAMA, "offered": {"f": None}}, {"tools": MISTRAL, "forced": True}):
        assert parse(split(text, points), **more) == parse([text], **more) == parse(text, **more)


@given(TEXTS)
def test_nothing_is_lost_where_there_is_no_call(text):
    for tools in (None, *ToolFormat):
        merged = parse([text], tools)
        if not any(isinstance(d, ToolCallDelta) for d in merged):
            content = "".join(d.text for d in merged)
            assert content == text or "</tool_call>" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello <b>you</b>.\n", ["Hello <b>you</b>.\n"]),
        (f"<tool_call>\n{CALL}\n</tool_call>", [("f", ARGUMENTS)]),
        (f"\n\n<tool_call>{CALL}</tool_call>\n", [("f", ARGUMENTS)]),
        (f"I look.\n<tool_call>{CALL}</tool_call>\nDone. ", ["I look.", ("f", ARGUMENTS), "Done. "]),
        (f"<tool_call>{CALL}</tool_call><tool_call>\n{CALL}", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
        (f"<tool_call>{CALL}\n<tool_call>{CALL}</tool_call>", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "é\\n"}</tool_call>', [("é\n", '{"x": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null, "id": {}}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"é\\"}"}</tool_call>', [("f", '{"x": "é"}')]),
        ('<tool_call>{"name": "f", "arguments": {"x": "unfin', [("f", '{"x": "unfin')]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>after', [("f", '{"x": 1}'), "after"]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}}</tool_call>', [("f", '{"x": 1}'), "}"]),
        ('a <tool_call>{"name": 3}</tool_call>', ['a <tool_call>{"name": 3}</tool_call>']),
        ('<tool_call>{"nam', ['<tool_call>{"nam']),
        ("<tool_call><tool_call>" + CALL + "</tool_call>", ["<tool_call>", ("f", ARGUMENTS)]),
        ("a < b <tool", ["a < b <tool"]),
    ],
)
def test_hermes(text, expected):
    assert shown(parse([text], HERMES)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [("f", '{"x": 1}')]),
        (' \n{"name": "f", "parameters": {"x": 1}} ', [("f", '{"x": 1}')]),
        ('{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
        ('<|python_tag|>{"name": "f", "arguments": {}}', [("f", "{}")]),
        ('Yes. <|python_tag|>{"name": "unknown", "parameters": {}}', ["Yes.", ("unknown", "{}")]),
        ('{"name": "f"}; {"name": "g", "parameters": {}}', [("f", "{}"), ("g", "{}")]),
        ('{"name": "f"}<|python_tag|>{"name": "g"} ok', [("f", "{}"), ("g", "{}"), "ok"]),
        ('{"name": "f"}; that is all', [("f", "{}"), "; that is all"]),
        ('{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
        ('{"answer": 42}', ['{"answer": 42}']),
        ('I say {"name": "f"}', ['I say {"name": "f"}']),
        ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ],
)
def test_llama3(text, expected):
    assert shown(parse([text], LLAMA, offered={"f": None, "g": None})) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[TOOL_CALLS][{CALL}]", [("f", ARGUMENTS)]),
        (f"[TOOL_CALLS] [ {CALL}, {CALL} ]", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
        ('Well. [TOOL_CALLS]f[ARGS]{"x": 1}', ["Well.", ("f", '{"x": 1}')]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g-2{}', [("f", '{"x": 1}'), ("g-2", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"x": 1}', [("f", '{"x": 1}')]),
        ('[TOOL_CALLS]f{"x": 1} bye', [("f", '{"x": 1}'), "bye"]),
        ('[TOOL_CALLS]mcp:f/x[ARGS]{"x": 1}', [("mcp:f/x", '{"x": 1}')]),
        ('[TOOL_CALLS]wetter_für{"x": 1}', [("wetter_für", '{"x": 1}')]),
        (f"[TOOL_CALLS]{CALL} bye", [("f", ARGUMENTS), "bye"]),
        ('[TOOL_CALLS] {"x": 1}', ['[TOOL_CALLS] {"x": 1}']),
        ("[TOOL_CALLS]f", ["[TOOL_CALLS]f"]),
        ("[TOOL_CALLS]two words{}", ["[TOOL_CALLS]two words{}"]),
        ("[TOOL_CALLS][1]", ["[TOOL_CALLS][1]"]),
        ("[TOOL_CALLS]" + "f" * 300 + "{}", ["[TOOL_CALLS]" + "f" * 300 + "{}"]),
        ("a [list] of [TOOLS]", ["a [list] of [TOOLS]"]),
    ],
)
def test_mistral(text, expected):
    assert shown(parse([text], MISTRAL)) == expected


@pytest.mark.parametrize("tools", sorted(LISTS, key=str))
def test_lists_that_are_forced(tools):
    assert shown(parse([f"[{CALL}, {CALL}]"], tools, forced=True)) == [("f", ARGUMENTS), ("f", ARGUMENTS)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|tool_call|>[{CALL}]", [("f", ARGUMENTS)]),
        (f"I look.\n<|tool_call|> [{CALL}, {CALL}]\nDone.", ["I look.", ("f", ARGUMENTS), ("f", ARGUMENTS), "Done."]),
        (f"<tool_call>[{CALL}]", [("f", ARGUMENTS)]),
        ('<|tool_call|>[{"name": "f", "arguments": {"x": 1', [("f", '{"x": 1')]),
        ("<|tool_call|>[]", ["<|tool_call|>[]"]),
        ("a <|tool_call|> b", ["a <|tool_call|> b"]),
    ],
)
def test_granite(text, expected):
    assert shown(parse([text], GRANITE)) == expected


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [
        (
            COHERE,
            'Hm. <|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}},\n    '
            '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>\nDone.',
            ["Hm.", ("f", '{"x": 1}'), ("g", "{}"), "Done."],
        ),
        (COHERE, '<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": 1', [("f", '{"x": 1')]),
        (COHERE, f"<|START_ACTION|>[{CALL}]", [f"<|START_ACTION|>[{CALL}]"]),
        (HUNYUAN, f"Hm.<tool_calls>[{CALL}, {CALL}]</tool_calls> k", ["Hm.", ("f", ARGUMENTS), ("f", ARGUMENTS), "k"]),
        (HUNYUAN, f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
        (
            APERTUS,
            'Hm. <|tools_prefix|>[{"f": {"x": {"name": "g"}}}, {"name": {}}]<|tools_suffix|>ok',
            ["Hm.", ("f", '{"x": {"name": "g"}}'), ("name", "{}"), "ok"],
        ),
        (APERTUS, '<|tools_prefix|>[{"f": {"x": 1', [("f", '{"x": 1')]),
        (APERTUS, '<|tools_prefix|>[{"f": {"x": 1}, "g": {}}', [("f", '{"x": 1}')]),
        (APERTUS, "<|tools_prefix|>[{}]", ["<|tools_prefix|>[{}]"]),
        (HUNYUAN, f"<TOOLCALL>[{CALL}]</TOOLCALL>", [("f", ARGUMENTS)]),
        (HUNYUAN, "<tool_calls>[]</tool_calls>", ["<tool_calls>[]</tool_calls>"]),
    ],
)
def test_other_lists(tools, text, expected):
    assert shown(parse([text], tools)) == expected


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        ("<think>\nhm <b>\n</think>\n\nYes.", Reasoning.TAGS, [("think", "hm <b>"), "Yes."]),
        ("\nhm\n</think>\n\nYes </think>.", Reasoning.OPENED, [("think", "hm"), "Yes </think>."]),
        ("<think>hm</think>Yes.", Reasoning.OPENED, [("think", "hm"), "Yes."]),
        ("<think>\n\n</think>\n\nYes.", Reasoning.TAGS, ["Yes."]),
        (" Yes, <think> is a tag</think>.", Reasoning.TAGS, [" Yes, <think> is a tag</think>."]),
        ("<think>cut ", Reasoning.TAGS, [("think", "cut ")]),
        ("cut </thi", Reasoning.OPENED, [("think", "cut </thi")]),
        ("<thi", Reasoning.TAGS, ["<thi"]),
        ("<think>x</think>", Reasoning.NONE, ["<think>x</think>"]),
        ("", Reasoning.OPENED, []),
    ],
)
def test_reasoning(text, reasoning, expected):
    for tools in (None, HERMES):
        assert shown(parse([text], tools, reasoning)) == expected


def test_reasoning_may_speak_of_calls():
    text = f"<think>I could <tool_call>{CALL}</tool_call></think>\n<tool_call>{CALL}</tool_call>"
    thought = f"I could <tool_call>{CALL}</tool_call>"
    assert shown(parse([text], HERMES, Reasoning.TAGS)) == [("think", thought), ("f", ARGUMENTS)]


TAGGED = [Reasoning.TAGS, Reasoning.OPENED]


@given(TEXTS, st.sampled_from(TAGGED))
def test_reasoning_together_with_content_loses_nothing(text, reasoning):
    assert shown(parse([text], None, reasoning, together=True)) == ([text] if text else [])


@pytest.mark.parametrize("reasoning", TAGGED)
def test_a_call_is_read_behind_reasoning_that_is_content(reasoning):
    thought = f"<think>\nI could {CALL} <tool_call>{CALL}</tool_call></think>"
    for text, more in (
        (f"<tool_call>{CALL}</tool_call>", {"tools": HERMES}),
        (CALL, {"tools": LLAMA, "offered": {"f": None}}),
        (f"[{CALL}]", {"tools": MISTRAL, "forced": True}),
    ):
        found = parse([f"{thought}\n\n{text}"], reasoning=reasoning, together=True, **more)
        assert shown(found) == [thought, ("f", ARGUMENTS)]


@given(st.text(st.sampled_from('\n\t\r\x00\x1fé"\\ {}'), max_size=12))
def test_control_characters_in_strings_are_escaped(text):
    """Models write lines of code into strings as they are, which is no JSON."""
    inside = text.replace("\\", "\\\\").replace('"', '\\"')
    arguments = '{\n"a":\t["' + inside + '"]}'
    for tools, written in (
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {arguments}}}'),
        (LLAMA, f'{{"name": "f", "parameters": {arguments}}}'),
        (MISTRAL, f"[TOOL_CALLS]f[ARGS]{arguments}"),
    ):
        ((_, found),) = shown(parse(written, tools))
        assert json.loads(found) == {"a": [text]} and shown(parse([written], tools)) == [("f", found)]
    no_call = f'<tool_call>{{"other": "{inside}"}}'
    assert shown(parse([no_call], HERMES)) == [no_call]


def test_arguments_stream_while_they_come():
    parser = make_parser(tools=HERMES)
    assert parser.feed("Let me see. \n<tool") == [ContentDelta("Let me see.")]
    assert parser.feed('_call>\n{"name": "get_weather", ') == []
    (start, first) = parser.feed('"arguments": {"ci')
    assert isinstance(start, ToolCallDelta) and (start.index, start.name) == (0, "get_weather")
    assert start.id.startswith("call_") and first == ArgumentsDelta(0, '{"ci')
    assert parser.feed('ty": "Köln"') == [ArgumentsDelta(0, 'ty": "Köln"')]
    assert parser.feed("}}\n</tool_call>") == [ArgumentsDelta(0, "}")]
    assert parser.finish() == []


def test_ids_of_mistral_are_nine_letters_and_digits():
    parser = make_parser(tools=MISTRAL)
    ids = [d.id for d in parser.feed("[TOOL_CALLS]f{}[TOOL_CALLS]g{}") if isinstance(d, ToolCallDelta)]
    assert len(set(ids)) == 2 and all(len(i) == 9 and i.isalnum() for i in ids)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=6), st.dictionaries(st.text(max_size=4), JSON)), max_size=3)


@given(CALLS, st.booleans())
def test_calls_come_back_as_they_were(calls, ascii_only):
    """Any name and arguments, in every form."""

    def written(name, arguments, key="arguments"):
        return json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only)

    texts = {
        HERMES: "\n".join(f"<tool_call>\n{written(*call)}\n</tool_call>" for call in calls),
        LLAMA: "; ".join(written(*call, "parameters") for call in calls),
        MISTRAL: f"[TOOL_CALLS][{', '.join(written(*call) for call in calls)}]" if calls else "",
    }
    for tools, text in texts.items():
        found = [(name, json.loads(arguments)) for name, arguments in shown(parse(text, tools))]
        assert found == [(name, arguments) for name, arguments in calls]


QWEN = """
{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
THINKS = "{{ '</think>' }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
LLAMA3 = """{{ '<|start_header_id|>' }}{{ '{"name": "' + call.name + '", "parameters": ' }}"""


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("", None, Reasoning.NONE),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None, Reasoning.NONE),
        (QWEN, HERMES, Reasoning.TAGS),
        (THINKS, None, Reasoning.OPENED),
        (LLAMA3, LLAMA, Reasoning.NONE),
        ("{{ '<|python_tag|>' }}", LLAMA, Reasoning.NONE),
        ("{{ '[TOOL_CALLS][' }}", MISTRAL, Reasoning.NONE),
        ("respond only with <|tool_call|> followed by a JSON list of tools used", GRANITE, Reasoning.NONE),
        ("<tool_call><function=f>", HERMES, Reasoning.NONE),
        ('<function name="function-name"><param name=', HERMES, Reasoning.NONE),
        ("<|start|>user<|message|>x<|start|>assistant<|channel|>final<|message|>", HARMONY, Reasoning.CHANNEL),
    ],
)
def test_formats_from_the_template(template, tools, reasoning):
    assert detect_formats(template) == Formats(tools, reasoning)
    assert detect_formats(QWEN, thinking=False) == Formats(HERMES, Reasoning.NONE)


@pytest.mark.parametrize(
    ("tools", "call", "ending"),
    [
        (ToolFormat.HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "\n</tool_call>"),
        (ToolFormat.HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "\n<tool_call>"),
        (ToolFormat.HERMES, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "\n</tool_call>"),
        (ToolFormat.HUNYUAN, '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]', "</tool_calls>"),
        (ToolFormat.GEMMA, "<|tool_call>call:f{a:1}", "<tool_call|>"),
    ],
)
def test_a_mark_behind_a_call_that_is_cut_off_is_no_content(tools: ToolFormat, call: str, ending: str) -> None:
    offered = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for length in range(len(ending) + (ending != "\n<tool_call>")):
        for pieces in ([call + ending[:length]], call + ending[:length]):
            assert shown(parse(pieces, tools, offered=offered)) == [("f", '{"a": 1}')], ending[:length]
    assert shown(parse([call + "\n</tool_x"], tools, offered=offered))[-1] == "</tool_x"
