"""Calls in Python's notation: Llama 4's, LFM2's and Olmo 3's."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsers import ArgumentsDelta, ToolCallDelta, ToolFormat, make_parser
from tests.helpers_parsers import parse, shown, split

PYTHONIC = ToolFormat.PYTHONIC
OFFERED = {"f": {"type": "object", "properties": {"s": {"type": "string"}}}, "g": None}
MARK, END = "<|tool_call_start|>", "<|tool_call_end|>"
OPEN, CLOSE = "<function_calls>", "</function_calls>"


def found(text, **more):
    more.setdefault("offered", OFFERED)
    result = shown(parse([text], PYTHONIC, **more))
    assert shown(parse(text, PYTHONIC, **more)) == result, "character by character"
    return result


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", "{}"),
        ("s='x'", '{"s": "x"}'),
        ("a=1, b=-2.5e3 ,c = True,d=False,e=None,\n", '{"a": 1, "b": -2.5e3, "c": true, "d": false, "e": null}'),
        ("a=true, b=null, c=+5, d=.5, e=1_000, f=0x1F, g=07",
         '{"a": true, "b": null, "c": 5, "d": 0.5, "e": 1000, "f": 31, "g": 7}'),
        ("s=07030, zip=07030, x=1e999999, y=nan", '{"s": "07030", "zip": 7030, "x": 1e999999, "y": "nan"}'),
        ("""a="it's", b='say "hi"'""", '{"a": "it\'s", "b": "say \\"hi\\""}'),
        (r"a='it\'s \n \t \\ \x41\101\u00e9\U0001f600\z\a'", '{"a": "it\'s \\n \\t \\\\ AAé😀\\\\z\\u0007"}'),
        (r"a='\ud83d\ude00'", r'{"a": "\ud83d\ude00"}'),
        ("a='one\ntwo\\\nthree'", '{"a": "one\\ntwothree"}'),
        ("a='''it's \"q\"''', b=\"\"\"x\"\"\", c='', d=''", '{"a": "it\'s \\"q\\"", "b": "x", "c": "", "d": ""}'),
        (r"a=r'\d\'', b=f'x', c=b'y'", r'''{"a": "\\d\\'", "b": "x", "c": "y"}'''),
        ("a='sed -n '1,9p' f.py'", '{"a": "sed -n \'1,9p\' f.py"}'),
        ("a=[1, 'b', [], (2, {'k': (True,)})], b={}", '{"a": [1, "b", [], [2, {"k": [true]}]], "b": {}}'),
        ('a={"k": "it\'s: 5", \'m\': {1: 2}}', '{"a": {"k": "it\'s: 5", "m": {"1": 2}}}'),
        ("from='a', größe=5, b=celsius", '{"from": "a", "größe": 5, "b": "celsius"}'),
    ],
)  # fmt: skip
def test_arguments(written, arguments):
    call = f"f({written})"
    for text in (f"[{call}]", f"{MARK}[{call}]{END}", f"{OPEN}\n{call}\n{CLOSE}"):
        assert found(text) == [("f", arguments)]
    json.loads(arguments)
    two = [("f", arguments), ("g", '{"x": "y"}')]
    assert found(f"[{call}, g(x='y')]") == two
    assert found(f"Hm.\n{MARK}[{call},\ng(x='y'),] {END}\nDone.") == ["Hm.", *two, "Done."]
    assert found(f"Hm.\n{OPEN}{call}\ng(x='y')\n{CLOSE}\n\nDone.") == ["Hm.", *two, "Done."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # without a mark, offered tools alone and only at the beginning
        (" [f(a=1)]\n", [("f", '{"a": 1}')]),
        ("[nope(a=1)]", ["[nope(a=1)]"]),
        (f"{MARK}[nope.x-y(a=1)]{END}", [("nope.x-y", '{"a": 1}')]),
        ("So [f(a=1)]", ["So [f(a=1)]"]),
        ("[f(x)](http://f)", ["[f(x)](http://f)"]),
        ("[1, 2]", ["[1, 2]"]),
        ("f(a=1)", ["f(a=1)"]),
        ("[f(a=1)] and more", [("f", '{"a": 1}'), "and more"]),
        ("[f(), and more", [("f", "{}"), ", and more"]),
        ("<|python_start|>[f(a=1)]<|python_end|>", [("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g"}', [("f", '{"a": 1}'), ("g", "{}")]),
        ('{"name": "Bob"}', ['{"name": "Bob"}']),
        (f'{MARK}[{{"name": "f", "arguments": {{"a": 1}}}}, {{"name": "g"}}]{END}ok',
         [("f", '{"a": 1}'), ("g", "{}"), "ok"]),
        (f"{MARK}f(a=1){END}{MARK}g(){END}", [("f", '{"a": 1}'), ("g", "{}")]),
        # no calls
        (f"{MARK}[]{END}", [f"{MARK}[]{END}"]),
        (f"{MARK} hello", [f"{MARK} hello"]),
        (f"{MARK}[f('x')]", [f"{MARK}[f('x')]"]),
        (f"{MARK}[f(**x)]", [f"{MARK}[f(**x)]"]),
        (f"a {CLOSE} b", [f"a {CLOSE} b"]),
        (f"{OPEN}\n" + "f" * 300 + "()", [f"{OPEN}\n" + "f" * 300 + "()"]),
        # arguments that are none: they end where they break
        (f"{MARK}[f(a=g(1))]{END}", [("f", '{"a": '), "g(1))]"]),
        (f"{MARK}[f(a='x'; b=2)]", [("f", '{"a": "x\'; b=2)]')]),
        ("[f(a=" + "[" * 100_000, [("f", '{"a": ' + "[" * 99), "[" * 99_901]),
        ("[f(a=" + "9" * 2000 + ")]", [("f", '{"a": '), "9" * 2000 + ")]"]),
        # answers that were cut off
        (MARK, [MARK]),
        (f"{MARK}[f(", [f"{MARK}[f("]),
        ("[f(a", ["[f(a"]),
        ("[f(a=", [("f", '{"a": ')]),
        ("[f(a='x\\", [("f", '{"a": "x')]),
        ("[f(a='x'", [("f", '{"a": "x"')]),
        ("[f(a=1", [("f", '{"a": ')]),
        ("[f(a=1), ", [("f", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_forms(text, expected):
    assert found(text) == expected


def test_a_list_that_is_forced():
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert found(text, forced=True) == [("f", '{"a": 1}'), ("g", "{}")]


PIECES = (
    MARK, END, OPEN, CLOSE, "[", "]", "(", ")", "{", "}", "f", "g(", "f(a=", "b=", "a", "=", ":", ",", ";", "'", '"',
    "'''", "\\", "\\u0041", "\\12", "1", "True", "r'", " ", "\n", "é🙂", "<", '{"name": "f"}', "x" * 300,
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
POINTS = st.lists(st.integers(0, 10**6), max_size=20)


@given(TEXTS | TEXTS.map(lambda text: "[f(a=" + text), POINTS)
def test_a_split_changes_nothing(text, points):
    for offered in (OFFERED, None):
        whole = parse([text], PYTHONIC, offered=offered)
        assert parse(split(text, points), PYTHONIC, offered=offered) == whole
        assert parse(text, PYTHONIC, offered=offered) == whole, "character by character"
        if not any(isinstance(delta, ToolCallDelta) for delta in whole):
            assert "".join(delta.text for delta in whole) == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("'\"\\\n,)"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(st.dictionaries(st.from_regex(r"\A[a-z]{1,4}\Z"), VALUES), min_size=1, max_size=3), POINTS)
def test_what_python_writes_comes_back(calls, points):
    """Whatever Python's own repr makes of values is read as Python reads it."""
    written = [f"g({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for arguments in calls]
    for text in (f"[{', '.join(written)}]", OPEN + "\n".join(written) + CLOSE):
        back = [(name, json.loads(arguments)) for name, arguments in shown(parse(split(text, points), PYTHONIC))]
        assert back == [("g", arguments) for arguments in calls]
    for arguments in calls:
        assert ast.literal_eval(repr(arguments)) == arguments


def test_arguments_stream_while_they_come():
    parser = make_parser(tools=PYTHONIC)
    assert parser.feed("[f(") == []
    start, first = parser.feed("a='some")
    assert isinstance(start, ToolCallDelta) and start.name == "f" and first == ArgumentsDelta(0, '{"a": "some')
    assert parser.feed(" text'") == [ArgumentsDelta(0, " text")]
    assert parser.feed(", b=1") == [ArgumentsDelta(0, '", "b": ')]
    assert parser.feed("5)]") == [ArgumentsDelta(0, "15}")]
    assert parser.finish() == []
