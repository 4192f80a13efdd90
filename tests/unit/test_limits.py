"""Refusals name the field and the limit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.codec import MAX_FRAME_BYTES, decode, encode
from common.config import SchedulerConfig
from common.messages import ErrorCode, Generate, Go, RequestError, ints
from common.sampling_params import MAX_GRAMMAR_CHARS, MAX_STOP_CHARS, Grammar, SamplingParams
from tokenizer_proc.limits import Limits, Refused
from tokenizer_proc.sampling_checks import check_beam_logprobs, check_prompt_logprobs, check_sampling

WINDOW = Limits(context_len=10, pool_tokens=64, vocab_size=100, max_live=3, max_choices=2)
LARGE_VOCAB = replace(WINDOW, vocab_size=1000)
POOL = Limits(context_len=100, pool_tokens=16, vocab_size=100, max_live=3, max_choices=2)


def refusal(check: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        check()
    return caught.value


def test_a_prompt_fits_when_one_more_token_does() -> None:
    WINDOW.check_prompt(ints(*range(9)), "text")
    POOL.check_prompt(ints(*range(15)), "text")


@pytest.mark.parametrize(
    ("limits", "words", "limit"),
    [
        (WINDOW, "this model's maximum context length is 10 tokens,", 9),  # litellm looks for these words
        (POOL, "this model's maximum context length is 16 tokens (the size of the KV cache),", 15),
    ],
)
def test_too_long_names_what_is_too_small(limits: Limits, words: str, limit: int) -> None:
    error = refusal(lambda: limits.check_prompt(ints(*range(limit + 1)), "text"))
    assert (error.code, error.field, error.limit) == (ErrorCode.TOO_LONG, "text", limit)
    assert words in error.problem and f"{limit + 1} tokens" in error.problem


def test_an_empty_prompt() -> None:
    error = refusal(lambda: WINDOW.check_prompt(ints(), "token_ids"))
    assert (error.code, error.field, error.limit) == (ErrorCode.INVALID, "token_ids", 1) and "empty" in error.problem


def test_a_token_id_outside_the_vocabulary_is_named_with_its_place() -> None:
    WINDOW.check_token_ids(ints(0, 99), "token_ids")
    error = refusal(lambda: WINDOW.check_token_ids(ints(0, 100, 200), "token_ids"))
    assert (error.code, error.field, error.limit) == (ErrorCode.INVALID, "token_ids[1]", 99)
    assert "100" in error.problem


def test_text_that_cannot_fit_is_not_tokenized() -> None:
    WINDOW.check_chars(9 * 64, "text")
    error = refusal(lambda: WINDOW.check_chars(9 * 64 + 1, "text"))
    assert (error.code, error.field, error.limit) == (ErrorCode.TOO_LONG, "text", 576)


def test_the_largest_acceptable_request_may_be_read() -> None:
    params = SamplingParams(
        grammar=Grammar("regex", "x" * MAX_GRAMMAR_CHARS), stop=("\U0001f600" * MAX_STOP_CHARS,) * 16
    )
    for limits in (WINDOW, replace(WINDOW, context_len=2**16, pool_tokens=2**16)):
        frame = encode(Generate(1, "\U0001f600" * limits.max_chars, None, None, params))
        assert len(frame) <= limits.max_frame < len(frame) + 2**20
    assert replace(WINDOW, context_len=2**22, pool_tokens=2**22).max_frame == MAX_FRAME_BYTES


def test_an_answer_holds_as_much_of_a_refusal_as_a_message_may() -> None:
    answer = Refused(ErrorCode.INVALID, "p" * 5000, "f" * 300).answer(1)
    assert (answer.problem, answer.field) == ("p" * 4096, "f" * 256)
    assert decode(encode(answer), {RequestError}) == answer


def sampling(limits: Limits = LARGE_VOCAB, n: int = 1, **params: Any) -> None:
    check_sampling(Generate(1, "x", None, None, SamplingParams(**params), n=n), limits, ints(0))


@pytest.mark.parametrize(
    ("params", "field", "limit"),
    [
        ({"length_penalty": 2.0}, "params.length_penalty", 0),
        ({"early_stopping": True}, "params.early_stopping", 0),
        ({"logit_bias": {5: 1.0, 1000: 1.0}}, "params.logit_bias[1]", 999),
        ({"min_tokens": 3, "max_tokens": 2}, "params.min_tokens", 2),
        ({"use_beam_search": True, "temperature": 0.7}, "params.temperature", 0),
        ({"use_beam_search": True, "n": 2, "stop_token_ids": ints(*range(1, 256))}, "n", 1),
        ({"use_beam_search": True, "n": 51, "limits": WINDOW}, "n", 50),
    ],
)
def test_sampling_parameters_that_do_not_fit(params: dict[str, Any], field: str, limit: int) -> None:
    error = refusal(lambda: sampling(**params))
    assert (error.code, error.field, error.limit) == (ErrorCode.INVALID, field, limit)


def test_sampling_parameters_that_just_fit() -> None:
    sampling(min_tokens=2, max_tokens=2)
    for temperature in (0.0, 1.0):
        sampling(use_beam_search=True, temperature=temperature, length_penalty=2.0, early_stopping=True)
    sampling(use_beam_search=True, n=2, stop_token_ids=ints(*range(1, 255)))
    sampling(use_beam_search=True, n=50, limits=WINDOW)


@pytest.mark.parametrize("tokens", [1, 2, 3, 100])
def test_so_many_alternatives_as_a_refusal_says_are_possible(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr("tokenizer_proc.sampling_checks.MAX_PROMPT_LOGPROBS", 20)

    def of_prompt(top: int) -> None:
        check_prompt_logprobs(SamplingParams(prompt_logprobs=top), tokens)

    def of_beams(top: int) -> None:
        check_beam_logprobs(SamplingParams(logprobs=top), 1, tokens)

    for check in (of_prompt, of_beams):
        most = refusal(lambda: check(20)).limit  # noqa: B023 (called at once)
        assert most == max(0, 20 // tokens - 1)
        if tokens <= 20:
            check(most)
        assert refusal(lambda: check(most + 1)).limit == most  # noqa: B023


def test_too_many_requests() -> None:
    WINDOW.check_live(2, 1)
    WINDOW.check_live(1, 2)
    for live, n in ((3, 1), (2, 2)):
        error = refusal(lambda: WINDOW.check_live(live, n))  # noqa: B023 (called at once)
        assert (error.code, error.limit) == (ErrorCode.OVERLOADED, 3) and error.retry_after_s > 0
    assert error.answer(5).rid == 5


def test_more_choices_than_may_ever_wait() -> None:
    error = refusal(lambda: WINDOW.check_live(0, 3))
    assert (error.code, error.field, error.limit) == (ErrorCode.INVALID, "n", 2)
    assert error.retry_after_s == 0, "trying again does not help"


def test_the_answer_gets_what_fits() -> None:
    assert WINDOW.answer_tokens(4, None) == 6
    assert WINDOW.answer_tokens(4, 2) == 2
    assert WINDOW.answer_tokens(4, 1000) == 6
    assert POOL.answer_tokens(15, None) == 1


def test_limits_of_a_cluster() -> None:
    go = Go(num_pages=4, page_size=16, context_len=50, vocab_size=9, eos_token_ids=ints())
    limits = Limits.of_cluster(go, SchedulerConfig(max_running=2, max_waiting=5), longest_token=100)
    assert (limits.pool_tokens, limits.max_prompt, limits.max_live, limits.max_chars) == (64, 49, 7, 4900)
    assert limits.max_choices == 5
