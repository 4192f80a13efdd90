"""Calls between marks of their own: Gemma 4's and FunctionGemma's, DeepSeek's (V3 and V3.1) and Kimi K2's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsers import ArgumentsDelta, Reasoning, ToolCallDelta, ToolFormat, make_parser
from common.parsers.reasoning import GEMMA as CHANNELS
from tests.helpers_parsers import parse, shown, split

GEMMA, DEEPSEEK, KIMI = ToolFormat.GEMMA, ToolFormat.DEEPSEEK, ToolFormat.KIMI
SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "number"}}}
OFFERED = {"f": SCHEMA, "g": None}
Q = '<|"|>'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, ENDED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def gemma(*calls):
    return "".join(f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>" for name, arguments in calls)


def v3(*calls):
    each = (f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{ENDED}" for name, arguments in calls)
    return BEGIN + "\n".join(each) + END


def v31(*calls):
    return BEGIN + "".join(f"{CALL}{name}{SEP}{arguments}{ENDED}" for name, arguments in calls) + END


def kimi(*calls):
    each = (f"{KIMI_CALL}functions.{c[0]}:{i}{KIMI_ARGS}{c[1]}{KIMI_END}" for i, c in enumerate(calls))
    return SECTION + "".join(each) + SECTION_END


def found(text, tools):
    result = shown(parse([text], tools, offered=OFFERED))
    assert shown(parse(text, tools, offered=OFFERED)) == result, "character by character"
    return result


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", "{}"),
        (f"s:{Q}x y{Q}", '{"s": "x y"}'),
        (f"s:{Q}{Q},t:{Q}a\n{{[,\"é\\n<|{Q}", '{"s": "", "t": "a\\n{[,\\"é\\\\n<|"}'),
        ("a:42,b:-1.5e3,c:true,d:False,e:null,f:None",
         '{"a": 42, "b": -1.5e3, "c": true, "d": false, "e": null, "f": null}'),
        (f"o:{{k:{Q}v{Q},m:{{}}}},l:[1,{Q}b{Q},[],[{{x:1}}]]",
         '{"o": {"k": "v", "m": {}}, "l": [1, "b", [], [{"x": 1}]]}'),
        (f"{Q}a b{Q}:{Q}x{Q}, n : 5 ,", '{"a b": "x", "n": 5}'),
        ("city:Paris (France),zip:n/a", '{"city": "Paris (France)", "zip": "n/a"}'),
        ("s:07030,n:07030,when:2026-01-02", '{"s": "07030", "n": 7030, "when": "2026-01-02"}'),
        ('"s":"a\\"\\/\\u00e9","n":1', '{"s": "a\\"/é", "n": 1}'),
    ],
)  # fmt: skip
def test_gemma_arguments(written, arguments):
    assert found(gemma(("f", written)), GEMMA) == [("f", arguments)]
    json.loads(arguments)
    two = f"Hm.\n{gemma(('f', written), ('mcp.x-y', written.replace('s:', 'ss:')))}\n\nDone."
    assert found(two, GEMMA)[:2] == ["Hm.", ("f", arguments)] and found(two, GEMMA)[3:] == ["Done."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|tool_call>call:f<tool_call|>", [("f", "{}")]),
        ("<|tool_call>:f{n:1}<tool_call|>", [("f", '{"n": 1}')]),
        ("<|tool_call>junk<tool_call|>", ["<|tool_call>junk<tool_call|>"]),
        ("<|tool_call>call:" + "f" * 300 + "{}", ["<|tool_call>call:" + "f" * 300 + "{}"]),
        ("a <|tool_call> b", ["a <|tool_call> b"]),
        ("a <tool_call|> b", ["a <tool_call|> b"]),
        # answers that were cut off
        ("<|tool_call>call:f", ["<|tool_call>call:f"]),
        ("<|tool_call>call:f{", [("f", "{")]),
        ("<|tool_call>call:f{n:12", [("f", '{"n": ')]),
        (f"<|tool_call>call:f{{s:{Q}a b<|", [("f", '{"s": "a b<|')]),
        (f"<|tool_call>call:f{{s:{Q}a{Q}", [("f", '{"s": "a"')]),
        # arguments that are none
        ("<|tool_call>call:f{n:1]}<tool_call|>", [("f", '{"n": 1'), "]}"]),
        ("<|tool_call>call:f{n:" + "[" * 200 + "]", [("f", '{"n": ' + "[" * 99), "[" * 101 + "]"]),
    ],
)  # fmt: skip
def test_gemma(text, expected):
    assert found(text, GEMMA) == expected


@pytest.mark.parametrize("written", [v3, v31, kimi])
@pytest.mark.parametrize(
    "arguments", ["{}", '{"a": "Köln \\"x\\" ```<", "o": {"l": [1, null, {"b": "}"}]}}', '{\n  "a": true\n}']
)
def test_calls_with_headers(written, arguments):
    tools = KIMI if written is kimi else DEEPSEEK
    assert found(written(("f", arguments)), tools) == [("f", arguments)]
    two = written(("f", arguments), ("no.such-g", "{}"))
    assert found(f"Hm.\n\n{two}\nDone.", tools) == ["Hm.", ("f", arguments), ("no.such-g", "{}"), "Done."]
    assert found(written(("f", '{"a": "b\n"}')), tools) == [("f", '{"a": "b\\n"}')]
    nothing = written(("f", "nothing"))
    assert found(nothing, tools) == [nothing]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{CALL}f{SEP}{{}}{ENDED}", [("f", "{}")]),
        (f"{BEGIN}\n{CALL}f{SEP}{ENDED}\n{CALL} g {SEP} {{}} {ENDED}{END}", [("f", "{}"), ("g", "{}")]),
        (f"{BEGIN}{CALL}function{SEP}{{}}{ENDED}", [("function", "{}")]),
        (f"{BEGIN}{CALL}function{SEP}f\n{{}}{ENDED}{END}", [("f", "{}")]),
        (f"{BEGIN} and so on", [f"{BEGIN} and so on"]),
        (BEGIN, [BEGIN]),
        (f"{BEGIN}{CALL}f{SEP}", [f"{BEGIN}{CALL}f{SEP}"]),
        (f'{BEGIN}{CALL}f{SEP}{{"a": "cu', [("f", '{"a": "cu')]),
        (f"{BEGIN}{CALL}function{SEP}f\n```json\n{{}}\n``", [("f", "{}")]),
        (f"{BEGIN}{CALL}f{SEP}{{}}{ENDED}{CALL}{{}}", [("f", "{}"), f"{CALL}{{}}"]),
    ],
)
def test_deepseek(text, expected):
    assert found(text, DEEPSEEK) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{KIMI_CALL}f:0{KIMI_ARGS}{{}}{KIMI_END}", [("f", "{}")]),
        (f"{SECTION}\n{KIMI_CALL} f {KIMI_ARGS} {KIMI_END}\n{SECTION_END} ok", [("f", "{}"), "ok"]),
        (f"{SECTION}{SECTION_END}", [f"{SECTION}{SECTION_END}"]),
        (f"{SECTION}{KIMI_CALL}functions.f:0", [f"{SECTION}{KIMI_CALL}functions.f:0"]),
        (f"<|tool_call_section_begin|>{KIMI_CALL}f:0{KIMI_ARGS}{{", [("f", "{")]),
    ],
)
def test_kimi(text, expected):
    assert found(text, KIMI) == expected


def test_ids_of_kimi_are_the_models_own():
    text = f"{SECTION}{KIMI_CALL}functions.f:3{KIMI_ARGS}{{}}{KIMI_END}{KIMI_CALL}f{KIMI_ARGS}{{}}{KIMI_END}"
    calls = [d for d in parse([text + kimi(("f", "{}")) * 2], KIMI) if isinstance(d, ToolCallDelta)]
    assert [c.id for c in calls] == ["functions.f:3", "id0", "functions.f:0", "id1"]
    assert [c.name for c in calls] == ["f"] * 4


def test_function_gemma():
    tools = ToolFormat.FUNCTION_GEMMA
    arguments = 's:<escape>a {"b"}, <|"|><escape>,n:5,o:{k:[<escape>v<escape>,true]}'
    text = f"Hm.\n<start_function_call>call:f{{{arguments}}}<end_function_call><start_function_response>"
    expected = ["Hm.", ("f", '{"s": "a {\\"b\\"}, <|\\"|>", "n": 5, "o": {"k": ["v", true]}}')]
    assert found(text, tools) == expected
    assert found("<start_function_call>call:f{}<end_function_call>", tools) == [("f", "{}")]
    assert found("<start_function_call>call:f{s:<escape>cu", tools) == [("f", '{"s": "cu')]
    assert found("<start_function_call> f", tools) == ["<start_function_call> f"]


def test_a_call_ends_reasoning_that_was_not_closed():
    for tools, call in ((GEMMA, gemma(("f", ""))), (DEEPSEEK, v31(("f", "{}"))), (KIMI, kimi(("f", "{}")))):
        assert shown(parse([f"hm\n{call}"], tools, Reasoning.OPENED)) == [("think", "hm"), ("f", "{}")]
        assert shown(parse(f"hm</think>\n{call}", tools, Reasoning.OPENED)) == [("think", "hm"), ("f", "{}")]
        assert shown(parse([f"hm\n{call}"], tools, Reasoning.OPENED, together=True)) == ["hm\n", ("f", "{}")]
        assert shown(parse([f"hm\n{call}"], None, Reasoning.OPENED)) == [("think", f"hm\n{call}")]
    text = f"<|channel>thought\nhm\n<channel|>Yes. {gemma(('f', ''))}"
    assert shown(parse(text, GEMMA, Reasoning.TAGS, tags=CHANNELS)) == [("think", "hm"), "Yes.", ("f", "{}")]


PIECES = (
    "<|tool_call>", "<tool_call|>", "call:", "f", ":", "{", "}", "[", "]", ",", Q, '"', "'", "\\", "\\u0041", "\\12",
    "n:1", "true", " ", "\n", "é🙂", "<|", "x" * 300, BEGIN, END, CALL, ENDED, SEP, "function", "```json", "```",
    '{"a": 1}', SECTION, SECTION_END, KIMI_CALL, KIMI_ARGS, KIMI_END, "functions.f:0", "</think>",
)  # fmt: skip
GEMMA_TEXTS = st.lists(st.sampled_from(PIECES[:23]), max_size=24).map("".join)
TEXTS = GEMMA_TEXTS | st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
POINTS = st.lists(st.integers(0, 10**6), max_size=20)


@given(TEXTS | GEMMA_TEXTS.map(lambda text: "<|tool_call>call:f{" + text), POINTS, st.booleans())
def test_a_split_changes_nothing(text, points, offered):
    function_gemma = text.replace(Q, "<escape>").replace("<|tool_call>", "<start_function_call>")
    for tools, text in (*((t, text) for t in (GEMMA, DEEPSEEK, KIMI)), (ToolFormat.FUNCTION_GEMMA, function_gemma)):
        for reasoning in (Reasoning.NONE, Reasoning.OPENED):
            more = {"offered": OFFERED if offered else None}
            whole = parse([text], tools, reasoning, **more)
            assert parse(split(text, points), tools, reasoning, **more) == whole
            assert parse(text, tools, reasoning, **more) == whole, "character by character"
        if not any(isinstance(delta, ToolCallDelta) for delta in parse([text], tools)):
            assert "".join(delta.text for delta in parse([text], tools)) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def as_gemma(value):
    match value:
        case str():
            return f"{Q}{value}{Q}"
        case list():
            return f"[{','.join(map(as_gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{as_gemma(key)}:{as_gemma(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


@given(st.lists(st.dictionaries(st.text(max_size=4), JSON), max_size=3), POINTS)
def test_calls_come_back_as_they_were(calls, points):
    texts = {
        GEMMA: "\n".join(gemma(("g", as_gemma(arguments)[1:-1])) for arguments in calls),
        DEEPSEEK: v3(*(("g", json.dumps(arguments)) for arguments in calls)) if calls else "",
        KIMI: kimi(*(("g", json.dumps(arguments)) for arguments in calls)) if calls else "",
    }
    for tools, text in texts.items():
        back = [(name, json.loads(arguments)) for name, arguments in shown(parse(split(text, points), tools))]
        assert back == [("g", arguments) for arguments in calls]


def test_arguments_stream_while_they_come():
    parser = make_parser(tools=GEMMA)
    assert parser.feed("<|tool_call>call:f") == []
    start, first = parser.feed("{s:" + Q)
    assert isinstance(start, ToolCallDelta) and start.name == "f" and first == ArgumentsDelta(0, '{"s": "')
    assert parser.feed("some te<") == [ArgumentsDelta(0, "some te")]
    assert parser.feed('|"|>,n:1') == [ArgumentsDelta(0, '", "n": ')]
    assert parser.feed("5}<tool_call|>") == [ArgumentsDelta(0, "15}")]
    assert parser.finish() == []
