"""Structured output on real clusters: every answer validates, and who has no grammar notices nothing."""

import json
import os
import re
import signal

import jsonschema
import pytest

from common.messages import ErrorCode, Finish, RequestError
from common.sampling_params import Grammar, SamplingParams
from tests.helpers_models import make_checkpoint
from tests.integration.cluster import ROOT, running, wait_until
from tests.integration.test_parallel_sampling import ask, collect

DEMO = ROOT / "demo_model"
FLOAT32 = ("--dtype", "float32", "--kv-tokens", "8192")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "é🙂"]}, "minItems": 1, "maxItems": 3},
        "boss": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/boss"}]},
    },
    "required": ["name", "age", "tags", "boss"],
    "additionalProperties": False,
    "$defs": {
        "boss": {
            "type": "object",
            "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "since": {"format": "date"}},
            "required": ["id"],
            "additionalProperties": False,
        }
    },
}
PERSON["$defs"]["boss"]["properties"]["since"]["type"] = "string"
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
DATE = Grammar("regex", r"(19|20)\d\d-(0[1-9]|1[0-2])-\d\d")
YES = Grammar("choice", '["yes", "yes, please", "no"]')
HARD = Grammar("regex", "(.*[abc].{0,30}){10}")
PROMPT = "def main():"


@pytest.fixture(scope="module")
def cluster():
    """For those that can do with any cluster, and leave it idle."""
    with running(DEMO, *FLOAT32, "--chunk-tokens", "4") as cluster:
        yield cluster


def sampled(seed, grammar=None, max_tokens=300, **more):
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, grammar=grammar, **more)


def text(answer):
    return "".join(answer.texts)


def check(answers):
    """Every answer that was not cut off validates; returns how many those are."""
    complete = [answer for answer in answers if answer.finish is Finish.STOP]
    for answer in complete:
        jsonschema.validate(json.loads(text(answer)), PERSON, format_checker=jsonschema.FormatChecker())
    assert {answer.finish for answer in answers} <= {Finish.STOP, Finish.LENGTH}
    return len(complete)


def test_answers_validate_at_any_seed_and_depth_of_the_pipeline(connection):
    """With `n` > 1, chunked prefill, greedy and drawn; one or two steps in flight give the same tokens."""
    flags = ("--steps-in-flight", "1", "--chunk-tokens", "4", *FLOAT32)
    with running(DEMO, *flags) as cluster, cluster.connect() as there:
        one = tokens_beside_neighbours(there)
    two = tokens_beside_neighbours(connection)
    assert one == two
    alone = [ask(connection, PROMPT, sampled(seed, max_tokens=60))[0].token_ids for seed in range(2)]
    assert [tokens for (tokens,) in two[-2:]] == alone, "neighbours draw what they would draw without grammars"


def tokens_beside_neighbours(connection):
    """Of valid answers, and at last of two without a grammar."""
    rids = {connection.submit(PROMPT * 8, sampled(seed, SCHEMA), n=3): 3 for seed in range(6)}
    greedy = SamplingParams(temperature=0.0, max_tokens=300, grammar=SCHEMA)
    rids[connection.submit(PROMPT, greedy)] = 1
    plain = {connection.submit(PROMPT, sampled(seed, max_tokens=60)): 1 for seed in range(2)}
    answers = collect(connection, rids | plain)
    assert check([answer for rid in rids for answer in answers[rid]]) >= 15
    return [[answer.token_ids for answer in answers[rid]] for rid in rids | plain]


def test_kinds_ends_and_refusals(connection):
    dates = ask(connection, PROMPT, sampled(1, DATE), n=4)
    assert all(re.fullmatch(r"(19|20)\d\d-(0[1-9]|1[0-2])-\d\d", text(answer)) for answer in dates)
    assert {answer.finish for answer in dates} == {Finish.STOP}
    assert {text(answer) for answer in ask(connection, PROMPT, sampled(2, YES), n=12)} <= {
        "yes",
        "yes, please",
        "no",
    }
    (longest,) = ask(connection, PROMPT, sampled(3, Grammar("regex", "(ab){0,20}"), ignore_eos=True))
    assert (text(longest), longest.finish) == ("ab" * 20, Finish.STOP)
    (cut,) = ask(connection, PROMPT, sampled(4, SCHEMA, max_tokens=5))
    assert cut.finish is Finish.LENGTH and len(cut.token_ids) == 5 and text(cut).startswith("{")
    (stopped,) = ask(connection, PROMPT, sampled(5, SCHEMA, stop=("age",)))
    assert stopped.finish is Finish.STOP and "age" not in text(stopped)
    (thought,) = ask(connection, PROMPT, sampled(6, Grammar("choice", '["x"]', "", ".")))
    assert thought.finish is Finish.LENGTH or re.fullmatch(r"[^.]*\.[ \n]*x", text(thought))
    for grammar, words in (
        (Grammar("json_schema", '{"type": "strnig"}'), "strnig"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("lark", "start: <no>"), "<no>"),
    ):
        error = ask(connection, PROMPT, sampled(1, grammar), n=2)
        assert isinstance(error, RequestError)
        assert (error.code, error.field) == (ErrorCode.INVALID, "params.grammar") and words in error.problem


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(connection):
    failed = connection.stats()["scheduler.failed"]
    doomed = connection.submit(PROMPT, sampled(1, HARD), n=2)
    others = {connection.submit(PROMPT, sampled(seed, SCHEMA), n=2): 2 for seed in range(3)}
    ended = collect(connection, others | {doomed: 2})
    error = ended.pop(doomed)
    assert isinstance(error, RequestError) and "cannot be followed" in error.problem
    assert (error.code, error.field) == (ErrorCode.INVALID, "params.grammar")
    assert check([answer for rid in others for answer in ended[rid]]) >= 4
    assert connection.stats()["scheduler.failed"] >= failed + 1


