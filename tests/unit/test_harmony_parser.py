"""Answers in OpenAI's harmony format: what is found in them, however their text is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsers import (
    ArgumentsDelta,
    ContentDelta,
    Reasoning,
    ReasoningDelta,
    ToolCallDelta,
    ToolFormat,
    make_parser,
    needs_special_tokens,
)
from tests.helpers_parsers import parse, shown, split

HARMONY = ToolFormat.HARMONY
CHANNEL = Reasoning.CHANNEL
THOUGHT = "<|channel|>analysis<|message|>We see.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ARGUMENTS = '{"city": "Köln", "x": "<|b|>"}'
TO_F = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
PIECES = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>", "assistant",
    "analysis", "commentary", "final", " to=functions.f", "to=", "functions.", "json", "<|start|>assistant", THOUGHT,
    FINAL, TO_F, ARGUMENTS, "<", "<|", "|>", " ", "\n", "é🙂", "text", "word " * 60, "x" * 130,
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
POINTS = st.lists(st.integers(0, 10**6), max_size=20)
TOOLS = st.sampled_from([None, HARMONY])


@given(TEXTS, POINTS, TOOLS, st.booleans(), st.booleans())
def test_a_split_changes_nothing(text, points, tools, together, verbatim):
    options = {"together": together, "verbatim": verbatim}
    whole = parse([text], tools, CHANNEL, **options)
    assert parse(split(text, points), tools, CHANNEL, **options) == whole
    assert parse(text, tools, CHANNEL, **options) == whole, "character by character"


@given(st.text(max_size=40).filter(lambda text: "<|" not in text).map(lambda text: text + ".."), TOOLS)
def test_an_answer_without_headers_is_content(text, tools):
    assert parse(text, tools, CHANNEL) == [ContentDelta(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}{FINAL}Yes.\n", [("think", "We see."), "Yes.\n"]),
        (f"{THOUGHT}{FINAL}Yes.<|return|>", [("think", "We see."), "Yes."]),
        (f"<|start|>assistant{THOUGHT} \n{FINAL}Yes.", [("think", "We see."), "Yes."]),
        ("<|channel|>final<|message|>Yes.", ["Yes."]),
        (f"{THOUGHT}{THOUGHT}{FINAL}Yes.", [("think", "We see.\n\nWe see."), "Yes."]),
        (f"{THOUGHT}{TO_F}{ARGUMENTS}<|call|>", [("think", "We see."), ("f", ARGUMENTS)]),
        (f"{THOUGHT}{TO_F}{ARGUMENTS}", [("think", "We see."), ("f", ARGUMENTS)]),
        (f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{TO_F}{{}}<|call|>{FINAL}Done.",
         [("think", "We see."), "I look.", ("f", "{}"), "\n\nDone."]),
        (" to=functions.f<|channel|>commentary json<|message|>{}", [("f", "{}")]),
        ("<|start|>assistant to=functions.f<|channel|>commentary<|message|> {}", [("f", "{}")]),
        ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}", [("f", "{}")]),
        ("<|channel|>commentary to=functions.f<|channel|>json<|message|>{}", [("f", "{}")]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [("python", "print(1)")]),
        ("<|channel|>commentary to=browser.search json<|message|>{}", [("browser.search", "{}")]),
        ("<|channel|>commentary to=f.g json<|message|>{}<|end|>" + TO_F + "[]", [("f.g", "{}"), ("f", "[]")]),
        ("<|channel|>commentary to=functions.f json<|message|><|call|>", [("f", "{}")]),
        ("<|channel|>commentary to=assistant<|message|>hm", ["hm"]),
        ("<|channel|>commentary to=functions.<|message|>hm", ["hm"]),
        ("<|channel|>other<|message|>hm", ["hm"]),
        ("<|message|>hm<|end|>", ["hm"]),
    ],
)  # fmt: skip
def test_messages(text, expected):
    assert shown(parse([text], HARMONY, CHANNEL)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("<|channel|>", []),
        ("<|channel|>anal", []),
        (" to=functions.f", []),
        ("<|channel|>analysis<|message|>We s", [("think", "We s")]),
        (THOUGHT, [("think", "We see.")]),
        (f"{THOUGHT}<|start|>", [("think", "We see.")]),
        (f"{THOUGHT}<|start|>assistant<|channel|>fin", [("think", "We see.")]),
        (f"{THOUGHT}{FINAL}", [("think", "We see.")]),
        (f"{THOUGHT}{FINAL}Ye", [("think", "We see."), "Ye"]),
        (f"{THOUGHT}<|start|>assistant to=functions.f<|channel|>comm", [("think", "We see.")]),
        (f"{THOUGHT}{TO_F}", [("think", "We see."), ("f", "{}")]),
        (f'{THOUGHT}{TO_F}{{"ci', [("think", "We see."), ("f", '{"ci')]),
    ],
)
def test_answers_that_are_cut_off(text, expected):
    for pieces in ([text], text):
        assert shown(parse(pieces, HARMONY, CHANNEL)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "A header is <|start|> a role, <|message|> and so on.",
        "It begins with <|channel|> and ends with <|message|>.",
        "`<|start|>`, `<|channel|>` and `<|message|>`",
        "<|constrain|> and <|message|>",
        "<|channel|>final" + " word" * 60,
        "a < b <|en",
    ],
)
def test_what_only_looks_like_a_header_is_text(text):
    assert shown(parse([FINAL + text], HARMONY, CHANNEL)) == [text]
    assert shown(parse(["<|channel|>analysis<|message|>" + text], None, CHANNEL)) == [("think", text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|channel|>analysis<|message|>hm{FINAL}Yes.", [("think", "hm"), "Yes."]),  # without an end
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Yes.", [("think", "hm"), "Yes."]),
        (f"<|channel|>analysis<|end|>{FINAL}Yes.", ["Yes."]),
        (f"<|channel|>analysis<|start|>assistant{THOUGHT}{FINAL}Yes.", [("think", "We see."), "Yes."]),
        (f"{THOUGHT}Yes.", [("think", "We see."), "Yes."]),
        ("<|start|>assistant<|channel|>final No, <b>.<|return|>", ["<|start|>assistant<|channel|>final No, <b>."]),
        ("<|channel|>final one two three<|message|>x", ["<|channel|>final one two three<|message|>x"]),
        ("<|channel|>commentary to=a to=b <|constrain|><|constrain|><|message|>x", [("a", "x")]),
        ("to=5 is the answer", ["to=5 is the answer"]),
        ("to", ["to"]),
        ("<|end|><|return|><|call|>", []),
    ],
)  # fmt: skip
def test_malformed_headers(text, expected):
    for pieces in ([text], text):
        assert shown(parse(pieces, HARMONY, CHANNEL)) == expected


def test_calls_are_as_the_model_wrote_them():
    """Their headers are text, too; those of reasoning and answers are not."""
    call = f"{TO_F}{ARGUMENTS}<|call|>"
    for text, expected in (
        (THOUGHT + call, TO_F + ARGUMENTS),
        (f"{THOUGHT}{FINAL}Let me see.<|end|>{call}", f"Let me see.\n\n{TO_F}{ARGUMENTS}"),
        (call.removeprefix("<|start|>assistant"), TO_F.removeprefix("<|start|>assistant") + ARGUMENTS),
    ):
        for pieces in ([text], text):
            found = parse(pieces, None, CHANNEL, verbatim=True)
            assert "".join(delta.text for delta in found if isinstance(delta, ContentDelta)) == expected


def test_without_tools_calls_are_text_and_reasoning_can_be_too():
    text = f"{THOUGHT}{TO_F}{{}}<|call|>{FINAL}Done."
    assert shown(parse([text], None, CHANNEL)) == [("think", "We see."), "{}\n\nDone."]
    assert shown(parse([text], None, CHANNEL, together=True)) == ["We see.\n\n{}\n\nDone."]
    assert shown(parse([text], HARMONY, CHANNEL, together=True)) == ["We see.", ("f", "{}"), "\n\nDone."]
    assert needs_special_tokens(None, CHANNEL)


def test_what_has_come_is_passed_on_at_once():
    parser = make_parser(tools=HARMONY, reasoning=CHANNEL, new_id=lambda: "id")
    assert parser.feed("<|channel|>") + parser.feed("analysis") == []
    assert parser.feed("<|message|>") == []
    assert parser.feed("We ") == [ReasoningDelta("We ")]
    assert parser.feed("see.") == [ReasoningDelta("see.")]
    assert parser.feed("<|end|>") + parser.feed("<|start|>") + parser.feed("assistant") == []
    assert parser.feed(" to=functions.f<|channel|>commentary json<|message|>") == [ToolCallDelta(0, "id", "f")]
    assert parser.feed('{"a') == [ArgumentsDelta(0, '{"a')]
    assert parser.feed('": 1}') == [ArgumentsDelta(0, '": 1}')]
    assert parser.finish() == [] and parser.called


TEXT = st.text(min_size=1, max_size=12).filter(lambda text: "<" not in text and not text.isspace())
NAME = st.from_regex(r"[A-Za-z_][\w.-]{0,20}", fullmatch=True).filter(lambda name: not name.startswith("functions."))
CALL = st.tuples(NAME, st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8), max_size=3))


@given(st.lists(st.tuples(st.just("think"), TEXT) | TEXT | CALL, max_size=5), st.booleans(), POINTS)
def test_messages_come_back_as_they_were(messages, recipient_first, points):
    text = ""
    for message in messages:
        match message:
            case "think", str(thought):
                text += f"<|channel|>analysis<|message|>{thought}<|end|>"
            case str():
                text += f"<|channel|>final<|message|>{message}<|end|>"
            case name, arguments:
                to = f" to=functions.{name}"
                before, behind = (to, "") if recipient_first else ("", to)
                text += f"{before}<|channel|>commentary{behind} <|constrain|>json<|message|>"
                text += json.dumps(arguments, ensure_ascii=False).replace("<", "\\u003c") + "<|call|>"
        text += "<|start|>assistant"
    found = shown(parse(split(text, points), HARMONY, CHANNEL))
    calls = [(name, json.loads(text)) for name, text in (m for m in found if isinstance(m, tuple)) if name != "think"]
    assert calls == [m for m in messages if isinstance(m, tuple) and m[0] != "think"]
    for kind in (str, tuple):
        expected = [
            m[1] if kind is tuple else m for m in messages if type(m) is kind and (kind is str or m[0] == "think")
        ]
        said = [m[1] if kind is tuple else m for m in found if type(m) is kind and (kind is str or m[0] == "think")]
        assert "".join(said) == "\n\n".join(expected)
