"""Matchers of the worker: every answer is in its grammar, whatever the model wants to say."""

import json
import re
from datetime import date

import jsonschema
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from common.parsers import (
    ArgumentsDelta,
    ContentDelta,
    Reasoning,
    ToolCallDelta,
    ToolFormat,
    after_reasoning,
    force_call,
    make_parser,
)
from common.sampling_params import Grammar
from tests.helpers_grammars import (
    EOS,
    PADDING,
    SCHEMAS,
    as_grammar,
    draw_answers,
    draw_step,
    enter,
    make_matchers,
    straddling,
    text_of,
    vocabulary,
)
from tests.helpers_simulated_gpu import GPU, SimulatedGpu, on_gpu
from tests.helpers_simulated_gpu import on_host as on_host_tensor
from tests.helpers_tokenizers import byte_level, sentence_piece, word_piece
from worker_proc.grammar_matcher import GrammarMatchers, load_vocabulary

VOCAB = straddling().get_vocab_size() + PADDING
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def matchers() -> GrammarMatchers:
    return make_matchers()


FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date", ValueError)
def is_date(value: object) -> bool:
    """RFC 3339 has a year 0, a leap year like 2000; Python's dates begin with 1. What is no text has no format."""
    if isinstance(value, str):
        date.fromisoformat("2000" + value[4:] if value.startswith("0000") else value)
    return True


@given(st.lists(SCHEMAS, min_size=1, max_size=4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_answer_validates(matchers: GrammarMatchers, schemas: list[object], seed: int) -> None:
    """Several in one batch, and one row without a grammar."""
    slots = list(range(len(schemas)))
    for slot, schema in zip(slots, schemas, strict=True):
        enter(matchers, slot, as_grammar(schema))
    answers = draw_answers(matchers, slots, VOCAB, seed=seed)
    matchers.leave(slots)
    for slot, schema in zip(slots, schemas, strict=True):
        assume(answers[slot][-1] == EOS)
        value = json.loads(text_of(answers[slot]))
        jsonschema.validate(value, schema, format_checker=FORMATS)


@pytest.mark.parametrize("kind", [byte_level, sentence_piece, straddling])
def test_answers_validate_with_every_kind_of_tokenizer(kind) -> None:  # type: ignore[no-untyped-def]
    tokenizer = kind()
    matchers = make_matchers(tokenizer)
    for slot in range(4):
        enter(matchers, slot, as_grammar(PERSON))
    for answer in draw_answers(matchers, [0, 1, 2, 3], tokenizer.get_vocab_size() + PADDING, seed=1).values():
        assert answer[-1] == EOS
        jsonschema.validate(json.loads(text_of(answer, tokenizer)), PERSON)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", r"(ab|c)+/\d{3}\n[/]"), r"(ab|c)+/\d{3}\n[/]"),
        (Grammar("choice", '["yes", "no/", "é🙂\\n\\"q\\"", "yes please"]'), r'yes|no/|é🙂\n"q"|yes please'),
        (Grammar("lark", 'start: "a" x\nx: "(" x ")" | "b"'), r"a\(*b\)*"),
    ],
)  # fmt: skip
def test_regex_choice_and_lark(matchers: GrammarMatchers, grammar: Grammar, pattern: str) -> None:
    slots = list(range(8))
    for slot in slots:
        enter(matchers, slot, grammar)
    texts = {text_of(a) for a in draw_answers(matchers, slots, VOCAB, seed=3).values() if a[-1] == EOS}
    matchers.leave(slots)
    assert len(texts) > 1 and all(re.fullmatch(pattern, text) for text in texts), texts


def test_a_json_object_is_an_object(matchers: GrammarMatchers) -> None:
    enter(matchers, 0, Grammar("json_object"))
    seen = [draw_answers(matchers, [0], VOCAB, seed=1, most=60)[0]]
    matchers.leave([0])
    assert text_of(seen[0]).startswith("{")


def test_end_of_sequence_waits_for_the_grammar_and_then_is_forced(matchers: GrammarMatchers) -> None:
    """Logits that want nothing but the end, then logits that want anything but the end."""
    enter(matchers, 0, Grammar("regex", "ab?c"))
    wants_end = torch.zeros(1, VOCAB)
    wants_end[0, EOS] = 100.0
    tokens = []
    for _ in range(8):
        (token,), _ = draw_step(matchers, [0], wants_end.clone())
        tokens.append(token)
        if token == EOS:
            break
    assert text_of(tokens) in ("ac", "abc") and tokens[-1] == EOS
    matchers.leave([0])
    enter(matchers, 0, Grammar("choice", '["a"]'))
    never_ends = torch.zeros(1, VOCAB)
    never_ends[0, EOS] = -1e9
    assert [draw_step(matchers, [0], never_ends.clone())[0] for _ in range(2)] == [
        [straddling().token_to_id("a")], [EOS],
    ]  # fmt: skip
    matchers.leave([0])


