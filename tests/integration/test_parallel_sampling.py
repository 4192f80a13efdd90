"""Several choices of one request, cache salts, priorities and deadlines, on real clusters."""

import json
import random
import time
from contextlib import ExitStack, nullcontext

import pytest

from common.answer import Answer
from common.messages import ErrorCode, Finish, RequestError
from common.sampling_params import SamplingParams
from tests.helpers_models import make_checkpoint
from tests.integration.cluster import running, wait_until

FLOAT32 = ("--dtype", "float32", "--kv-tokens", "8192")
PROMPT = [random.Random(3).randrange(3, 300) for _ in range(100)]
COLD, SALTED = ([token + more for token in PROMPT] for more in (1, 2))  # for a test of what is cached each
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


@pytest.fixture(scope="module")
def by_page_size(llama):
    """Clusters for tests that want a page size alone, and leave them idle."""
    with ExitStack() as stack:
        found = {}

        def cluster(page_size):
            if page_size not in found:
                found[page_size] = stack.enter_context(running(llama, *FLOAT32, "--page-size", page_size))
            return found[page_size]

        yield cluster


def sampled(seed, max_tokens=12):
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def collect(connection, requests, timeout_s=120, rows=()):
    """What became of requests, given as {rid: n}: a list of n Answers, or the RequestError that ended it; in the order
    in which they ended. `rows` have been received before."""
    answers = {rid: [Answer() for _ in range(n)] for rid, n in requests.items()}
    ended = {}
    deadline = time.monotonic() + timeout_s
    while len(ended) < len(requests):
        assert time.monotonic() < deadline, f"{set(requests) - set(ended)} have not ended"
        for row in [*rows, *connection.poll(1)]:
            assert row.rid not in ended, f"a row after the end: {row}"
            if isinstance(row, RequestError):
                ended[row.rid] = row
                continue
            answer = answers[row.rid][row.choice]
            assert answer.finish is Finish.NONE, f"a row after the end of its choice: {row}"
            answer.add(row)
            if all(answer.finish is not Finish.NONE for answer in answers[row.rid]):
                ended[row.rid] = answers[row.rid]
        rows = ()
    return ended


def ask(connection, prompt, params, n=1, **more):
    """The answers of one request."""
    rid = connection.submit(prompt, params, n=n, **more)
    return collect(connection, {rid: n})[rid]


@pytest.mark.parametrize("page_size", ["1", "16"])
def test_choices_are_what_separate_requests_with_the_next_seeds_get(by_page_size, page_size):
    with by_page_size(page_size).connect() as connection:
        for seed, stream in ((11, True), (2**63 - 2, False)):
            seeds = [(seed + i) % 2**63 for i in range(4)]
            rids = {connection.submit(PROMPT, sampled(s), cache_salt="alone"): 1 for s in seeds}
            alone = collect(connection, rids)
            expected = [alone[rid][0].token_ids for rid in rids]
            assert len({tuple(tokens) for tokens in expected}) > 1, "other seeds draw other tokens"
            choices = ask(connection, PROMPT, sampled(seed), n=4, stream=stream)
            assert [choice.token_ids for choice in choices] == expected
            assert [choice.prompt_tokens for choice in choices] == [100] * 4
            assert all(choice.finish is Finish.LENGTH for choice in choices)
    by_page_size(page_size).check_idle()


def ask_at_once(cluster, connection, params, n):
    """The answers of a request whose choices are all with the scheduler before the first step's result is."""
    with cluster.frozen():
        rid = connection.submit(COLD, params, n=n)
        wait_until(lambda: live_in_scheduler(connection) == n, 30)
    return collect(connection, {rid: n})[rid]


def live_in_scheduler(connection):
    values = connection.stats()
    return values["scheduler.running"] + values["scheduler.waiting"]


@pytest.mark.parametrize("in_flight", ["1", "2"])
@pytest.mark.parametrize(("page_size", "shared"), [("1", 99), ("4", 99), ("16", 96)])
def test_the_first_choice_computes_the_prompt_and_the_others_share_it(
    llama, by_page_size, page_size, shared, in_flight
):
    """While it runs, whole pages of the prompt are shared; once it has ended, all of it to the token."""
    flags = ("--page-size", page_size, "--steps-in-flight", in_flight)
    default = in_flight == "2"
    with (
        nullcontext(by_page_size(page_size)) if default else running(llama, *FLOAT32, *flags) as cluster,
        cluster.connect() as connection,
    ):
        first = ask_at_once(cluster, connection, sampled(5), n=4)
        assert [choice.cached_tokens for choice in first] == [0, shared, shared, shared]
        again = ask(connection, COLD, sampled(50), n=4)
        assert [choice.cached_tokens for choice in again] == [99] * 4
        cluster.check_idle()


def test_a_salt_separates_what_is_cached(by_page_size):
    with by_page_size("16").connect() as connection:
        cached = [
            ask(connection, SALTED, ONE_TOKEN, cache_salt=salt)[0].cached_tokens
            for salt in ("", "a", "b", "a", "", "A", "b")
        ]
        assert cached == [0, 0, 0, 99, 99, 0, 99]
    by_page_size("16").check_idle()


