"""Grammars for answers in the harmony format, whose marks are special tokens: followed, checked and read back."""

import asyncio
import json
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from common.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from common.parsers import ContentDelta, Reasoning, ToolFormat, after_reasoning, force_call, offer_calls
from common.sampling_params import Grammar
from tests.helpers_grammars import draw_answers, draw_step, enter, straddling
from tests.helpers_parsers import parse, shown
from tokenizer_proc.grammar_check import GrammarCheck
from tokenizer_proc.limits import Refused
from worker_proc.grammar_matcher import GrammarMatchers, make_vocabulary

THOUGHT = "<|channel|>analysis<|message|>hm\n <b> é<|end|><|start|>assistant"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
NUMBERS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}, "deep": {"$ref": "#"}}, "required": ["n"],
           "additionalProperties": False, "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}}  # fmt: skip
TOOLS = [("get_weather", SCHEMA), ("math.add", NUMBERS)]
ANSWER = Grammar("choice", '["yes"]')


@cache
def harmony_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(straddling().to_str())
    marks = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer


def ids(text: str) -> list[int]:
    return list(harmony_tokenizer().encode(text).ids)


VOCAB = harmony_tokenizer().get_vocab_size()
EOS = ids(RETURN + CALL)


@pytest.fixture(scope="module")
def matchers() -> GrammarMatchers:
    tokenizer = harmony_tokenizer()
    return GrammarMatchers(lambda: make_vocabulary(tokenizer, VOCAB, EOS), VOCAB)


def next_tokens(matchers: GrammarMatchers, grammar: Grammar, text: str) -> set[str] | None:
    """The tokens that may follow a text; None where it is not the beginning of an answer."""
    enter(matchers, 0, grammar, ids(text))
    logits = torch.zeros(1, VOCAB)
    _, problems = draw_step(matchers, [0], logits)
    matchers.leave([0])
    allowed = (logits[0] > -torch.inf).nonzero().view(-1).tolist()
    return None if problems else {harmony_tokenizer().id_to_token(token) for token in allowed}


def test_an_answer_comes_in_the_final_channel(matchers: GrammarMatchers) -> None:
    grammar = after_reasoning(ANSWER, Reasoning.CHANNEL)
    for thought in ("", THOUGHT):
        text = f"{thought}<|channel|>final<|message|>yes"
        assert next_tokens(matchers, grammar, text) == {RETURN, CALL}, "both end the model's answers"
        assert next_tokens(matchers, grammar, thought) == {CHANNEL}
        assert next_tokens(matchers, grammar, text.removesuffix("yes") + "n") is None
    thinking = next_tokens(matchers, grammar, "<|channel|>analysis<|message|>a")
    assert thinking is not None and END in thinking and not thinking & {START, CHANNEL, MESSAGE, RETURN, CALL}


@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_read_back(matchers: GrammarMatchers, thought: str, parallel: bool) -> None:
    grammar = force_call(TOOLS, ToolFormat.HARMONY, parallel=parallel)
    grammar = after_reasoning(grammar, Reasoning.CHANNEL, forced=True)
    slots, headers = list(range(8)), (" to=functions.", "<|channel|>commentary to=functions.")
    begun = [thought + header + TOOLS[slot % 2][0][:2] for slot, header in zip(slots, headers * 4, strict=True)]
    for slot in slots:
        enter(matchers, slot, grammar, ids(begun[slot]))
    answers = draw_answers(matchers, slots, VOCAB, seed=11, most=150)
    matchers.leave(slots)
    complete = 0
    for slot, answer in answers.items():
        end = next((at for at, token in enumerate(answer) if token in EOS), None)
        if end is not None:
            text = begun[slot] + harmony_tokenizer().decode(answer[:end], skip_special_tokens=False)
            found = parse([text], ToolFormat.HARMONY, Reasoning.CHANNEL, forced=True)
            assert not any(isinstance(delta, ContentDelta) for delta in found)
            name, arguments = shown(found)[-1]
            jsonschema.validate(json.loads(arguments), dict(TOOLS)[name])
            complete += 1
    assert complete >= 4


def test_forced_calls_have_both_headers(matchers: GrammarMatchers) -> None:
    grammar, open_grammar = (force_call([("none", p)], ToolFormat.HARMONY) for p in (None, {}))
    for header in (" to=functions.none<|channel|>commentary json<|message|>",
                   "<|channel|>commentary to=functions.none <|constrain|>json<|message|>"):  # fmt: skip
        assert next_tokens(matchers, grammar, header + "{}") == {RETURN, CALL}, "it has no parameters"
        assert next_tokens(matchers, grammar, header + '{"any"') is None
        assert next_tokens(matchers, open_grammar, header + '{"any": [1, {"x": null}]}') == {RETURN, CALL}
        assert next_tokens(matchers, open_grammar, header + "[") is None
    assert next_tokens(matchers, grammar, "<|channel|>final") is None


CALLED = "<|channel|>commentary to=functions.math.add <|constrain|>json<|message|>"
ON = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("answer", "may", "with_format"),
    [
        ("<|channel|>final<|message|>No tool <b> is of use.", True, False),
        ("<|channel|>final<|message|>", True, False),
        ('<|channel|>final<|message|>{"city": "Ulm"}', True, True),
        ('<|channel|>final <|constrain|>json<|message|>{"city": "Ulm"}', True, True),
        (CALLED + '{"n": 5}', True, True),
        (CALLED + '{"n": 100}', False, False),
        (" to=functions.math.add<|channel|>commentary <|constrain|>json<|message|>" + '{"n": 5}', True, True),
        (" to=functions.free<|channel|>commentary json<|message|>" + '{"any": [1]}', True, True),
        (f"<|channel|>commentary<|message|>I look.{ON}" + CALLED + '{"n": 5, "deep": {"n": 7}}', True, True),
        (f"<|channel|>commentary<|message|>I look.{ON}{THOUGHT}<|channel|>final<|message|>Well", True, False),
        (CALLED.replace("math.add", "other") + "{}", False, False),
        ("<|channel|>commentary to=python code<|message|>print(1)", False, False),
        ("<|channel|>commentary<|message|>I look.", False, False),
    ],
)
def test_calls_that_may_be_made(matchers: GrammarMatchers, answer: str, may: bool, with_format: bool) -> None:
    """`with_format`: what may come beside a response_format."""
    tools = [("math.add", NUMBERS), ("free", {})]
    for grammar, expected in (
        (offer_calls(tools, Reasoning.CHANNEL), may),
        (offer_calls(tools, Reasoning.CHANNEL, SCHEMA), with_format),
    ):
        for thought in ("", THOUGHT):
            following = next_tokens(matchers, grammar, thought + answer)
            assert (following is not None and {RETURN, CALL} <= following) == expected


@pytest.mark.parametrize("tokenizer", [harmony_tokenizer(), straddling()], ids=["harmony", "other"])
def test_they_are_checked_before_they_are_used(tokenizer: Tokenizer) -> None:
    async def check() -> list[bool]:
        passed = []
        with ThreadPoolExecutor(1) as pool:
            checker = GrammarCheck(tokenizer, array("i", [0]), pool)
            for grammar, forced in ((ANSWER, False), (force_call(TOOLS, ToolFormat.HARMONY), True)):
                try:
                    await checker.check(after_reasoning(grammar, Reasoning.CHANNEL, forced=forced))
                    passed.append(True)
                except Refused as refused:
                    assert "special token" in refused.problem
                    passed.append(False)
        return passed

    assert asyncio.run(check()) == [tokenizer is harmony_tokenizer()] * 2
