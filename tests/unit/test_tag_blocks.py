"""Calls whose parameters stand in tags, in the blocks of Seed-OSS, MiniMax M2, DeepSeek V3.2 and Hunyuan 3."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsers import ArgumentsDelta, Reasoning, ToolCallDelta, ToolFormat, make_parser
from common.parsers.reasoning import SEED as SEED_TAGS
from tests.helpers_parsers import parse, shown, split
from tests.unit.test_tagged_calls import OFFERED, TEXTS

SEED, MINIMAX, DSML, HUNYUAN = ToolFormat.SEED, ToolFormat.MINIMAX, ToolFormat.DSML, ToolFormat.HUNYUAN3


def seed(*calls):
    return "\n".join(f"<seed:tool_call>\n{each}\n</seed:tool_call>" for each in map(seed_call, calls))


def seed_call(call):
    body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in call[1].items())
    return f"<function={call[0]}>\n{body}</function>"


def minimax(*calls):
    return f"<minimax:tool_call>\n{''.join(map(minimax_call, calls))}</minimax:tool_call>"


def minimax_call(call):
    body = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in call[1].items())
    return f'<invoke name="{call[0]}">\n{body}</invoke>\n'


def dsml(*calls):
    return f"<｜DSML｜function_calls>\n{''.join(map(dsml_call, calls))}</｜DSML｜function_calls>"


def dsml_call(call, string=None):
    kind = "" if string is None else f' string="{string}"'
    each = (f'parameter name="{key}"{kind}>{value}</｜DSML｜parameter>' for key, value in call[1].items())
    body = "".join(f"<｜DSML｜{parameter}\n" for parameter in each)
    return f'<｜DSML｜invoke name="{call[0]}">\n{body}</｜DSML｜invoke>\n'


def hunyuan(*calls):
    body = "".join(map(hunyuan_call, calls))
    return f"<tool_calls:opensource>\n{body}</tool_calls:opensource>"


def hunyuan_call(call):
    name, values = call
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    text = f"<tool_call>{name}<tool_sep>\n{''.join(pairs)}</tool_call>\n"
    for tag in ("tool_call", "tool_sep", "arg_key", "arg_value"):
        text = text.replace(f"{tag}>", f"{tag}:opensource>")
    return text


FORMATS = {seed: SEED, minimax: MINIMAX, dsml: DSML, hunyuan: HUNYUAN}


def found(text, tools, **more):
    result = shown(parse([text], tools, offered=OFFERED, **more))
    assert shown(parse(text, tools, offered=OFFERED, **more)) == result, "character by character"
    return result


@pytest.mark.parametrize("written", FORMATS)
@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({}, {}),
        ({"s": 'q"uo\\te <b> {"a"} é🙂'}, {"s": 'q"uo\\te <b> {"a"} é🙂'}),
        ({"s": "", "n": "1.50", "b": "True"}, {"s": "", "n": 1.5, "b": True}),
        ({"s": "  a\n\nb"}, {"s": "  a\n\nb"}),
        ({"s": "null", "sn": "null", "i": "five"}, {"s": "null", "sn": None, "i": "five"}),
        ({"o": '{"x": [1, "}</"]}', "a": "[1,\n2]", "si": "7"}, {"o": {"x": [1, "}</"]}, "a": [1, 2], "si": 7}),
        ({"other": "5"}, {"other": "5"}),
    ],
)
def test_values_are_what_their_schema_says(written, values, arguments):
    ((name, text),) = found(f"\n{written(('f', values))}\n", FORMATS[written])
    assert name == "f" and json.loads(text) == arguments
    several = written(("f", values), ("nope", {"x": 1}), ("g", {}))
    two = [(name, text), ("nope", '{"x": "1"}'), ("g", "{}")]
    assert found(f"Hm.\n\n{several}\nDone.", FORMATS[written]) == ["Hm.", *two, "Done."]


def test_deepseek_says_itself_what_is_a_string():
    def call(value, string):
        text = f"<｜DSML｜tool_calls>\n{dsml_call(('g', {'x': value}), string)}</｜DSML｜tool_calls>"
        ((_, arguments),) = found(text, DSML)
        return json.loads(arguments)["x"]

    assert [call("5", "true"), call("5", "false"), call("5", None)] == ["5", 5, "5"]
    assert [call(v, "false") for v in ("true", "null", '{"a": [1]}', "oops")] == [True, None, {"a": [1]}, "oops"]


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [
        (MINIMAX, "<minimax:tool_call>", ["<minimax:tool_call>"]),
        (MINIMAX, "<minimax:tool_call>x</minimax:tool_call>", ["<minimax:tool_call>x</minimax:tool_call>"]),
        (MINIMAX, 'Say <invoke name="nope"> so', ['Say <invoke name="nope"> so']),
        (MINIMAX, '<invoke name="f"></invoke>', [("f", "{}")]),
        (
            MINIMAX,
            '<minimax:tool_call><invoke name="f"></invoke>\nas in <invoke name="nope"></invoke>',
            [("f", "{}"), 'as in <invoke name="nope"></invoke>'],
        ),
        (MINIMAX, '<minimax:tool_call><invoke name="f"><parameter name="s">x</para', [("f", '{"s": "x')]),
        (MINIMAX, '<minimax:tool_call><invoke name="f"><parameter name="s">x\n</invoke>y', [("f", '{"s": "x"}'), "y"]),
        (MINIMAX, f"{minimax(('f', {}))}{minimax(('g', {}))}", [("f", "{}"), ("g", "{}")]),
        (SEED, "<seed:tool_call>oops</seed:tool_call>", ["<seed:tool_call>oops</seed:tool_call>"]),
        (SEED, "<tool_call>\n<function=nope>", ["<tool_call>\n<function=nope>"]),
        (SEED, "<seed:tool_call><function=f><parameter=i>5\n</seed:tool_call>ok", [("f", '{"i": 5}'), "ok"]),
        (DSML, dsml(), [dsml()]),
        (DSML, "<｜DSML｜function_calls><｜DSML｜invoke name=", ["<｜DSML｜function_calls><｜DSML｜invoke name="]),
        (DSML, f"{dsml(('f', {}))} {dsml_call(('nope', {}))}", [("f", "{}"), dsml_call(("nope", {}))]),
        (HUNYUAN, hunyuan(("f", {}))[:47], [hunyuan(("f", {}))[:47]]),
        (HUNYUAN, hunyuan(("f", {"s": "x"}))[:-70], [("f", '{"s": "x')]),
        (HUNYUAN, hunyuan_call(("nope", {})), [hunyuan_call(("nope", {}))]),
    ],
)  # fmt: skip
def test_forms(tools, text, expected):
    assert found(text, tools) == expected


def test_a_call_ends_reasoning_that_was_not_closed():
    for written in (minimax, dsml):
        text = f"hm\n{written(('f', {}))}"
        assert found(text, FORMATS[written], reasoning=Reasoning.OPENED) == [("think", "hm"), ("f", "{}")]
    text = f"<seed:think>hm <think></seed:think>\n{seed(('f', {}))}"
    assert found(text, SEED, reasoning=Reasoning.TAGS, tags=SEED_TAGS) == [("think", "hm <think>"), ("f", "{}")]


PIECES = (
    "<seed:tool_call>", "</seed:tool_call>", "<function=f>", "<parameter=s>", "</parameter>", "</function>",
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "<invoke name='no'>", '<parameter name="i">',
    "</invoke>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="f">', '<｜DSML｜invoke name="no">', '<｜DSML｜parameter name="i" string="false">',
    '<｜DSML｜parameter name="s" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>",
    "5", '{"name": "f"}', "\n", " ", "<", ">", '"', "é🙂", "x" * 300, "</think>",
    "<tool_calls:opensource>", "<tool_call:opensource>", "f<tool_sep:opensource>", "<arg_value:opensource>",
    "</arg_value:opensource>", hunyuan(("f", {"i": "5"})),
    seed(("f", {"s": "x"})), minimax(("f", {"i": "5"})), dsml(("f", {"i": "5"})),
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join), st.lists(st.integers(0, 10**6), max_size=20))
def test_a_split_changes_nothing(text, points):
    for tools in FORMATS.values():
        for more in ({"offered": OFFERED}, {"reasoning": Reasoning.OPENED}):
            whole = parse([text], tools, **more)
            assert parse(split(text, points), tools, **more) == whole
            assert parse(text, tools, **more) == whole, "character by character"
        whole = parse([text], tools)
        if not any(isinstance(delta, ToolCallDelta) for delta in whole):
            assert "".join(delta.text for delta in whole) == text


@given(st.dictionaries(st.sampled_from("sia"), TEXTS))
def test_texts_come_back_as_they_were(values):
    for written, tools in FORMATS.items():
        ((_, text),) = found(written(("g", values)), tools)
        assert json.loads(text) == values


def test_strings_stream_while_they_come():
    parser = make_parser(tools=MINIMAX, offered=OFFERED)
    (start,) = parser.feed('<minimax:tool_call>\n<invoke name="f">\n<param')
    assert isinstance(start, ToolCallDelta) and start.name == "f"
    assert parser.feed('eter name="s">some') == [ArgumentsDelta(0, '{"s": "some')]
    assert parser.feed(" text</para") == [ArgumentsDelta(0, " text")]
    assert parser.feed("meter>\n</invoke>") == [ArgumentsDelta(0, '"}')]
    assert parser.feed("\n</minimax:tool_call>") == parser.finish() == []
