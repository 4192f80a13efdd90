"""client.py with one prompt, as its users run it: a real process against a played cluster on a real socket."""

import contextlib
import dataclasses
import json
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import client
import client_cli.target
from common.messages import Abort, ChatMessage, ErrorCode, Finish, Generate, GetStats, RequestError, Stats, ints
from common.run_dir import RunDir
from common.sampling_params import Grammar, SamplingParams
from tests.client.client_runs import CLIENT, run, run_full, run_unread, start
from tests.unit.fake_frontend import (
    TIMEOUT_S,
    FakeFrontend,
    choices_backwards,
    echo,
    refuse,
    rows,
    silent_after_one_row,
)
from tests.unit.frontend_world import INFO


def test_streams_the_answer(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        ended = run("Hëllo \N{GRINNING FACE}", "--run-dir", str(short_dir))
        sent = cluster.next(Generate)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("Hëllo \N{GRINNING FACE}\n", "", 0)
    assert sent.params == SamplingParams(max_tokens=256)


def test_text_appears_when_it_is_generated(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row):
        process = start("x", "--run-dir", str(short_dir))
        assert process.stdout is not None
        assert process.stdout.read(len("begun")) == "begun"  # while the request goes on
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)


def test_finds_the_only_cluster(short_dir: Path) -> None:
    home = short_dir / "rhizome"
    home.mkdir(mode=0o700)
    with FakeFrontend(home / "one", echo):
        assert run("hello", XDG_RUNTIME_DIR=str(short_dir)).stdout == "hello\n"


def test_takes_an_address(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo, address="tcp://127.0.0.1:*") as cluster:
        assert run("hello", "--address", cluster.address).stdout == "hello\n"


@pytest.mark.parametrize(("stdin", "prompt"), [("a\nb\n", "a\nb"), ("no newline", "no newline"), ("x\n\n", "x\n")])
def test_reads_the_prompt_from_stdin(short_dir: Path, stdin: str, prompt: str) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        assert run("--run-dir", str(short_dir), stdin=stdin).returncode == 0
        assert cluster.next(Generate).text == prompt


def test_every_sampling_flag_arrives(short_dir: Path) -> None:
    flags = (
        "--max-tokens=7 --temperature=0.5 --top-k=3 --top-p=0.9 --min-p=0.1 --seed=42 --stop=END --stop=."
        " --stop-token-id=5 --stop-token-id=6 --ignore-eos --include-stop --keep-special-tokens"
        " --repetition-penalty=1.5 --presence-penalty=0.25 --frequency-penalty=-0.5"
        " --logit-bias=7:-100 --logit-bias=8:2.5 --min-tokens=3"
        " --allowed-token-id=9 --allowed-token-id=4 --bad-word=ugly --bad-word=worse --prompt-logprobs-start=2"
        " --logprobs=4 --prompt-logprobs=0 --beam-search --length-penalty=0.75 --early-stopping --regex=[ab]+ --json"
    )
    with FakeFrontend(short_dir, echo) as cluster:
        assert run("x", *flags.split(), "--run-dir", str(short_dir)).returncode == 0
        params = cluster.next(Generate).params
    assert params == SamplingParams(
        0.5, 3, 0.9, 0.1, 42, 7, ("END", "."), ints(5, 6), True, False, 1.5, 0.25, -0.5, {7: -100.0, 8: 2.5}, 3, 4, 0,
        True, 0.75, True, Grammar("regex", "[ab]+"), True, ints(9, 4), ("ugly", "worse"), 2,
    )  # fmt: skip
    default = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        assert getattr(params, field.name) != getattr(default, field.name), f"no flag for {field.name}"


def test_every_other_flag_of_a_request_arrives(short_dir: Path) -> None:
    flags = ("--n=3", "--cache-salt=tenant", "--priority=-5", "--deadline-ms=700")
    with FakeFrontend(short_dir, choices_backwards) as cluster:
        assert run("x", *flags, "--run-dir", str(short_dir)).returncode == 0
        sent = cluster.next(Generate)
    assert (sent.n, sent.cache_salt, sent.priority, sent.deadline_ms) == (3, "tenant", -5, 700)


def test_several_choices_are_printed_when_they_are_complete(short_dir: Path) -> None:
    with FakeFrontend(short_dir, choices_backwards):
        ended = run("x", "--n", "3", "--run-dir", str(short_dir))
    assert ended.stdout == "--- 3/3\nchoice 2!\n--- 2/3\nchoice 1!\n--- 1/3\nchoice 0!\n"
    assert (ended.stderr, ended.returncode) == ("", 0)


