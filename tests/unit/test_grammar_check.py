"""The tokenizer process's check of grammars: what is refused, in which words, and that it never blocks the loop."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.grammars import GrammarError, to_llguidance
from common.messages import AddRequest, ErrorCode, RequestError, ints
from common.sampling_params import Grammar, SamplingParams
from tests.helpers_tokenizers import EOS, straddling
from tests.unit.frontend_world import World, request, run
from tokenizer_proc import grammar_check
from tokenizer_proc.ebnf import ebnf_to_lark
from tokenizer_proc.grammar_check import GrammarCheck
from tokenizer_proc.limits import Refused

SCHEMA = Grammar("json_schema", '{"type": "object"}')


def check(grammar: Grammar, eos: tuple[int, ...] = (EOS,)) -> None:
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(GrammarCheck(straddling(), ints(*eos), pool).check(grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        SCHEMA,
        Grammar("json_schema", "true"),
        Grammar("regex", r"[/]\/a/\d+"),
        Grammar("choice", '["a", "\\"b\\"\\n"]'),
        Grammar("lark", 'start: <|end|> | "a"'),
        Grammar("ebnf", 'root ::= "(" root ")" | "x"'),
        Grammar("ebnf", 'root ::= [a-z]+ "b"', "<think>", "</think>"),
        Grammar("json_object", "", "<think>", "</think>"),
        Grammar("regex", "a", "", "</think>"),
    ],
)
def test_good_grammars(grammar: Grammar) -> None:
    check(grammar)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_object", "{}"), "must be empty"),
        (Grammar("json_schema"), "must not be empty"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", "[1]"), "must be an object"),
        (Grammar("json_schema", "[" * 200_000), "too deeply"),
        (Grammar("json_schema", '{"a":' * 20_000 + "1" + "}" * 20_000), "deep"),
        (Grammar("json_schema", '{"type": "strnig"}'), "strnig"),
        (Grammar("json_schema", '{"uniqueItems": true, "type": "array"}'), "uniqueItems"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "http://127.0.0.1/x"),
        (Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'), "file:///etc/passwd"),
        (Grammar("json_schema", "false"), "must be an object"),
        (Grammar("regex", "a(b"), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("choice", "[]"), "list of strings"),
        (Grammar("choice", '["a", ""]'), "not empty"),
        (Grammar("choice", json.dumps(["a"] * 5000)), "4096"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", "start: <no_such_token>"), "no_such_token"),
        (Grammar("lark", 'x: "a"'), "start"),
        (Grammar("ebnf", "root ::= nothing"), "Rule 'nothing' not found"),
        (Grammar("ebnf", 'x ::= "a"'), "No 'root' rule"),
        (Grammar("ebnf", 'root ::= "a'), "not EBNF: Unexpected end"),
        (Grammar("ebnf", 'root ::= "\\'), "ends within an escape"),
        (Grammar("ebnf", 'root ::= "\\ud800"'), "is no character"),
        (Grammar("ebnf", "root ::= " + "(" * 100_000), "too deeply"),
        (Grammar("ebnf", "r ::= r\n" * 5000), "more than 4000 rules"),
        (Grammar("json_object", "", "<think>"), "closing"),
    ],
)
def test_bad_grammars_are_refused_in_words(grammar: Grammar, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        check(grammar)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID, "params.grammar")
    assert len(refused.value.problem) < 1200


def test_a_schema_at_the_limit_of_what_json_reads_is_refused_in_words() -> None:
    """What goes around it is deeper by some levels, which Python 3.12 and later count where JSON is written, too."""

    def deep(levels: int) -> str:
        return '{"a":' * levels + "1" + "}" * levels

    readable, unreadable = 1, 200_000
    while unreadable - readable > 1:
        middle = (readable + unreadable) // 2
        try:
            json.loads(deep(middle))
            readable = middle
        except RecursionError:
            unreadable = middle
    for levels in range(readable - 20, readable + 20):
        with pytest.raises(Refused, match=r"deep|recursion"):
            check(Grammar("json_schema", deep(levels)))


def exponential(levels: int) -> str:
    """A schema whose definitions refer twice to the next one: 2**levels when written out."""
    definitions = {
        f"d{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"}}
        for i in range(levels)
    }
    return json.dumps({"$defs": {**definitions, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", exponential(30)),
        Grammar("json_schema", json.dumps({"allOf": [{"anyOf": [{"required": [c]} for c in "abcd"]}] * 12})),
        Grammar("regex", "((a{1,500}){1,500}){1,500}"),
        Grammar("regex", "a" * 200_000),
        Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
        Grammar("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        Grammar("lark", "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"'),
        Grammar("lark", "start: start start | start\n"),
    ],
    ids=range(8),
)  # fmt: skip
def test_hostile_grammars_come_back(grammar: Grammar) -> None:
    """Accepted or refused, within the limits; the process lives on."""
    try:
        check(grammar)
    except Refused as refusal:
        assert refusal.field == "params.grammar"


def test_a_model_without_an_end_cannot_follow_grammars() -> None:
    with pytest.raises(Refused, match="no end-of-sequence token"):
        check(SCHEMA, eos=())


def test_form_of_a_regex_between_slashes() -> None:
    for regex, inside in ((r"a/b", r"a\/b"), (r"a\/b", r"a\/b"), ("\\\\/", "\\\\\\/"), ("a\nb", r"a\nb")):
        (grammar,) = json.loads(to_llguidance(Grammar("regex", regex)))["grammars"]
        assert grammar == {"lark_grammar": f"start: /{inside}/\n"}
    with pytest.raises(GrammarError):
        to_llguidance(Grammar("regex"))


class Gate(ThreadPoolExecutor):
    """A pool that works when it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.opened = threading.Event()
        self.submitted = 0

    def submit(self, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        def work():  # type: ignore[no-untyped-def]
            assert self.opened.wait(10)
            return function(*args, **kwargs)

        self.submitted += 1
        return super().submit(work)


def test_equal_grammars_are_compiled_once_and_verdicts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        gate = Gate()
        checker = GrammarCheck(straddling(), ints(EOS), gate)
        bad = Grammar("regex", "(")
        asked = [asyncio.ensure_future(checker.check(grammar)) for grammar in (SCHEMA, bad, SCHEMA, bad)]
        await asyncio.sleep(0)
        gate.opened.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [Grammar, Refused, Grammar, Refused]
        await checker.check(SCHEMA)
        assert gate.submitted == 2
        monkeypatch.setattr(grammar_check, "MAX_CACHED", 1)
        await checker.check(Grammar("regex", "b"))
        await checker.check(SCHEMA)
        assert gate.submitted == 4, "the oldest verdict made room"
        gate.shutdown()

    run(test)


def test_time_and_number_of_waiting_grammars_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        gate = Gate()
        checker = GrammarCheck(straddling(), ints(EOS), gate)
        monkeypatch.setattr(grammar_check, "PATIENCE_S", 0.01)
        monkeypatch.setattr(grammar_check, "MAX_PENDING", 2)
        for letter in "ab":  # nobody has begun with them
            with pytest.raises(Refused, match="other grammars") as refused:
                await checker.check(Grammar("regex", letter))
            assert refused.value.code == ErrorCode.OVERLOADED and refused.value.retry_after_s > 0
        with pytest.raises(Refused) as refused:
            await checker.check(Grammar("regex", "c"))
        assert refused.value.code == ErrorCode.OVERLOADED and refused.value.retry_after_s > 0
        gate.opened.set()
        gate.shutdown()
        await asyncio.sleep(0.01)

    run(test)


def test_the_frontend_passes_a_grammar_on_and_refuses_a_bad_one() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(1, SamplingParams(grammar=Grammar("regex", "("), seed=1)))
        world.receive(request(2, SamplingParams(grammar=SCHEMA, seed=1, ignore_eos=True), n=2))
        world.receive(request(3, SamplingParams(ignore_eos=True, seed=1)))
        await world.settle()
        (error,) = world.answers[b"a"]
        assert isinstance(error, RequestError)
        assert (error.rid, error.code, error.field) == (1, ErrorCode.INVALID, "params.grammar")
        seen = {(m.grammar, m.ignore_eos, tuple(m.stop_token_ids)) for m in world.added}
        assert seen == {(SCHEMA, True, (0,)), (None, False, ())}, "a complete answer ends, with ignore_eos too"
        assert all(isinstance(m, AddRequest) for m in world.added) and len(world.added) == 3

    run(test)


