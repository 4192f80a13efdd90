"""The one line that tells what became of a request."""

from array import array

from common.messages import Finish, Timing
from common.rows import Row
from common.story import Story

MS = 10**6


def row(choice: int, tokens: int, at_ms: int, *, finish: Finish = Finish.NONE, timing: Timing | None = None) -> Row:
    return Row(0, choice, "t", [1] * tokens, finish, 3, 1, array("q", [0, at_ms * MS]), 0, timing=timing)


def words(line: str) -> dict[str, str]:
    kind, *rest = line.split(" ")
    assert kind == "request"
    return dict(word.split("=", 1) for word in rest)


def story(**more: object) -> Story:
    return Story("id-1", "POST", "/v1/completions", generates=True, arrival_ns=10 * MS, **more)  # type: ignore[arg-type]


def test_times_of_an_answer_that_came_at_once() -> None:
    told = story(prompt_tokens=3, cached_tokens=1, status=200)
    told.row(0, row(0, 5, 100, finish=Finish.LENGTH, timing=Timing(0, 11 * MS, 20 * MS, 60 * MS)))
    line = words(told.line(110 * MS))
    assert (line["queue_ms"], line["ttft_ms"], line["itl_ms"], line["e2e_ms"]) == ("10.0", "50.0", "10.00", "100.0")
    assert (line["prompt"], line["cached"], line["output"], line["finish"]) == ("3", "1", "5", "length")
    assert "error" not in line and "trace" not in line


def test_choices_are_told_together() -> None:
    """Queue and first token of the earliest, the mean gap of all."""
    told = story()
    told.row(0, row(1, 1, 60, timing=Timing(0, 0, 40 * MS, 60 * MS)))
    told.row(1, row(0, 1, 50, timing=Timing(0, 0, 30 * MS, 50 * MS)))
    told.row(0, row(1, 2, 70, finish=Finish.STOP, timing=Timing(0, 0, 40 * MS, 60 * MS)))  # 2 gaps in 10 ms
    told.row(1, row(0, 1, 65, finish=Finish.STOP, timing=Timing(0, 0, 30 * MS, 50 * MS)))  # 1 gap of 15 ms
    line = words(told.line(80 * MS))
    assert (line["queue_ms"], line["ttft_ms"], line["itl_ms"]) == ("20.0", "40.0", "8.33")
    assert (line["finish"], line["output"]) == ("stop*2", "5")
    assert (told.started_ns, told.first_ns, told.last_ns) == (30 * MS, 50 * MS, 70 * MS)


def test_a_stream_that_its_client_left_has_its_times_too() -> None:
    told = story(status=499, error="client_closed", problem="the client closed the connection")
    told.row(0, row(0, 1, 50, timing=Timing(0, 0, 30 * MS, 50 * MS)))
    told.row(0, row(0, 1, 60))
    line = words(told.line(80 * MS).partition(" problem=")[0])
    assert (line["queue_ms"], line["ttft_ms"], line["itl_ms"]) == ("20.0", "40.0", "10.00")
    assert (line["status"], line["error"], line["finish"]) == ("499", "client_closed", "-")


def test_a_request_that_was_refused() -> None:
    told = story(status=400, ignored=["zap"])
    told.fail("invalid_value", "n: is\nwrong")
    line = told.line(12 * MS)
    assert "\n" not in line and "error=invalid_value problem='n: is\\nwrong'" in line
    assert words(line.partition(" problem=")[0])["ttft_ms"] == "-"
    silent = Story("b", "GET", "/metrics", status=200, arrival_ns=1)
    assert set(words(silent.line(2))) == {"id", "key", "method", "route", "status", "e2e_ms"}
