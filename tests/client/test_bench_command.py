"""The bench command against played servers, and its loop against a played link with a clock of its own."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from client_cli.bench_load import Conversation, Turn
from client_cli.bench_metrics import Record
from client_cli.bench_run import Bench, _take
from common.connection import Row
from common.messages import ErrorCode, Finish, Generate, GetStats, RequestError, Stats
from common.sampling_params import SamplingParams
from tests.client.client_runs import run
from tests.client.fake_openai import FakeOpenAI
from tests.unit.fake_frontend import FakeFrontend, rows

S = 1_000_000_000


class PlayedLink:
    """Answers each prompt with one token per 10 ms of its clock, `max_tokens` in all; prompts of 13 tokens fail."""

    def __init__(self) -> None:
        self.now = 0
        self.sent: list[tuple[int, Any]] = []
        self.most = 0
        self._left: dict[int, int] = {}
        self._lens: dict[int, int] = {}

    @property
    def live(self) -> int:
        return len(self._left)

    def submit(self, prompt: Any, params: SamplingParams, **_: Any) -> int:
        rid = len(self.sent)
        self.sent.append((self.now, prompt))
        assert params.max_tokens is not None
        self._left[rid], self._lens[rid] = params.max_tokens, len(prompt)
        self.most = max(self.most, self.live)
        return rid

    def abort(self, rid: int) -> None: ...

    def abort_all(self) -> None: ...

    def close(self) -> None: ...

    def poll(self, timeout_s: float) -> list[Row | RequestError]:
        step = S // 100 if self._left else max(1, int(timeout_s * S))
        self.now += min(step, max(1, int(timeout_s * S)))
        if not self._left or timeout_s < 0.01:
            return []
        found: list[Row | RequestError] = []
        for rid in list(self._left):
            if self._lens[rid] == 13:
                del self._left[rid]
                found.append(RequestError(rid, ErrorCode.INTERNAL, "broken"))
                continue
            self._left[rid] -= 1
            finish = Finish.NONE if self._left[rid] else Finish.LENGTH
            found.append(Row(rid, 0, "w", [700 + rid], finish, self._lens[rid], 1, (), self.now))
            if finish:
                del self._left[rid]
        return found


def bench(conversations: list[Conversation], concurrency: int | None, as_text: bool = False) -> tuple[Any, Any, float]:
    link = PlayedLink()
    loop = Bench(
        link, as_text=as_text, params=lambda n: SamplingParams(max_tokens=n, ignore_eos=True), clock=lambda: link.now
    )
    records, duration = loop.run(conversations, concurrency, lambda: None)
    return link, records, duration


def talk(*lens: int, at_s: float = 0.0, output: int = 3) -> Conversation:
    return Conversation(tuple(Turn(tuple(range(n)), output, at_s if i == 0 else 0.0) for i, n in enumerate(lens)))


def test_requests_are_sent_when_they_are_due() -> None:
    link, records, duration = bench([talk(2, at_s=0.5), talk(3), talk(4, at_s=2.0)], None)
    assert [len(prompt) for _, prompt in link.sent] == [3, 2, 4]
    assert [at / S for at, _ in link.sent] == pytest.approx([0, 0.5, 2.0], abs=0.011)
    assert all(0 <= r.sent_ns - r.due_ns <= 11_000_000 for r in records)
    assert [r.output_tokens for r in records] == [3, 3, 3] and [r.prompt_tokens for r in records] == [3, 2, 4]
    assert duration == pytest.approx(2.03, abs=0.02)


def test_a_trace_that_begins_late_takes_no_longer_for_it() -> None:
    _, records, duration = bench([talk(2, at_s=5.0), talk(3, at_s=6.0)], None)
    assert [r.sent_ns / S for r in records] == pytest.approx([5.0, 6.0], abs=0.011)
    assert duration == pytest.approx(1.03, abs=0.02)


def test_concurrency_bounds_what_is_live() -> None:
    link, records, _ = bench([talk(2) for _ in range(10)], 3)
    assert len(records) == 10 and link.most == 3
    assert all(r.sent_ns == r.due_ns for r in records), "without times nothing is late"


def test_an_arrival_that_waits_for_room_is_late() -> None:
    _, records, _ = bench([talk(2), talk(2, at_s=0.01), talk(2, at_s=0.02)], 1)
    assert [r.due_ns for r in records] == [0, S // 100, S // 50]
    assert [(r.sent_ns - r.due_ns) / S for r in records] == pytest.approx([0, 0.02, 0.04], abs=0.011)


def test_the_end_of_a_sequence_is_an_arrival() -> None:
    """Over HTTP its token has neither text nor id, but counts."""
    record = Record(0, 0, 9)
    for at, text, finish in ((10, "w", Finish.NONE), (30, "", Finish.STOP)):
        _take(record, Row(0, 0, text, (), finish, 1, 0, (), at, tokens_so_far=2))
    assert (record.last_ns, record.tpot) == (30, 20 / 1e6)


def test_a_turn_says_everything_before_and_waits_for_its_answer() -> None:
    link, records, _ = bench([talk(2, 4, output=2)], None)
    (first, one), (second, two) = link.sent
    assert one == [0, 1] and two == [0, 1, 700, 700, 0, 1, 2, 3]
    assert second >= records[0].last_ns and first == 0
    text, _, _ = bench([talk(1, 1, output=2)], None, as_text=True)
    assert text.sent[1][1].startswith(text.sent[0][1] + "ww") and isinstance(text.sent[1][1], str)


def test_a_turn_that_fails_ends_its_conversation() -> None:
    link, records, _ = bench([talk(13, 4), talk(2, 2)], 1)
    assert [r.error for r in records] == ["broken", None, None] and len(link.sent) == 3


# ---- the command ---------------------------------------------------------------------------------------------------


def generate(msg: Any) -> Iterable[Any]:
    """max_tokens tokens, and counters."""
    if isinstance(msg, GetStats):
        yield Stats(msg.query, {"scheduler.requests": 1, "scheduler.free_pages": 40})
    elif isinstance(msg, Generate):
        last = msg.params.max_tokens or 1
        for i in range(last):
            yield rows(msg.rid, "w", 700, finish=Finish.LENGTH if i + 1 == last else Finish.NONE)


def test_over_ipc(short_dir: Path) -> None:
    out, image = short_dir / "out.json", short_dir / "out.svg"
    flags = (
        "--requests=6 --input-len=5:7 --output-len=4 --concurrency=2 --warm-up=1 --seed=3 --slo=ttft:60000"
        f" --vocab-size=100 --json={out} --plot={image} --run-dir={short_dir / 'run'}"
    )
    with FakeFrontend(short_dir / "run", generate) as cluster:
        ended = run("bench", *flags.split())
        assert ended.returncode == 0, ended.stderr
        sent = [msg for msg in (cluster.received.get() for _ in range(9)) if isinstance(msg, Generate)]
    assert len(sent) == 7, "a request to warm up, and six that count"
    assert all(m.params.ignore_eos and m.params.max_tokens == 4 and m.params.temperature == 0 for m in sent)
    assert all(m.token_ids is not None and 5 <= len(m.token_ids) <= 7 and max(m.token_ids) < 100 for m in sent)
    found = json.loads(out.read_text())
    summary = found["summary"]
    assert (summary["completed"], summary["output_tokens"], summary["failed"]) == (6, 24, 0)
    assert summary["goodput_requests_per_s"] == pytest.approx(summary["requests_per_s"])
    assert (
        summary["ttft_ms"]["p50"] > 0
        and summary["itl_ms"]["p99"] >= 0
        and summary["cluster"] == {"scheduler.requests": 0}
    )
    assert len(found["requests"]) == 6 and found["config"]["seed"] == 3
    assert "TTFT" in ended.stdout and "goodput" in ended.stdout and image.read_text().startswith("<?xml")


def test_over_http(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with FakeOpenAI() as server:
        flags = ("--requests=5", "--output-len=4", "--request-rate=200", "--input-len=9", f"--json={out}")
        ended = run("bench", *flags, "--warm-up=0", "--url", server.url)
        assert ended.returncode == 0, ended.stderr
        bodies = [server.requests.get()[2] for _ in range(5)]
        assert all(len(b["prompt"]) == 9 and b["max_tokens"] == 4 and b["ignore_eos"] for b in bodies)
        summary = json.loads(out.read_text())["summary"]
        assert (summary["output_tokens"], summary["prompt_tokens"], summary["short_answers"]) == (20, 45, 0)
        ended = run("bench", "--dataset=multi-turn", "--requests=2", "--turns=2", "--warm-up=0", "--url", server.url)
        assert ended.returncode == 0, ended.stderr
        first, second = (server.requests.get()[2]["prompt"] for _ in range(2))
        assert isinstance(first, str) and second.startswith(first + first), "the answer is an echo"


def test_failed_requests_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n')
    flags = ("--dataset=trace", f"--trace={tmp_path / 'trace'}", "--warm-up=0", "--prompts=text")
    with FakeOpenAI(key="k") as server:
        ended = run("bench", *flags, "--url", server.url, "--model", "x")
    assert ended.returncode == 1 and "1 x HTTP 401: wrong key" in ended.stdout
    assert "1 requests failed" in ended.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--slo", "x:1"], "--slo: METRIC is one of ttft, itl, tpot, e2e"),
        (["--dataset", "trace"], "--dataset trace and --trace go together"),
        (["--request-rate", "0"], "--request-rate must be more than 0"),
        (["--input-len", "0"], "--input-len: a length must be between 1"),
        (["--output-len", "x"], "--output-len: a length is N or LOW:HIGH"),
        (["--burstiness", "0"], "--burstiness"),
        (["--burstiness", "nan", "--request-rate", "5"], "--burstiness must be a number"),
        (["--burstiness", "inf", "--request-rate", "5"], "--burstiness must be a number"),
        (["--temperature", "nan"], "--temperature must be at most 100"),
        (["--dataset", "trace", "--trace", sys.executable], "--trace: not UTF-8"),
        (["--json", "/nowhere/x"], "--json: /nowhere/x cannot be written: No such file"),
        (["--plot", "/nowhere/x.png"], "--plot: /nowhere/x.png cannot be written: No such file"),
        (["--plot", "x.xyz"], "--plot: must end in one of ."),
        (["--prompts=ids", "--dataset=multi-turn", "--url=http://127.0.0.1:1"], "--prompts ids: later turns"),
    ],
)
def test_wrong_options(args: list[str], said: str) -> None:
    where = () if any(arg.startswith("--url") for arg in args) else ("--address", "ipc:///nowhere/x")
    ended = run("bench", "--vocab-size", "100", *where, *args)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