@pytest.mark.parametrize(
    ("ebnf", "inside", "outside"),
    [
        ('root ::= a "b"\na ::= [ab]+', ["ab", "aab", "abb"], ["a", "b", "ac"]),
        ('root ::= "caf\\u00e9" | [\\u4e00-\\u9fff]+', ["café", "中文"], ["cafe", ""]),
        ('root ::= "\\u0022" "\\\\u0041"', ['"\\u0041'], ['"A']),
        ('root ::= "(" root ")" | "x" # as often as you like', ["x", "((x))"], ["((x)", "()"]),
        ('root ::= one-two{2,3}\none-two ::= "a" | "b"', ["ab", "aba"], ["a", "abab"]),
    ],
)
def test_ebnf_means_what_it_says(ebnf: str, inside: list[str], outside: list[str]) -> None:
    source = to_llguidance(Grammar("lark", ebnf_to_lark(ebnf)))
    for text in inside + outside:
        matcher = LLMatcher(LLTokenizer("byte"), source)
        tokens = list(text.encode())
        matched = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert matched is (text in inside), text


def test_workers_get_ebnf_as_lark() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(temperature=0.0, seed=1, grammar=Grammar("ebnf", 'root ::= "a"', "", "</think>"))
        for rid in (1, 2):
            world.receive(request(rid, params))
            await world.settle()
        first, again = (added.grammar for added in world.added)
        assert first == again and first is not None
        assert (first.kind, first.closing) == ("lark", "</think>") and first.text.startswith("%llguidance")

    run(test)


def test_the_time_of_a_grammar_begins_with_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        slow, free = threading.Event(), threading.Event()

        class Slow(GrammarCheck):
            def _verdict_on(self, grammar: Grammar):  # type: ignore[no-untyped-def]
                slow.set()
                assert free.wait(10)
                return super()._verdict_on(grammar)

        with ThreadPoolExecutor(1) as pool:
            checker = Slow(straddling(), ints(EOS), pool)
            monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 0.01)
            with pytest.raises(Refused, match="within") as refused:
                await checker.check(SCHEMA)
            assert refused.value.code == ErrorCode.INVALID and slow.is_set()
            monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 10.0)
            waiting = asyncio.ensure_future(checker.check(Grammar("regex", "[a-z]+")))
            await asyncio.sleep(0.05)  # longer than the first one was given
            assert not waiting.done()
            free.set()
            assert await waiting == Grammar("regex", "[a-z]+")

    run(test)