def test_ignore_eos_ends_only_where_nothing_else_can_come(matchers: GrammarMatchers) -> None:
    wants_end = torch.zeros(1, VOCAB)
    wants_end[0, EOS] = 100.0
    for ignore_eos, length in ((False, 0), (True, 20)):
        enter(matchers, 0, Grammar("regex", "a{0,20}"), ignore_eos=ignore_eos)
        tokens = []
        while EOS not in tokens:
            (token,), _ = draw_step(matchers, [0], wants_end.clone())
            tokens.append(token)
        assert text_of(tokens) == "a" * length
        matchers.leave([0])


def test_the_grammar_has_the_last_word(matchers: GrammarMatchers) -> None:
    """Everything that it allows was excluded before."""
    enter(matchers, 0, Grammar("choice", '["a"]'))
    logits = torch.zeros(2, VOCAB)
    logits[0, straddling().token_to_id("a")] = -torch.inf
    tokens, problems = draw_step(matchers, [0, 7], logits)
    assert tokens[0] == straddling().token_to_id("a") and not problems
    matchers.leave([0])


def test_rows_without_a_grammar_are_left_alone(matchers: GrammarMatchers) -> None:
    assert matchers.start(torch.tensor([3, 4])) is None, "nothing to do"
    enter(matchers, 1, Grammar("choice", '["a"]'))
    assert matchers.start(torch.tensor([3, 4])) is None
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    masks = matchers.start(torch.tensor([3, 1, 4]))
    assert masks is not None and masks.rows == [1]
    matchers.apply(masks, logits)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    allowed = (logits[1] > -torch.inf).nonzero().view(-1).tolist()
    assert allowed == [straddling().token_to_id("a")], "neither padding nor anything else"
    matchers.leave([1])


