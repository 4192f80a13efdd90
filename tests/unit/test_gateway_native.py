"""One answer of /generate in SGLang's form, for every way to end and every part of the log probabilities."""

from typing import Any

import pytest

from common.logprobs import TokenLogprobs, TopLogprob
from common.messages import Finish
from gateway_proc.echoes import Echo
from gateway_proc.generation import Choice
from gateway_proc.native import Plan
from gateway_proc.schemas.native import NativeRequest


def entry(token: int) -> TokenLogprobs:
    top = tuple(TopLogprob(token + i, b"t%d" % (token + i), -1.0 - i) for i in range(3))
    return TokenLogprobs(token, b"t%d" % token, -1.0, 1, top)


def plan(*, n: int = 1, several: bool = False, start: int = -1, **body: Any) -> Plan:
    return Plan(NativeRequest(text="x", **body), "id", several, n, start, 2 * [Echo()])


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        (Finish.NONE, None, None),
        (Finish.LENGTH, None, {"type": "length", "length": 2}),
        (Finish.STOP, None, {"type": "stop", "matched": 8}),
        (Finish.STOP, "\n\n", {"type": "stop", "matched": "\n\n"}),
        (Finish.STOP, 5, {"type": "stop", "matched": 5}),
        (Finish.ABORT, None, {"type": "abort", "message": "the request was aborted"}),
    ],
)
def test_why_an_answer_ended(finish: Finish, stop: int | str | None, reason: dict[str, Any] | None) -> None:
    choice = Choice(["a", "b"], [7, 8], finish=finish, stop_reason=stop)
    shown = plan().answer(0, 0, choice, (3, 1))
    meta = shown["meta_info"]
    assert meta["finish_reason"] == reason
    assert (shown["text"], shown["output_ids"], meta["id"]) == ("ab", [7, 8], "id")
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 1)


def test_answers_are_numbered_prompt_by_prompt() -> None:
    made = plan(n=3, several=True)
    shown = [made.answer(prompt, index, Choice(), (1, 0)) for prompt in range(2) for index in range(3)]
    assert [one["index"] for one in shown] == list(range(6))
    assert [one["meta_info"]["id"] for one in shown] == [f"id-{number}" for number in range(6)]


def test_log_probabilities_have_as_many_alternatives_as_were_asked_for() -> None:
    choice = Choice(["a"], [7], [entry(7)], (None, entry(4)))
    asked = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = plan(start=1, **asked).answer(0, 0, choice, (2, 0))["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.0, 7, "t7"]] and meta["input_token_logprobs"] == [[-1.0, 4, "t4"]]
    assert meta["output_top_logprobs"] == [[[-1.0, 7, "t7"], [-2.0, 8, "t8"]]]
    assert meta["input_top_logprobs"] == [[[-1.0, 4, "t4"], [-2.0, 5, "t5"]]]
    none = plan(start=-1, return_logprob=True).answer(0, 0, choice, (2, 0))["meta_info"]
    assert none["input_token_logprobs"] == [] and none["output_token_logprobs"] == [[-1.0, 7, None]]
    assert "output_top_logprobs" not in none
    assert "output_token_logprobs" not in plan().answer(0, 0, choice, (2, 0))["meta_info"]