def test_a_deadline_ends_its_request_and_the_others_go_on(by_page_size):
    cluster = by_page_size("16")
    with cluster.connect() as connection:
        with cluster.frozen():  # else a row of the other one may come while the doomed one is waited for
            other = connection.submit(PROMPT, sampled(1, max_tokens=60), n=2)
            doomed = connection.submit(PROMPT, sampled(2, max_tokens=60), n=3, deadline_ms=80)
            error = collect(connection, {doomed: 3})[doomed]
        assert (error.code, error.field, error.limit) == (ErrorCode.DEADLINE, "deadline_ms", 80)
        answers = collect(connection, {other: 2})[other]
        assert [len(answer.token_ids) for answer in answers] == [60, 60]
        patient = ask(connection, PROMPT, sampled(1, max_tokens=60), n=2, deadline_ms=100_000)
        assert [answer.token_ids for answer in patient] == [answer.token_ids for answer in answers]
        assert connection.stats()["scheduler.expired"] > 0


def test_higher_priority_goes_first(llama):
    flags = ("--policy", "priority", "--max-running", "1", "--ageing", "86400")
    with running(llama, *FLOAT32, *flags) as cluster, cluster.connect() as connection:
        with cluster.frozen():
            rids = {connection.submit([5, 6, 7], sampled(0), priority=0): 0}  # takes the only slot
            wait_until(lambda: connection.stats()["scheduler.running"] == 1, 30)
            for priority in (-1000, 3, 0, 1000, 3):
                rids[connection.submit([5, 6, 7], sampled(1), priority=priority)] = priority
            wait_until(lambda: connection.stats()["scheduler.waiting"] == 5, 30)
        ended = list(collect(connection, dict.fromkeys(rids, 1)))
        first, *others = rids  # in the order of arrival, which decides among equals
        assert ended == [first, *sorted(others, key=lambda rid: -rids[rid])] != list(rids)


def test_an_abort_in_the_middle_ends_all_choices_and_frees_their_pages(by_page_size):
    cluster = by_page_size("1")
    with cluster.connect() as connection:
        aborted = connection.stats()["scheduler.aborted"]
        with cluster.frozen():  # the first choices are in steps that have not returned, the others wait
            rid = connection.submit(PROMPT, sampled(1, max_tokens=150), n=4)
            wait_until(lambda: live_in_scheduler(connection) == 4, 30)
            connection.abort(rid)
            answers = collect(connection, {rid: 4})[rid]
        assert [(answer.finish, answer.token_ids) for answer in answers] == [(Finish.ABORT, [])] * 4
        cluster.check_idle()
        rid = connection.submit(PROMPT, sampled(1, max_tokens=150), n=4)
        begun = connection.poll(10)  # they decode
        connection.abort(rid)
        answers = collect(connection, {rid: 4}, rows=begun)[rid]
        assert {answer.finish for answer in answers} <= {Finish.ABORT, Finish.LENGTH}
        values = cluster.check_idle()
        assert values["tokenizer.live_choices"] == 0 and values["scheduler.aborted"] >= aborted + 4


def test_a_client_that_goes_away_frees_all_its_choices(by_page_size):
    cluster = by_page_size("16")
    with cluster.connect() as connection:
        connection.submit(PROMPT, sampled(1, max_tokens=150), n=8)
        wait_until(lambda: connection.poll(10), 30)  # a sign of life may come first
    cluster.check_idle()


def test_bad_values_are_refused_by_name_and_the_queue_limit_counts_choices(llama):
    with (
        running(llama, *FLOAT32, "--max-waiting", "6", "--max-running", "2") as cluster,
        cluster.connect() as connection,
    ):
        wrong = [{"n": 0}, {"n": 65}, {"n": 7}, {"priority": 1001}, {"cache_salt": "x" * 257}, {"deadline_ms": -1}]
        for more in wrong:
            n = more.get("n", 1)
            rid = connection.submit(PROMPT, ONE_TOKEN, **more)
            error = collect(connection, {rid: n})[rid]
            (name,) = more
            assert (error.code, error.field) == (ErrorCode.INVALID, name)
        with cluster.frozen():
            whole = connection.submit([5, 6, 7], sampled(1), n=6)
            more = connection.submit([5, 6, 7], sampled(1), n=3)  # 9 choices, where 6 + 2 have room
            error = collect(connection, {more: 3})[more]
        assert error.code == ErrorCode.OVERLOADED and error.retry_after_s > 0
        assert len(collect(connection, {whole: 6})[whole]) == 6


def test_the_client_shows_all_choices(by_page_size):
    ids = ",".join(map(str, PROMPT))
    cluster = by_page_size("4")
    with cluster.connect() as connection:
        expected = [choice.token_ids for choice in ask(connection, PROMPT, sampled(9), n=3)]
    flags = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "9", "--max-tokens", "12", "--ignore-eos"]
    done = cluster.client("--token-ids", ids, *flags, "--n", "3", "--json", "--cache-salt", "x")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["token_ids"] == expected[0] and result["cached_tokens"] == 0
    assert [(c["index"], c["token_ids"], c["finish_reason"]) for c in result["choices"]] == [
        (i, tokens, "length") for i, tokens in enumerate(expected)
    ]
    plain = cluster.client("--token-ids", ids, *flags, "--n", "3")
    assert plain.returncode == 0, plain.stderr
    for choice in result["choices"]:
        assert f"--- {choice['index'] + 1}/3\n{choice['text']}\n" in plain.stdout
    late = cluster.client("--token-ids", ids, *flags, "--deadline-ms", "1", "--max-tokens", "150")
    assert late.returncode == 1 and "not finished 1 ms after it arrived" in late.stderr
    cluster.check_idle()