def test_masks_reach_a_gpu_in_two_copies_for_which_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU on paper, and none for the thread that computes them. Four rows are unpacked in three parts."""
    grammars = {0: Grammar("choice", '["a"]'), 1: Grammar("regex", ".*"), 2: Grammar("choice", '["b", "c"]')}
    grammars[5] = Grammar("choice", '["d"]')
    logits = torch.randn(6, VOCAB)
    logits[0, straddling().token_to_id("a")] = logits[2, straddling().token_to_id("b")] = -torch.inf
    logits[5, straddling().token_to_id("d")] = -torch.inf
    on_host, wanted = make_matchers(), logits.clone()
    monkeypatch.setattr("worker_proc.grammar_matcher._MAX_ELEMENTS", 2 * VOCAB)
    with SimulatedGpu() as gpu:
        tokenizer = straddling()
        there, found = GrammarMatchers(lambda: vocabulary(tokenizer), VOCAB, GPU), on_gpu(logits.clone())
        for slot, grammar in grammars.items():
            enter(on_host, slot, grammar)
            enter(there, slot, grammar)
        expected, masks = on_host.start(torch.arange(6)), there.start(torch.arange(6))
        assert expected is not None and masks is not None
        gpu.events.clear()
        there.apply(masks, found)
        assert gpu.events == ["upload", "upload"]
    on_host.apply(expected, wanted)
    assert torch.equal(on_host_tensor(found), wanted)
    assert wanted[0].argmax() == straddling().token_to_id("a") and wanted[2].argmax() == straddling().token_to_id("c")


@given(SCHEMAS, st.integers(0, 10**6), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_a_slot_entered_again_goes_on_where_it_was(
    matchers: GrammarMatchers, schema: object, seed: int, cut: int
) -> None:
    enter(matchers, 0, as_grammar(schema))
    whole = draw_answers(matchers, [0], VOCAB, seed=seed)[0]
    matchers.leave([0])
    assume(EOS not in whole[:cut])
    enter(matchers, 5, as_grammar(schema), whole[:cut])
    enter(matchers, 6, as_grammar(schema))
    for token in whole[cut:]:
        logits = torch.full((1, VOCAB), -100.0)
        logits[0, token] = 100.0
        tokens, problems = draw_step(matchers, [5], logits)
        assert tokens == [token] and not problems
    matchers.leave([5, 6])


def test_steps_behind_the_end_do_no_harm(matchers: GrammarMatchers) -> None:
    """With two steps in flight a slot decodes once more after its answer has ended."""
    enter(matchers, 0, Grammar("choice", '["a"]'))
    for _ in range(5):
        _, problems = draw_step(matchers, [0], torch.zeros(1, VOCAB))
        assert not problems
    matchers.leave([0])


HARD = Grammar("regex", "(.*[abc].{0,30}){10}")


def test_a_grammar_that_needs_too_much_fails_alone(matchers: GrammarMatchers) -> None:
    enter(matchers, 0, HARD)
    enter(matchers, 1, as_grammar(PERSON))
    enter(matchers, 2, Grammar("json_schema", '{"type": "foo"}'))
    enter(matchers, 3, Grammar("choice", '["a"]'), generated=[straddling().token_to_id("b")])
    generator = torch.Generator().manual_seed(0)
    problems: dict[int, str] = {}
    answer: list[int] = []
    for _ in range(300):
        tokens, new = draw_step(matchers, [0, 1, 2, 3], torch.randn(4, VOCAB, generator=generator))
        assert not set(new) & set(problems), "a failure is told once"
        problems |= new
        answer.append(tokens[1])
        if EOS in answer and 0 in problems:
            break
    assert set(problems) == {0, 2, 3}
    assert "too many" in problems[0] or "limit" in problems[0] or "fuel" in problems[0], problems[0]
    assert "foo" in problems[2] and "followed" in problems[3]
    jsonschema.validate(json.loads(text_of(answer[: answer.index(EOS)])), PERSON)
    matchers.leave([0, 1, 2, 3])


def test_a_tokenizer_that_cannot_be_used_fails_its_requests_only(tmp_path) -> None:  # type: ignore[no-untyped-def]
    matchers = GrammarMatchers(lambda: load_vocabulary(tmp_path, VOCAB, [EOS]), VOCAB)
    matchers.wait_ready()
    enter(matchers, 0, Grammar("json_object"))
    _, problems = draw_step(matchers, [4, 0], torch.zeros(2, VOCAB))
    assert list(problems) == [1] and "no tokenizer.json" in problems[1]
    word_piece().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="WordPiece"):
        load_vocabulary(tmp_path, VOCAB, [EOS])


def test_masks_take_half_of_the_cores_that_the_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("worker_proc.grammar_matcher.LLExecutor", asked.append)
    for cpus in (1, 4, 64):
        monkeypatch.setattr("worker_proc.grammar_matcher.num_cpus", lambda cpus=cpus: cpus)
        make_matchers()
    assert asked == [1, 2, 8]


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    tokenizer = straddling()
    fewer = tokenizer.get_vocab_size() - 40
    matchers = GrammarMatchers(make_matchers()._vocabulary.result, fewer)
    enter(matchers, 0, as_grammar(PERSON))
    answer = draw_answers(matchers, [0], fewer, seed=5)[0]
    jsonschema.validate(json.loads(text_of(answer)), PERSON)
    assert max(answer) < fewer


TOOLS = [
    ("get_weather", {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
                     "additionalProperties": False}),
    ("add", {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}, "deep": {"$ref": "#"}}, "required": ["n"],
             "additionalProperties": False, "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}}),
]  # fmt: skip


# of the harmony format in test_harmony_grammars.py
@pytest.mark.parametrize("tool_format", [f for f in ToolFormat if f is not ToolFormat.HARMONY])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("reasoning", [Reasoning.NONE, Reasoning.TAGS, Reasoning.OPENED])
def test_forced_calls_are_read_back(
    matchers: GrammarMatchers, tool_format: ToolFormat, parallel: bool, reasoning: Reasoning
) -> None:
    thought = {Reasoning.NONE: "", Reasoning.TAGS: "<think>hm</think>", Reasoning.OPENED: "hm</think>\n"}[reasoning]
    grammar = after_reasoning(force_call(TOOLS, tool_format, parallel=parallel), reasoning)
    slots = list(range(4))
    for slot in slots:
        enter(matchers, slot, grammar, straddling().encode(thought).ids)
    answers = draw_answers(matchers, slots, VOCAB, seed=11)
    matchers.leave(slots)
    complete = [thought + text_of(answer) for answer in answers.values() if answer[-1] == EOS]
    assert complete
    for text in complete:
        parser = make_parser(tools=tool_format, offered=dict(TOOLS), forced=True, reasoning=reasoning)
        deltas = [*parser.feed(text), *parser.finish()]
        assert not any(isinstance(d, ContentDelta) for d in deltas), text
        calls = {d.index: (d.name, "") for d in deltas if isinstance(d, ToolCallDelta)}
        assert calls and (parallel or len(calls) == 1), text
        for delta in deltas:
            if isinstance(delta, ArgumentsDelta):
                name, arguments = calls[delta.index]
                calls[delta.index] = (name, arguments + delta.text)
        for name, arguments in calls.values():
            jsonschema.validate(json.loads(arguments), dict(TOOLS)[name])


@pytest.mark.parametrize(
    ("reasoning", "begun", "mark"),
    [
        (Reasoning.NONE, "", "<tool_call>"),
        (Reasoning.NONE, '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n', "</tool_call>"),
        (Reasoning.TAGS, "", "<think>"),
        (Reasoning.TAGS, "<think>hm", "</think>"),
        (Reasoning.TAGS, "<think>hm</think>\n", "<tool_call>"),
        (Reasoning.OPENED, "hm", "</think>"),
    ],
)
def test_marks_may_be_tokens_that_are_not_special(reasoning: Reasoning, begun: str, mark: str) -> None:
    """As in Qwen's tokenizers: a mark comes as the one token that the model knows, and the answer goes on behind it."""
    tokenizer = Tokenizer.from_str(straddling().to_str())
    tokenizer.add_tokens([AddedToken(m, special=False) for m in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    matchers = make_matchers(tokenizer)
    grammar = after_reasoning(force_call(TOOLS, ToolFormat.HERMES, parallel=False), reasoning)
    enter(matchers, 0, grammar, tokenizer.encode(begun).ids)
    wants_mark = torch.zeros(1, tokenizer.get_vocab_size() + PADDING)
    wants_mark[0, tokenizer.token_to_id(mark)] = 100.0
    assert draw_step(matchers, [0], wants_mark) == ([tokenizer.token_to_id(mark)], {})
    draw_answers(matchers, [0], tokenizer.get_vocab_size() + PADDING, seed=1, most=20)


def test_an_end_of_sequence_that_is_not_marked_as_special_is_no_text() -> None:
    tokenizer = Tokenizer.from_str(straddling().to_str().replace('"special":true', '"special":false'))
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    matchers = make_matchers(tokenizer)
    enter(matchers, 0, Grammar("regex", r"[^x]{40}"))
    answer = draw_answers(matchers, [0], tokenizer.get_vocab_size() + PADDING, seed=2, scale=0.0)[0]
    assert answer[-1] == EOS and len(text_of(answer, tokenizer)) == 40


def arguments_end(matchers: GrammarMatchers, parameters: dict[str, object] | None, arguments: str) -> bool:
    """Whether a forced call of a tool with these parameters may have these arguments."""
    grammar = force_call([("f", parameters)], ToolFormat.HERMES, parallel=False)
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    enter(matchers, 0, grammar, straddling().encode(call).ids)
    tokens, problems = draw_step(matchers, [0], torch.zeros(1, VOCAB))
    matchers.leave([0])
    return tokens == [EOS] and not problems


def test_arguments_are_objects(matchers: GrammarMatchers) -> None:
    """Also where a schema does not say so; without any there are no parameters."""
    some = '{"any": [1, {"x": null}]}'
    assert arguments_end(matchers, None, "{}") and not arguments_end(matchers, None, some)
    number = {"properties": {"n": {"type": "integer"}}}
    choice = {"anyOf": [{"required": ["any"]}, {"type": "string"}]}
    for parameters in ({}, {"type": "object"}, number, {"$ref": "#/$defs/a", "$defs": {"a": {}}}, choice):
        assert arguments_end(matchers, parameters, some), parameters
        for none in ("[]", '"a"', "1", "null"):
            assert not arguments_end(matchers, parameters, none), parameters
    assert not arguments_end(matchers, number, '{"n": "a"}')


@pytest.mark.parametrize("name", ["default", "enum", "const", "examples", "properties"])
def test_properties_may_be_called_as_keywords(matchers: GrammarMatchers, name: str) -> None:
    defined = {"$defs": {"E": {"type": "integer"}, name: {"$ref": "#/$defs/E"}}}
    plain = {"type": "object", "properties": {name: {"$ref": f"#/$defs/{name}"}}, **defined}
    literal = {"type": "object", "properties": {"x": {"const": {"$ref": "#/$defs/E"}}}, **defined}
    assert arguments_end(matchers, plain, f'{{"{name}": 1}}')
    assert not arguments_end(matchers, plain, f'{{"{name}": "a"}}')
    assert arguments_end(matchers, literal, '{"x": {"$ref": "#/$defs/E"}}')


def test_thoughts_come_before_the_grammar(matchers: GrammarMatchers) -> None:
    encode = straddling().encode
    for reasoning, text in (
        (Reasoning.OPENED, "hm <b> é</thin\n</think>\n\nyes"),
        (Reasoning.TAGS, "<think>hm</think>yes"),
        (Reasoning.TAGS, "\nyes"),
        (Reasoning.NONE, "yes"),
    ):
        enter(matchers, 0, after_reasoning(Grammar("choice", '["yes"]'), reasoning), encode(text).ids)
        tokens, problems = draw_step(matchers, [0], torch.zeros(1, VOCAB))
        assert tokens == [EOS] and not problems, text
        matchers.leave([0])