def test_json_of_several_choices(short_dir: Path) -> None:
    with FakeFrontend(short_dir, choices_backwards):
        ended = run("x", "--n", "2", "--json", "--run-dir", str(short_dir))
    answer = json.loads(ended.stdout)
    times = {name: answer.pop(name) for name in ("ttft_ms", "itl_ms", "e2e_ms")}
    assert answer == {
        "text": "choice 0!", "token_ids": [10, 20], "prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0,
        "finish_reason": "length",
        "choices": [
            {"index": 0, "text": "choice 0!", "token_ids": [10, 20], "finish_reason": "length", "cached_tokens": 0},
            {"index": 1, "text": "choice 1!", "token_ids": [11, 20], "finish_reason": "length", "cached_tokens": 2},
        ],
    }  # fmt: skip
    assert 0 < times["ttft_ms"] <= times["e2e_ms"]


def test_an_error_after_the_first_choice_is_a_failure(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "first", 5, choice=1, finish=Finish.LENGTH)
        yield RequestError(msg.rid, ErrorCode.DEADLINE, "not finished in time", "deadline_ms", 9)

    with FakeFrontend(short_dir, answer):
        ended = run("x", "--n", "2", "--run-dir", str(short_dir))
    assert (ended.returncode, ended.stdout) == (1, "--- 2/2\nfirst\n")
    assert "deadline_ms: not finished in time (limit 9)" in ended.stderr


@pytest.mark.parametrize(
    ("args", "chat"),
    [
        (["hi", "--chat"], (ChatMessage("user", "hi"),)),
        (["hi", "--system", "be brief"], (ChatMessage("system", "be brief"), ChatMessage("user", "hi"))),
    ],
)
def test_chat(short_dir: Path, args: list[str], chat: tuple[ChatMessage, ...]) -> None:
    with FakeFrontend(short_dir, echo, info=INFO) as cluster:
        assert run(*args, "--run-dir", str(short_dir)).returncode == 0
        assert cluster.next(Generate).chat == chat


@pytest.mark.parametrize("ids", ["1,2,3", "1, 2, 3", "1 2 3"])
def test_token_ids(short_dir: Path, ids: str) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        assert run("--token-ids", ids, "--run-dir", str(short_dir)).returncode == 0
        assert cluster.next(Generate).token_ids == ints(1, 2, 3)


def test_json(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo):
        ended = run("hello", "--json", "--run-dir", str(short_dir))
    answer = json.loads(ended.stdout)
    times = {name: answer.pop(name) for name in ("ttft_ms", "itl_ms", "e2e_ms")}
    assert answer == {
        "text": "hello", "token_ids": [11, 12, 13], "prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2,
        "finish_reason": "stop",
    }  # fmt: skip
    assert 0 < times["ttft_ms"] <= times["e2e_ms"] and times["itl_ms"] >= 0


@pytest.mark.parametrize(("flags", "shown"), [([], "a.x 1\nb.y 22\n"), (["--json"], '{"b.y": 22, "a.x": 1}\n')])
def test_stats(short_dir: Path, flags: list[str], shown: str) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        assert isinstance(msg, GetStats)
        yield Stats(msg.query, {"b.y": 22, "a.x": 1})

    with FakeFrontend(short_dir, answer):
        assert run("--stats", *flags, "--run-dir", str(short_dir)).stdout == shown


# ---- what can go wrong --------------------------------------------------------------------------------------------


def test_no_cluster(short_dir: Path) -> None:
    for args in ([], ["--run-dir", str(short_dir)], ["--wait", "0.01"]):
        ended = run("hello", *args, XDG_RUNTIME_DIR=str(short_dir))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "no cluster is running" in ended.stderr and "python launch.py" in ended.stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
def test_nobody_at_the_address(address: str) -> None:
    ended = run("hello", "--address", address)
    assert ended.returncode == 2 and address in ended.stderr and "Traceback" not in ended.stderr


def test_a_cluster_file_of_another_version(short_dir: Path) -> None:
    held = RunDir(short_dir)
    held.write_cluster({"version": 99, "addresses": []})
    ended = run("hello", "--run-dir", str(short_dir))
    assert ended.returncode == 2 and "another version" in ended.stderr
    held.close()