def test_preemption_changes_nothing(connection):
    flags = ("--dtype", "float32", "--kv-tokens", "416", "--page-size", "4", "--context-len", "256")
    with running(DEMO, *flags) as cluster, cluster.connect() as there:
        tight, preempted = tokens_of_a_crowd(there)
    roomy, none = tokens_of_a_crowd(connection)
    assert tight == roomy
    assert preempted > 0 == none


def tokens_of_a_crowd(connection):
    """And how often one of it was preempted."""
    before = connection.stats()["scheduler.preempted"]
    rids = {connection.submit(PROMPT, sampled(seed, SCHEMA, 120)): 1 for seed in range(12)}
    answers = collect(connection, rids)
    assert check([answers[rid][0] for rid in rids]) >= 4
    return [answers[rid][0].token_ids for rid in rids], connection.stats()["scheduler.preempted"] - before


def test_with_penalties_logprobs_and_min_tokens(connection):
    """`min_tokens` holds the end back where the answer can go on; what is complete ends."""
    more = {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "logprobs": 2, "min_tokens": 40}
    answers = ask(connection, PROMPT, sampled(1, SCHEMA, **more), n=4)
    assert check(answers) >= 2
    assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers)
    (longer,) = ask(connection, PROMPT, sampled(2, Grammar("regex", "(ab){0,9}"), min_tokens=200))
    assert (text(longer), longer.finish) == ("ab" * 9, Finish.STOP)


@pytest.mark.parametrize("victim", ["worker-0", "scheduler"])
def test_answers_go_on_after_a_loss(cluster, connection, victim):
    params = [sampled(seed, SCHEMA) for seed in range(4)]
    expected = [ask(connection, PROMPT, p)[0].token_ids for p in params]
    rids = {connection.submit(PROMPT, p): 1 for p in params}
    begun = connection.poll(10)
    pid = cluster.pid(victim)
    os.kill(pid, signal.SIGKILL)
    answers = collect(connection, rids, rows=begun)
    assert [answers[rid][0].token_ids for rid in rids] == expected
    assert check([answers[rid][0] for rid in rids]) >= 2
    wait_until(lambda: cluster.info["pids"].get(victim, pid) != pid, 60, lambda: cluster.log)


def test_a_rank_dies_in_the_middle_of_answers():
    """The grammar of each goes on where its answer was: in streams, in an answer sent as a whole, and in both of two
    choices."""
    seeds = range(4)
    with running(DEMO, *FLOAT32, "--tp", "2") as cluster, cluster.connect() as connection:
        alone = [ask(connection, PROMPT, sampled(seed, SCHEMA), n=2) for seed in seeds]
        expected = [[(answer.token_ids, text(answer)) for answer in answers] for answers in alone]
        for victim in ("worker-1", "worker-0"):
            rids = [connection.submit(PROMPT, sampled(seed, SCHEMA), n=2, stream=seed > 0) for seed in seeds]
            rows, tokens = [], dict.fromkeys(rids, 0)
            while min(tokens[rid] for rid in rids[1:]) < 16:
                for row in connection.poll(10):
                    tokens[row.rid] += len(row.token_ids)
                    rows.append(row)
            pid = cluster.pid(victim)
            os.kill(pid, signal.SIGKILL)
            ended = collect(connection, dict.fromkeys(rids, 2), rows=rows)
            assert [[(answer.token_ids, text(answer)) for answer in ended[rid]] for rid in rids] == expected
            assert check([answer for rid in rids for answer in ended[rid]]) >= 4
            wait_until(lambda: cluster.info["pids"].get(victim, pid) != pid, 60, lambda: cluster.log)  # noqa: B023
            cluster.remember()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_random_models_and_tensor_parallel_ranks(kind, tmp_path):
    """An odd vocabulary, which two ranks must pad; both write the same answers, which validate."""
    model = make_checkpoint(kind, tmp_path / kind)
    grammars = [DATE, YES, Grammar("json_schema", json.dumps({"type": "array", "items": {"enum": [1, "a", None]},
                                                               "maxItems": 4}))]  # fmt: skip
    seen = []
    for tp in ("1", "2"):
        with running(model, *FLOAT32, "--tp", tp) as cluster, cluster.connect() as connection:
            rids = [connection.submit([5, 6, 7], sampled(seed, g, 60), n=2) for seed, g in enumerate(grammars * 3)]
            ended = collect(connection, dict.fromkeys(rids, 2))
        seen.append([[answer.token_ids for answer in ended[rid]] for rid in rids])
        for rid, grammar in zip(rids, grammars * 3, strict=True):
            for answer in ended[rid]:
                assert answer.finish is Finish.STOP, text(answer)
                if grammar.kind == "json_schema":
                    jsonschema.validate(json.loads(text(answer)), json.loads(grammar.text))
    assert seen[0] == seen[1]
