"""Calls whose parameters stand in tags: Qwen3-Coder's form, GLM's and MiniCPM5's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsers import ArgumentsDelta, ToolCallDelta, ToolFormat, make_parser
from common.parsers.schema_types import as_json, types_of
from tests.helpers_parsers import parse, shown, split

HERMES = ToolFormat.HERMES
SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
        "o": {"type": "object"}, "a": {"type": "array"}, "sn": {"type": ["string", "null"]},
        "si": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "r": {"$ref": "#/$defs/R"}, "e": {"enum": [1, "x"]},
        "loop": {"$ref": "#/properties/loop"}, "bad": {"type": 3, "anyOf": 4, "enum": 5}, "gone": {"$ref": "#/no/such"},
    },
    "$defs": {"R": {"type": "object"}},
}  # fmt: skip
OFFERED = {"f": SCHEMA, "g": None}


def qwen(name, **values):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name, **values):
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def minicpm(name, **values):
    def written(value):
        return f"<![CDATA[{value}]]>" if set(value) & set("<&\n") else value

    params = (f'<param name="{key}">{written(str(value))}</param>' for key, value in values.items())
    return f'<function name="{name}">{"".join(params)}</function>'


def found(text):
    result = shown(parse([text], HERMES, offered=OFFERED))
    assert shown(parse(text, HERMES, offered=OFFERED)) == result, "character by character"
    return result


@pytest.mark.parametrize("written", [qwen, glm, minicpm])
@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({}, "{}"),
        ({"s": 'q"uo\\te <b> {"a"} é🙂'}, {"s": 'q"uo\\te <b> {"a"} é🙂'}),
        ({"s": ""}, {"s": ""}),
        ({"s": "a\n\nb\n"}, {"s": "a\n\nb\n"}),
        ({"s": "null", "sn": "null"}, {"s": "null", "sn": None}),
        ({"s": "5", "i": "5", "n": "1.50", "b": "True"}, {"s": "5", "i": 5, "n": 1.5, "b": True}),
        ({"o": '{"x": [1, "}</"]}', "a": "[1,\n2]"}, {"o": {"x": [1, "}</"]}, "a": [1, 2]}),
        ({"i": "five", "a": "{}", "o": '{"x": NaN}'}, {"i": "five", "a": "{}", "o": '{"x": NaN}'}),
        ({"o": "{'x': [1, None, 'a\"']}", "a": "[True, ('u',)]"}, {"o": {"x": [1, None, 'a"']}, "a": [True, ["u"]]}),
        ({"o": "{'x': {1, 2}}", "a": "[1, x]", "r": "[1]"}, {"o": "{'x': {1, 2}}", "a": "[1, x]", "r": "[1]"}),
        ({"si": "7", "r": '{"k": 1}', "e": "1"}, {"si": 7, "r": {"k": 1}, "e": 1}),
        ({"other": "5", "loop": "5", "bad": "5", "gone": "5"}, {"other": "5", "loop": "5", "bad": "5", "gone": "5"}),
    ],
)
def test_values_are_what_their_schema_says(written, values, arguments):
    ((name, text),) = found(f"\n{written('f', **values)}\n")
    assert name == "f" and (text == arguments or json.loads(text) == arguments)
    assert found(f"Hm.\n\n{written('f', **values)}\n{written('g', x=1)}") == ["Hm.", (name, text), ("g", '{"x": "1"}')]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (qwen("nope", s="x"), [("nope", '{"s": "x"}')]),
        (glm("nope", s="x"), [glm("nope", s="x")]),
        ("<tool_call>f</tool_call> ok", [("f", "{}"), "ok"]),
        ("<tool_call>hello there</tool_call>", ["<tool_call>hello there</tool_call>"]),
        (qwen("f", s="x").removeprefix("<tool_call>\n"), [("f", '{"s": "x"}')]),
        ("I write <function=nope>.", ["I write <function=nope>."]),
        ("<function=f", ["<function=f"]),
        ("<tool_call>\n", ["<tool_call>\n"]),
        ("<tool_call>\n<function=a b>", ["<tool_call>\n<function=a b>"]),
        ("<tool_call><function=" + "f" * 400 + ">", ["<tool_call><function=" + "f" * 400 + ">"]),
        (minicpm("nope", s="x"), [minicpm("nope", s="x")]),
        ("<functional> is no name", ["<functional> is no name"]),
        ("<function\nname='f'><param  name='s'>x</param></function>", [("f", '{"s": "x"}')]),
        ('<function name="f"><param name="s"><![CDATA[</param>]]]></param></function>', [("f", '{"s": "</param>]"}')]),
        ('<function name="f"><param name="s"><![CDAT</param>', [("f", '{"s": "<![CDAT"')]),
        ('<function name="f"><param name="s">x<param name="i">5</function>', [("f", '{"s": "x", "i": 5}')]),
        ('<function name="f"><param name="s"><![CDATA[x]]', [("f", '{"s": "x')]),
        # ends that were left out
        ("<tool_call><function=f><parameter=s>x<parameter=i>5", [("f", '{"s": "x<parameter=i>5')]),
        ("<tool_call><function=f><parameter=s>\nx\n<parameter=i>\n5\n</function>", [("f", '{"s": "x", "i": 5}')]),
        ("<tool_call><function=f><parameter=i>5\n</tool_call>\nok", [("f", '{"i": 5}'), "ok"]),
        ("<tool_call><function=f></function><function=g></function></tool_call>ok", [("f", "{}"), ("g", "{}"), "ok"]),
        (f"<tool_call><function=f>\n{qwen('g', x=1)}", [("f", "{}"), ("g", '{"x": "1"}')]),
        ("<tool_call><function=f>\nwell <b> no", [("f", "{}"), "well <b> no"]),
        # answers that were cut off
        ("<tool_call><function=f><parameter=s>\nx\n</para", [("f", '{"s": "x')]),
        ("<tool_call><function=f><parameter=s>\nx\n</parameter>\n", [("f", '{"s": "x"')]),
        ("<tool_call><function=f><parameter=s>\nx\n</parameter>\n<param", [("f", '{"s": "x"')]),
        ("<tool_call><function=f><parameter=i>\n5", [("f", '{"i": ')]),
        ("<tool_call><function=f><parameter=i>\n5\n</parameter>\n</funct", [("f", '{"i": 5}')]),
        # JSON, as a grammar for forced calls has it
        ('<tool_call>\n{"name": "f", "arguments": {"s": "<parameter="}}\n', [("f", '{"s": "<parameter="}')]),
    ],
)  # fmt: skip
def test_forms(text, expected):
    assert found(text) == expected


PIECES = (
    "<tool_call>", "</tool_call>", "<function=f>", "<function=no>", "</function>", "<parameter=s>", "<parameter=i>",
    "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<function name="f">', '<param name="s">',
    "</param>", "<![CDATA[", "]]>", "f", "s", "5", '{"name": "f"}', "\n", " ", "<", ">", '"', "é🙂", "x" * 300,
    qwen("f", s="x", i="5"), glm("f", s="x", i="5"), minicpm("f", s="<", i="5"),
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join), st.lists(st.integers(0, 10**6), max_size=20))
def test_a_split_changes_nothing(text, points):
    for offered in (OFFERED, None):
        whole = parse([text], HERMES, offered=offered)
        assert parse(split(text, points), HERMES, offered=offered) == whole
        assert parse(text, HERMES, offered=offered) == whole, "character by character"
        if not any(isinstance(delta, ToolCallDelta) for delta in whole):
            assert "".join(delta.text for delta in whole) == text


TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\n"\\<{'), max_size=12).filter(
    lambda text: not any(tag in text for tag in ("<param", "</", "<![CDATA[", "]]>"))
)


@given(st.dictionaries(st.sampled_from("sia"), TEXTS))
def test_texts_come_back_as_they_were(values):
    for written in (qwen, glm, minicpm):
        ((_, text),) = found(written("g", **values))
        assert json.loads(text) == values


def test_strings_stream_while_they_come():
    parser = make_parser(tools=HERMES, offered=OFFERED)
    (start,) = parser.feed("<tool_call>\n<function=f>\n<param")
    assert isinstance(start, ToolCallDelta) and start.name == "f"
    assert parser.feed("eter=s>") == [ArgumentsDelta(0, '{"s": "')]
    assert parser.feed('\nsome "te') == [ArgumentsDelta(0, 'some \\"te')]
    assert parser.feed("xt\n") == [ArgumentsDelta(0, "xt")]
    assert parser.feed("</parameter>\n<parameter=i>\n") == [ArgumentsDelta(0, '", "i": ')]
    assert parser.feed("5") == [] and parser.feed("\n</parameter>") == [ArgumentsDelta(0, "5")]
    assert parser.feed("\n</function>\n</tool_call>") == [ArgumentsDelta(0, "}")]
    assert parser.finish() == []


def test_types_of_properties():
    assert types_of(None, "x") == types_of({}, "x") == types_of(SCHEMA, "gone") == {"string"}
    assert types_of({"additionalProperties": {"type": "integer"}}, "x") == {"integer"}
    assert types_of(SCHEMA, "e") == {"integer", "string"} and types_of(SCHEMA, "sn") == {"string", "null"}
    itself = {"anyOf": [{"$ref": "#/properties/x"} for _ in range(50)] + [{"type": "null"}]}
    assert types_of({"properties": {"x": itself}}, "x") == {"null"}
    for hostile in (
        "[" * 100_000,
        "[" + "-" * 100_000 + "1]",
        "[" + "9" * 10_000 + "]",
        "[1e999]",
        "[" + "0," * 50_000,
    ):
        assert as_json(hostile, frozenset({"array"})) in (json.dumps(hostile), hostile)