def test_waits_for_the_cluster(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster becomes ready while the client waits between two looks."""
    held = RunDir(short_dir)
    info = {"addresses": {"frontend": "ipc://there"}}
    monkeypatch.setattr(client_cli.target.time, "sleep", lambda _: held.write_cluster(info))
    assert client_cli.target.Target(short_dir, wait_s=60).frontend() == "ipc://there"
    held.close()


def test_a_refusal_names_field_and_limit(short_dir: Path) -> None:
    answer = refuse(lambda rid: RequestError(rid, ErrorCode.TOO_LONG, "does not fit the context", "prompt", 512))
    with FakeFrontend(short_dir, answer):
        ended = run("hello", "--run-dir", str(short_dir))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "prompt: does not fit the context (limit 512)" in ended.stderr


def test_a_cluster_that_dies(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row) as cluster:
        process = start("x", "--run-dir", str(short_dir))
        assert process.stdout is not None
        assert process.stdout.read(len("begun")) == "begun"
        cluster.close()
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and "its other end is gone" in errors and "Traceback" not in errors


def test_an_abort_by_the_cluster_is_a_failure(short_dir: Path) -> None:
    with FakeFrontend(short_dir, lambda msg: [rows(msg.rid, "", finish=Finish.ABORT)]):
        ended = run("x", "--run-dir", str(short_dir))
    assert ended.returncode == 1 and "aborted" in ended.stderr


def test_one_aborted_choice_is_a_failure(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "", choice=0, finish=Finish.ABORT)
        yield rows(msg.rid, "", choice=1, finish=Finish.LENGTH)

    with FakeFrontend(short_dir, answer):
        ended = run("x", "--n", "2", "--run-dir", str(short_dir))
    assert ended.returncode == 1 and "aborted" in ended.stderr


@pytest.mark.parametrize("answers_abort", [True, False])
def test_ctrl_c_aborts_on_the_server(short_dir: Path, answers_abort: bool) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        return silent_after_one_row(msg) if answers_abort or isinstance(msg, Generate) else ()

    with FakeFrontend(short_dir, answer) as cluster:
        process = start("x", "--run-dir", str(short_dir))
        assert process.stdout is not None
        process.stdout.read(len("begun"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        rid = cluster.next(Generate).rid
        assert cluster.next(Abort).rid == rid
    assert process.returncode == 130 and errors.strip() == "interrupted, requests aborted: 1"


def test_a_closed_pipe_ends_quietly(short_dir: Path) -> None:
    """As in `client.py ... | head -c 1`: the next write fails, and the request is aborted."""
    started = threading.Event()

    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Abort):
            yield rows(msg.rid, "", finish=Finish.ABORT)
            return
        yield rows(msg.rid, "x" * 10, 11)
        assert started.wait(TIMEOUT_S) and process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        for token in range(100):
            yield rows(msg.rid, "y" * 1000, token)

    with FakeFrontend(short_dir, answer) as cluster:
        process = subprocess.Popen(
            [*CLIENT, "x", "--run-dir", str(short_dir)], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.set()
        assert process.stderr is not None
        errors = process.stderr.read()
        process.wait(TIMEOUT_S)
        cluster.next(Generate)
        cluster.next(Abort)
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.parametrize(
    "args", [["x"], ["--stats"], ["chat"], ["batch", "IN", "OUT"], ["bench"], ["status"], ["top"], ["top", "--once"]]
)
def test_ctrl_c_while_a_command_waits_for_a_cluster(
    short_dir: Path, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client_cli.target.time, "sleep", interrupt)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (short_dir / "in").write_text(json.dumps(line))
    files = {"IN": str(short_dir / "in"), "OUT": str(short_dir / "out")}
    flags = ["--run-dir", str(short_dir), "--wait", "60"]
    ended = CliRunner().invoke(client.main, [files.get(arg, arg) for arg in args] + flags)
    assert (ended.exit_code, ended.stderr.strip().startswith("interrupted")) == (130, True), ended.stderr


@pytest.mark.parametrize(
    "args", [["x"], ["--stats"], ["chat"], ["status"], ["top", "--once"], ["bench", "--requests=1", "--warm-up=0"]]
)
def test_a_reader_that_has_gone_ends_every_command_alike(short_dir: Path, args: list[str]) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        return [Stats(msg.query, {"a.x": 1})] if isinstance(msg, GetStats) else echo(msg)

    flags = ["--vocab-size=20"] if args[0] == "bench" else []
    with FakeFrontend(short_dir, bench_answer if flags else answer, info=INFO):
        ended = run_unread(*args, *flags, "--run-dir", str(short_dir), stdin="hi\n")
        full = run_full(*args, *flags, "--run-dir", str(short_dir), stdin="hi\n")
    assert (ended.returncode, ended.stderr) == (141, "")
    assert full.returncode == 1 and full.stderr.endswith("Error: No space left on device\n")
    assert "Traceback" not in full.stderr


@pytest.mark.parametrize(
    ("command", "said"), [("b <&-", "b\n"), ("chat <&-", ""), ("b <&- >&-", ""), ("b >&- 2>&-", "")]
)
def test_streams_that_are_closed_are_empty(short_dir: Path, command: str, said: str) -> None:
    with FakeFrontend(short_dir, echo, info=INFO):
        whole = f"exec {shlex.join(CLIENT)} {command} --run-dir {shlex.quote(str(short_dir))}"
        ended = subprocess.run(["sh", "-c", whole], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, said, "")


def bench_answer(msg: Any) -> Iterable[Any]:
    if isinstance(msg, GetStats):
        yield Stats(msg.query, {"a.x": 1})
    elif isinstance(msg, Generate):
        yield rows(msg.rid, "x", 5, finish=Finish.STOP)


def test_waits_for_an_address(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody comes to the address while the client waits between two looks."""
    address, started = f"ipc://{short_dir}/late.sock", []
    with contextlib.ExitStack() as stack:

        def come(_: float) -> None:
            if not started:
                started.append(FakeFrontend(short_dir / "run", echo, address=address, info=INFO))
                stack.enter_context(started[0])

        monkeypatch.setattr(client_cli.target.time, "sleep", come)
        link = client_cli.target.Target(address=address, wait_s=60).open()
        link.close()
    assert started


def test_an_error_begins_a_line_of_its_own(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "begun", 11)
        yield RequestError(msg.rid, ErrorCode.INTERNAL, "broken")

    with FakeFrontend(short_dir, answer):
        ended = run("x", "--run-dir", str(short_dir))
    assert (ended.stdout, ended.stderr, ended.returncode) == ("begun\n", "Error: broken\n", 1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--temperature", "200"], "temperature: must be at least 0 and at most 100"),
        (["x", "--temperature", "nan"], "temperature: must be at least 0"),
        (["x", "--max-tokens", "0"], "max-tokens: must be between 1 and"),
        (["x", "--top-p", "0"], "top-p: must be more than 0"),
        (["x", "--min-p", "1.5"], "min-p: must be at least 0 and at most 1"),
        (["x", "--top-k", "-1"], "top-k: must be between 0"),
        (["x", "--seed", "-1"], "seed: must be between 0"),
        (["x", "--seed", str(2**63)], "seed: must be between 0"),
        (["x", "--stop", ""], "stop[0]: must have 1 to 512 characters"),
        (["x", *["--stop=a"] * 17], "stop: must have 0 to 16 entries"),
        (["x", "--stop-token-id", "-1"], "stop-token-ids: entries must be between 0"),
        (["x", "--stop-token-id", str(2**40)], "stop-token-ids: entries must be between 0"),
        (["x", "--n", "0"], "n: must be between 1 and 64, got 0"),
        (["x", "--n", "65"], "n: must be between 1 and 64, got 65"),
        (["x", "--cache-salt", "x" * 257], "cache-salt: must have 0 to 256 characters"),
        (["x", "--priority", "1001"], "priority: must be between -1000 and 1000"),
        (["x", "--deadline-ms", "-1"], "deadline-ms: must be between 0"),
        (["--token-ids", "1,x"], "integers separated by commas"),
        (["--token-ids", "1,-2"], "token-ids: entries must be between 0"),
        (["x", "--token-ids", "1"], "Give one of"),
        (["x", "--stats"], "Give one of"),
        (["--token-ids", "1", "--chat"], "need a text prompt"),
        (["x", "--output", "never-written"], "--output belongs to --jsonl"),
        (["x", "--run-dir", "d", "--address", "tcp://127.0.0.1:5"], "exclude each other"),
        (["x", "--concurrency", "0"], "--concurrency"),
        (["x", "--frobnicate"], "No such option"),
        (["\udcff"], "prompt: must be valid Unicode text"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(args: list[str], said: str) -> None:
    """No cluster is needed to hear of them, and none is looked for."""
    ended = run(*args)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    assert not Path("never-written").exists()


def test_help_names_every_option() -> None:
    for name, words in client.COMMANDS.items():
        assert f"{name} " in run("--help").stdout and words
        shown = run(name, "--help").stdout
        command = client.main.get_command(click.Context(client.main), name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help and parameter.opts[0] in shown
