"""Calls that a model may make: they are of the offered tools, and what is around them is whatever it wants to say."""

import json

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from common.parsers import (
    ArgumentsDelta,
    ContentDelta,
    Reasoning,
    ToolCallDelta,
    ToolFormat,
    make_parser,
    offer_calls,
)
from common.sampling_params import Grammar
from tests.helpers_grammars import EOS, PADDING, draw_answers, draw_step, enter, make_matchers, straddling, text_of
from worker_proc.grammar_matcher import GrammarMatchers

ADD = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}, "deep": {"$ref": "#"}}, "required": ["n"],
       "additionalProperties": False, "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}}  # fmt: skip
TOOLS = [("add", ADD), ("free", {}), ("none", None)]
PERSON = {"type": "object", "properties": {"age": {"$ref": "#/$defs/age"}}, "required": ["age"],
          "additionalProperties": False, "$defs": {"age": {"type": "integer"}}}  # fmt: skip
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def call(arguments: str, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def with_marks() -> Tokenizer:
    """Marks are tokens, as in Qwen's tokenizers."""
    tokenizer = Tokenizer.from_str(straddling().to_str())
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    return tokenizer


@pytest.fixture(scope="module", params=[straddling, with_marks], ids=["letters", "marks"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.param()
    return found


@pytest.fixture(scope="module")
def matchers(tokenizer: Tokenizer) -> GrammarMatchers:
    return make_matchers(tokenizer)


def ends(matchers: GrammarMatchers, tokenizer: Tokenizer, grammar: Grammar, answer: str) -> bool:
    """Whether an answer may be this and no more. Each of its tokens is what the model wants next."""
    enter(matchers, 0, grammar)
    for token in [*tokenizer.encode(answer).ids, EOS]:
        logits = torch.zeros(1, tokenizer.get_vocab_size() + PADDING)
        logits[0, token] = 1000.0
        drawn, problems = draw_step(matchers, [0], logits)
        assert not problems
        if drawn != [token]:
            break
    matchers.leave([0])
    return drawn == [EOS] and token == EOS


@pytest.mark.parametrize(
    ("answer", "may"),
    [
        ("", True),
        ("No tool is of use: {<tool and <tool_cal", True),
        (call('{"n": 5}'), True),
        ("Let me see.\n\n" + call('{"n": 5}') + "\n" + call('{"n": 6, "deep": {"n": 7}}') + "\n", True),
        (call('{"n": 5}') + " is what I asked.", True),
        ('<tool_call>{"name":"add","arguments":{"n":5}}</tool_call>', True),
        (call('{"any": [1]}', "free") + call("{}", "none"), True),
        (call("[]", "free"), False),
        (call('{"n": 5}', "none"), False),
        (call('{"n": 5}', "other"), False),
        (call('{"n": 100}'), False),
        ("So: " + call('{"n": 5}') + call("{}"), False),
        ("<tool_call>", False),
        ("a <tool_call> is what I do not make", False),
    ],
)
def test_text_and_calls(matchers: GrammarMatchers, tokenizer: Tokenizer, answer: str, may: bool) -> None:
    assert ends(matchers, tokenizer, offer_calls(TOOLS, Reasoning.NONE), answer) == may


@pytest.mark.parametrize(
    ("answer", "may"),
    [
        ('{"age": 5}', True),
        (call('{"n": 5}'), True),
        (call('{"n": 5}') + "\n" + call("{}", "free"), True),
        ("", False),
        ("Well", False),
        ('{"age": "5"}', False),
        (call('{"n": 5}') + '{"age": 5}', False),
        (call('{"n": "5"}'), False),
    ],
)
def test_json_or_calls(matchers: GrammarMatchers, tokenizer: Tokenizer, answer: str, may: bool) -> None:
    assert ends(matchers, tokenizer, offer_calls(TOOLS, Reasoning.NONE, PERSON), answer) == may


@pytest.mark.parametrize(
    ("answer", "may"),
    [
        ("Without a thought.", True),
        (call('{"n": 5}'), True),
        (call('{"n": 500}'), False),
        ("\n<think>a <tool_call> is no call here</think>\n\nSo: " + call('{"n": 5}') + call('{"n": 6}'), True),
        ("<think>hm</think>" + call('{"n": 500}'), False),
        ("<think>hm</think></think>" + call('{"n": 5}') + call('{"n": 500}'), False),
        ("<think>a <tool_call> that is cut off", True),
        ("No <think>a <tool_call></think>", False),
    ],
)
def test_thoughts_are_told_from_text(matchers: GrammarMatchers, tokenizer: Tokenizer, answer: str, may: bool) -> None:
    assert ends(matchers, tokenizer, offer_calls(TOOLS, Reasoning.TAGS), answer) == may


@pytest.mark.parametrize("reasoning", list(Reasoning)[:3])
@pytest.mark.parametrize("schema", [None, PERSON], ids=["text", "json"])
def test_what_is_drawn_is_read_back(
    matchers: GrammarMatchers, tokenizer: Tokenizer, reasoning: Reasoning, schema: dict[str, object] | None
) -> None:
    """A call is begun in every second answer; in its thoughts a model may write what it likes."""
    thoughts = f"I could {MARKS[2]} nothing"
    thought = {
        Reasoning.NONE: "",
        Reasoning.TAGS: f"<think>{thoughts}</think>",
        Reasoning.OPENED: f"{thoughts}</think>",
    }
    grammar = offer_calls(TOOLS[:1], reasoning, schema)
    begun = {slot: thought[reasoning] + MARKS[2] * (slot % 2) for slot in range(8)}
    for slot, text in begun.items():
        enter(matchers, slot, grammar, tokenizer.encode(text).ids)
    vocabulary = tokenizer.get_vocab_size() + PADDING
    answers = draw_answers(matchers, list(begun), vocabulary, seed=3, most=800)
    matchers.leave(list(begun))
    called = 0
    for slot, tokens in answers.items():
        text = begun[slot] + text_of(tokens, tokenizer)
        if tokens[-1] != EOS:  # what goes on for ever is read to its last call
            text = text[: text.rfind(MARKS[3]) + len(MARKS[3])] if MARKS[3] in text else ""
        if not text:
            continue
        parser = make_parser(tools=ToolFormat.HERMES, offered={"add": None}, reasoning=reasoning)
        deltas = [*parser.feed(text), *parser.finish()]
        content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
        arguments: dict[int, str] = {}
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                arguments[delta.index] = ""
            elif isinstance(delta, ArgumentsDelta):
                arguments[delta.index] += delta.text
        called += bool(arguments)
        assert arguments or slot % 2 == 0
        for written in arguments.values():
            jsonschema.validate(json.loads(written), ADD)
        if schema is not None and not arguments:
            jsonschema.validate(json.loads(content), PERSON)
    assert called
