"""Beam search on a real cluster, token for token against transformers."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.messages import ErrorCode, Finish, RequestError, ints
from common.sampling_params import Grammar, SamplingParams
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.integration.cluster import running, wait_until
from tests.integration.test_sampling import FLOAT32, PROMPT, ask, ask_all, check_entries, expected_logprobs, params

CASES = (  # beams, tokens, ends, length penalty, early stopping
    (4, 24, (), 1.0, False),
    (3, 16, tuple(range(0, 320, 4)), 0.6, True),
    (4, 20, tuple(range(1, 310, 5)), 2.0, False),
    (2, 1, (), 1.0, False),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


@pytest.fixture(scope="module")
def cluster(llama):
    """For tests that can do with any cluster of one rank."""
    with running(llama, *FLOAT32, "--page-size", "16") as cluster:
        yield cluster


def beams(most, ends, penalty, early):
    return SamplingParams(
        max_tokens=most, ignore_eos=True, stop_token_ids=ints(*ends), use_beam_search=True, length_penalty=penalty,
        early_stopping=early,
    )  # fmt: skip


def transformers_beams(path, prompt, n, most, ends, penalty, early):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([prompt]), num_beams=n, num_return_sequences=n, max_new_tokens=most, do_sample=False,
        length_penalty=penalty, early_stopping=early, eos_token_id=list(ends) or None, pad_token_id=0,
    )  # fmt: skip
    sequences = []
    for row in out[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        sequences.append(row[:end])
    return sequences


@pytest.mark.parametrize(("tp", "page_size"), [("1", "1"), ("2", "4")])
def test_beams_are_those_of_transformers_with_pages_of(llama, tp, page_size):
    with (
        running(llama, *FLOAT32, "--tp", tp, "--page-size", page_size) as cluster,
        cluster.connect() as connection,
    ):
        check_beams(llama, connection)


def test_beams_are_those_of_transformers(llama, connection):
    check_beams(llama, connection)


def check_beams(llama, connection):
    requests = [(PROMPT[i:], beams(*rest), {"n": n, "stream": bool(i % 2)}) for i, (n, *rest) in enumerate(CASES)]
    crowd = [(PROMPT, params(temperature=0.9, seed=seed, max_tokens=30), {}) for seed in range(3)]
    answers = ask_all(connection, [*requests, *crowd])
    ended = set()
    for i, (case, choices) in enumerate(zip(CASES, answers, strict=False)):
        assert [choice.token_ids for choice in choices] == transformers_beams(llama, PROMPT[i:], *case)
        for choice in choices:
            last = choice.token_ids[-1]
            assert choice.end == ((Finish.STOP, last) if last in case[2] else (Finish.LENGTH, None))
            ended.add(choice.end[0])
    assert ended == {Finish.STOP, Finish.LENGTH}
    one = ask(connection, PROMPT, beams(12, (), 1.0, False))
    assert one.token_ids == ask(connection, PROMPT, params(max_tokens=12)).token_ids


def test_a_fork_copies_only_the_page_that_is_written(llama):
    with running(llama, *FLOAT32, "--page-size", "8") as cluster, cluster.connect() as connection:
        ask(connection, PROMPT[:64], params(max_tokens=1))
        before = connection.stats()
        answers = ask(connection, PROMPT[:64], beams(9, (), 1.0, False), n=4)
        after = connection.stats()
    assert len(answers) == 4
    copied = after["scheduler.copied_pages"] - before["scheduler.copied_pages"]
    assert copied <= 4 * 8 + 1, "a page per beam and step, none where a page begins"
    computed = after["scheduler.step_tokens/sum"] - before["scheduler.step_tokens/sum"]
    assert computed == (1 + 4 * 8) * 10**6, "one token per beam and step"
    found = [after[f"scheduler.{name}"] - before[f"scheduler.{name}"] for name in ("prompt_tokens", "cached_tokens")]
    assert found == [64, 63], "the prompt counts once"


def test_log_probabilities_of_beams_are_those_of_transformers(llama, connection):
    case = (3, 10, tuple(range(0, 320, 4)), 0.6, True)
    wanted = beams(*case[1:])
    plain = ask(connection, PROMPT, wanted, n=case[0])
    for top in (0, 2, 20):
        answers = ask(connection, PROMPT, replace(wanted, logprobs=top), n=case[0])
        assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
        for answer in answers:
            expected = expected_logprobs(llama, PROMPT + answer.token_ids)
            check_entries(answer.logprobs, expected[len(PROMPT) - 1 : -1], answer.token_ids, top)
    assert not any(answer.logprobs for answer in plain)


def test_beams_in_a_pool_too_small_for_all(llama):
    case = CASES[0]
    with (
        running(llama, *FLOAT32, "--page-size", "4", "--kv-tokens", "120") as cluster,
        cluster.connect() as connection,
    ):
        answers = ask_all(connection, [(PROMPT[i:], beams(*case[1:]), {"n": case[0]}) for i in (0, 3)])
    for i, choices in zip((0, 3), answers, strict=True):
        assert [choice.token_ids for choice in choices] == transformers_beams(llama, PROMPT[i:], *case)


def test_a_search_ends_when_it_must(cluster, connection):
    with busy_then(connection):
        rid = connection.submit(PROMPT, beams(120, (), 1.0, False), n=4)
    connection.abort(rid)
    ends = []
    while connection.live:
        ends += [(row.rid, row.choice, row.finish) for row in connection.poll(30)]
    assert sorted(ends) == [(rid, choice, Finish.ABORT) for choice in range(4)]
    cluster.check_idle()
    error = ask(connection, PROMPT, beams(120, (), 1.0, False), n=4, deadline_ms=60)
    assert isinstance(error, RequestError) and error.code == ErrorCode.DEADLINE
    with cluster.connect() as other, busy_then(other):
        other.submit(PROMPT, beams(120, (), 1.0, False), n=4)
    # between two steps of a search the scheduler is idle: the tokenizer knows better
    wait_until(lambda: connection.stats()["tokenizer.live_requests"] == 0, 30)
    cluster.check_idle()


@contextmanager
def busy_then(connection):
    """What is submitted has some tokens at the end."""
    before = connection.stats()["scheduler.output_tokens"]
    yield
    while connection.stats()["scheduler.output_tokens"] < before + 8:
        pass


def test_what_does_not_go_together_is_refused_by_name(connection):
    wrong = [
        {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 1}, {"stop": ("x",)},
        {"repetition_penalty": 1.1}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"logit_bias": {1: 1.0}},
        {"min_tokens": 2}, {"bad_words": ("x",)}, {"allowed_token_ids": ints(5)}, {"prompt_logprobs": 0},
        {"grammar": Grammar("json_object")},
    ]  # fmt: skip
    for values in wrong:
        error = ask(connection, PROMPT, SamplingParams(use_beam_search=True, **values), n=2)
        assert isinstance(error, RequestError) and error.field == f"params.{next(iter(values))}"
    for values in ({"length_penalty": 2.0}, {"early_stopping": True}):
        error = ask(connection, PROMPT, SamplingParams(**values))
        assert isinstance(error, RequestError) and error.field == f"params.{next(iter(values))}"
    many = beams(5, range(VOCAB_SIZE // 2), 1.0, False)
    error = ask(connection, PROMPT, many, n=2)
    assert isinstance(error, RequestError) and (error.field, error.limit) == ("n", 1)
