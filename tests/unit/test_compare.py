"""bench.compare's systems, played by small programs: none of the real ones is started."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner

from bench.compare import CASES, llama_server, main
from bench.peers.closed_loop import closed_loop
from bench.peers.systems import BenchError, Case, InProcess, System
from client_cli.bench_metrics import spread

Hosted = TypeVar("Hosted", bound=System)
CASE = Case("a case", requests=5, prefix=3, input=4, output=6, concurrency=2)

SERVER = """#!{python}
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

pathlib.Path(__file__).with_suffix(".argv").write_text(json.dumps(sys.argv[1:]))
asked = []

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_GET(self):
        if self.path == "/health":
            asked.append(self.path)
        ready = self.path != "/health" or len(asked) > 2
        self.answer(200 if ready else 503, json.dumps({{"data": [{{"id": "m"}}]}}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with pathlib.Path(__file__).with_suffix(".bodies").open("a") as file:
            file.write(json.dumps(body) + "\\n")
        tokens = body["max_tokens"] - {lacking}
        chunks = [{{"choices": [{{"index": 0, "text": "a", "finish_reason": None}}]}}] * (tokens - 1)
        chunks.append({{"choices": [{{"index": 0, "text": "a", "finish_reason": "length"}}]}})
        usage = {{"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}}
        chunks.append({{"choices": [], "usage": usage}})
        lines = "".join("data: " + json.dumps(chunk) + "\\n\\n" for chunk in chunks) + "data: [DONE]\\n\\n"
        self.answer(200, lines.encode(), "text/event-stream")

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

DRIVER = """
import sys
sys.path.insert(0, {peers!r})
from closed_loop import serve

left = {{}}

def add(prompt, output):
    left[len(prompt), len(left)] = output
    return list(left)[-1]

def poll():
    key = next(key for key, output in left.items() if output)
    left[key] -= 1
    return [(key, {per_step}, not left[key])]

serve("1", int(sys.argv[1]), add, poll)
"""


class Engine:
    """Gives every running request one token a step, and takes a second for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.prompts: list[list[int]] = []
        self.left: dict[int, int] = {}
        self.most = 0

    def add(self, prompt: list[int], output: int) -> int:
        self.prompts.append(prompt)
        self.left[len(self.prompts)] = output
        self.most = max(self.most, len(self.left))
        return len(self.prompts)

    def poll(self) -> list[tuple[int, int, bool]]:
        self.now += 1.0
        self.left = {key: output - 1 for key, output in self.left.items()}
        news = [(key, 1, not output) for key, output in self.left.items()]
        self.left = {key: output for key, output in self.left.items() if output}
        return news


def counting() -> Callable[[int], list[int]]:
    drawn = iter(range(10**6))
    return lambda n: [next(drawn) for _ in range(n)]


def fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("requests", "prefix", "input", "output", "concurrency")}


def test_the_closed_loop_keeps_as_many_requests_running_as_asked() -> None:
    engine = Engine()
    figures = closed_loop(fields(CASE), counting(), engine.add, engine.poll, lambda: engine.now)
    assert engine.most == 2 and len(engine.prompts) == 5
    assert all(prompt[:3] == [0, 1, 2] and len(prompt) == 7 for prompt in engine.prompts)
    assert len({tuple(prompt[3:]) for prompt in engine.prompts}) == 5
    assert figures["output_tokens"] == 30
    assert engine.now == 18  # two, two, and one alone, of six steps each
    assert figures["output_tokens_per_s"] == pytest.approx(30 / 18)
    assert figures["total_tokens_per_s"] == pytest.approx((30 + 35) / 18)
    assert (figures["ttft_ms"], figures["itl_p99_ms"]) == (1000.0, 1000.0)


def test_tokens_that_come_together_are_all_counted_and_an_end_may_come_without_one() -> None:
    steps = iter([[(0, 4, False)], [(0, 2, False)], [(0, 0, True)]])
    case = fields(Case("", 1, 0, 4, 6, 1))
    ticks = iter(range(100))
    figures = closed_loop(case, counting(), lambda prompt, output: 0, lambda: next(steps), lambda: next(ticks))
    assert figures["output_tokens"] == 6


def test_libraries_and_servers_are_judged_by_the_same_percentiles() -> None:
    """Four requests that are sent at 0, whose two tokens come at these seconds."""
    arrivals = [(10, 0, False), (14, 1, False), (18, 2, False), (50, 3, False), *((60, key, True) for key in range(4))]
    now, coming, keys = [0.0], iter(arrivals), iter(range(4))

    def poll() -> list[tuple[int, int, bool]]:
        now[0], key, ended = next(coming)
        return [(key, 1, ended)]

    case = fields(Case("", 4, 0, 1, 2, 4))
    figures = closed_loop(case, counting(), lambda prompt, output: next(keys), poll, lambda: now[0])
    ttft, gaps = spread([10e3, 14e3, 18e3, 50e3]), spread([50e3, 46e3, 42e3, 10e3])
    assert ttft is not None and gaps is not None
    assert (figures["ttft_ms"], figures["itl_p99_ms"]) == (ttft["p50"], gaps["p99"]) == (16e3, pytest.approx(49880))
    assert figures["itl_max_ms"] == gaps["max"] == 50e3


@contextmanager
def started(system: Hosted) -> Iterator[Hosted]:
    """Ended whatever happens, also when it does not start."""
    try:
        system.start()
        yield system
    finally:
        system.stop()


def driver(folder: Path, per_step: int) -> InProcess:
    peers = Path(__file__).resolve().parents[2] / "bench" / "peers"
    script = folder / "driver.py"
    script.write_text(DRIVER.format(peers=str(peers), per_step=per_step))
    return InProcess("a library", Path(sys.executable), str(script), "100")


def test_a_library_in_process_answers_cases_rests_and_ends(tmp_path: Path) -> None:
    with started(driver(tmp_path, 1)) as system:
        assert system.start_s > 0 and system.memory() > 0
        assert system.run(CASE)["output_tokens"] == 30
        system.rest()
        system.wake()
        assert system.run(CASE)["output_tokens"] == 30


def test_a_library_that_gives_other_lengths_is_no_result(tmp_path: Path) -> None:
    with (
        started(driver(tmp_path, 2)) as system,
        pytest.raises(BenchError, match="not every request got its 6 tokens"),
    ):
        system.run(CASE)


def test_a_library_that_does_not_start_says_why(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text("raise SystemExit('no such model')")
    system = InProcess("a library", Path(sys.executable), str(script))
    with pytest.raises(BenchError, match="no such model"), started(system):
        pass


def server(folder: Path, lacking: int = 0) -> Path:
    program = folder / "llama-server"
    program.write_text(SERVER.format(python=sys.executable, lacking=lacking))
    program.chmod(0o755)
    return program


def test_llama_cpp_gets_ids_of_exact_lengths_and_is_ready_when_it_says_so(tmp_path: Path) -> None:
    program = server(tmp_path)
    with started(llama_server(program, tmp_path / "m.gguf", 100)) as system:
        figures = system.run(CASE)
    assert figures["output_tokens_per_s"] > 0
    argv = json.loads(program.with_suffix(".argv").read_text())
    assert int(argv[argv.index("--parallel") + 1]) == max(case.concurrency for case in CASES)
    tokens = max(case.concurrency * (case.prefix + case.input + case.output) for case in CASES)
    assert int(argv[argv.index("--ctx-size") + 1]) >= tokens and "--kv-unified" in argv
    bodies = [json.loads(line) for line in program.with_suffix(".bodies").read_text().splitlines()]
    assert len(bodies) == 5
    assert all(len(body["prompt"]) == 7 and all(type(token) is int for token in body["prompt"]) for body in bodies)
    assert all(body["ignore_eos"] and body["max_tokens"] == 6 and body["temperature"] == 0 for body in bodies)


def test_a_server_that_stops_early_is_no_result(tmp_path: Path) -> None:
    with (
        started(llama_server(server(tmp_path, lacking=1), tmp_path / "m.gguf", 100)) as system,
        pytest.raises(BenchError, match="not every request got its 6 tokens"),
    ):
        system.run(CASE)


@pytest.mark.parametrize("name", ["openvino", "llama-cpp"])
def test_a_program_without_its_model_is_refused(tmp_path: Path, name: str) -> None:
    for option in (name, f"{name}-model"):
        done = CliRunner().invoke(main, ["--model", str(tmp_path), f"--{option}", str(tmp_path)])
        assert done.exit_code == 2 and f"--{name}" in done.output and "go together" in done.output


def test_a_case_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--model", str(tmp_path), "--only", "out"])
    assert done.exit_code == 2 and "--only" in done.output
