"""The launcher's decisions: how often something is started again, and who is alive."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import launch
from common.messages import Ready
from launcher.liveness import STUCK_FACTOR, Liveness, left_alone
from launcher.options import size
from launcher.process import ROOT, Proc
from launcher.restarts import Restarts
from launcher.supervisor import ClusterError, _limits
from launcher.usage import OURS

FROZEN_S = 3.0
STUCK_S = STUCK_FACTOR * FROZEN_S


# ---- the command line ---------------------------------------------------------------------------------------------


def test_a_command_line_for_another_server() -> None:
    names = {name for p in launch.main.params for name in (*p.opts, *p.secondary_opts)}
    assert set(OURS.values()) <= names and not set(OURS) & names
    for args, said in (
        (["--tensor-parallel-size", "2"], "No such option '--tensor-parallel-size'; here it is --tp\n"),
        (["--max-model-len=9"], "here it is --context-len\n"),
        (["demo_model", "--tp", "2"], "Unexpected argument 'demo_model'; the model is given by --model\n"),
        (["--frobnicate"], "No such option '--frobnicate'.\n"),
    ):
        result = CliRunner().invoke(launch.main, args)
        assert result.exit_code == 2 and result.output.endswith(said), result.output


# ---- what workers have said ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "number"), [("context_len", 1), ("vocab_size", 2**31 - 1), ("num_pages", 0)])
def test_limits_that_nobody_would_take_are_named(field: str, number: int) -> None:
    info = {"num_pages": 4, "page_size": 16, "context_len": 64, "vocab_size": 99, "eos_0": 7, "eos_1": 3}
    go = _limits([Ready("worker-0", 1, info), Ready("worker-1", 2, info | {"num_pages": 3})])
    assert (go.num_pages, go.context_len, list(go.eos_token_ids)) == (3, 64, [3, 7])
    with pytest.raises(ClusterError, match=rf"cannot be announced: Go\.{field}: must be between .*, got {number}$"):
        _limits([Ready("worker-0", 1, info | {field: number})])


# ---- restarts -----------------------------------------------------------------------------------------------------


def test_the_first_restart_is_at_once_and_then_they_become_rare() -> None:
    restarts = Restarts(8, 60.0)
    assert [restarts.after_death(float(t)) for t in range(9)] == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, None]
    assert restarts.total == 8


def test_deaths_are_forgotten_after_a_while() -> None:
    restarts = Restarts(2, 60.0)
    assert [restarts.after_death(t) for t in (0.0, 10.0, 59.0)] == [0.0, 0.25, None]
    assert restarts.after_death(60.0) == 0.25, "the first one is forgotten, the second is not"
    assert restarts.after_death(200.0) == 0.0
    assert restarts.total == 4


def test_no_restarts_at_all() -> None:
    assert Restarts(0, 60.0).after_death(5.0) is None


@given(st.integers(1, 6), st.lists(st.floats(0.0, 30.0), max_size=60))
def test_never_more_than_the_limit_within_any_window(limit: int, gaps: list[float]) -> None:
    restarts, now, granted = Restarts(limit, 60.0), 0.0, []
    for gap in gaps:
        now += gap
        if restarts.after_death(now) is not None:
            granted.append(now)
        else:
            assert sum(now - when < 60.0 for when in granted) >= limit, "refused without need"
    for when in granted:
        assert sum(when <= other < when + 60.0 for other in granted) <= limit


# ---- liveness -----------------------------------------------------------------------------------------------------


class Watched:
    """A Liveness that is looked at ten times a second."""

    def __init__(self, *names: str) -> None:
        self.liveness = Liveness(FROZEN_S)
        self.names = names
        self.now = 100.0
        self.progress = dict.fromkeys(names, 0)
        self.busy = dict.fromkeys(names, False)

    def run(self, seconds: float, *, silent: tuple[str, ...] = (), getting_on: tuple[str, ...] = ()) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.liveness.look(self.now)
            for name in self.names:
                self.progress[name] += name in getting_on
                if name not in silent:
                    self.liveness.pulse(name, self.progress[name], self.busy[name], self.now)

    @property
    def frozen(self) -> str | None:
        return self.liveness.frozen(self.names, self.now)

    @property
    def stuck(self) -> bool:
        return self.liveness.stuck(self.names, self.now)


def test_who_is_silent_is_frozen_and_who_speaks_is_not() -> None:
    watched = Watched("a", "b")
    watched.run(1)
    watched.run(FROZEN_S - 0.2, silent=("b",))
    assert watched.frozen is None
    watched.run(0.4, silent=("b",))
    assert watched.frozen == "b"
    watched.run(0.1)
    assert watched.frozen is None and not watched.stuck


def test_who_has_never_spoken_is_still_loading() -> None:
    watched = Watched("a", "b")
    watched.run(100, silent=("a", "b"))
    assert watched.frozen is None and not watched.stuck


def test_a_new_process_does_not_inherit_the_silence_of_the_old_one() -> None:
    watched = Watched("a")
    watched.run(1)
    watched.run(FROZEN_S + 1, silent=("a",))
    watched.liveness.forget("a")
    assert watched.frozen is None
    watched.run(0.1)
    assert watched.frozen is None


def test_a_long_step_that_gets_on_is_not_stuck() -> None:
    watched = Watched("a", "b")
    watched.busy = {"a": True, "b": True}
    watched.run(600, getting_on=("a",))  # b waits for a in a collective
    assert not watched.stuck and watched.frozen is None


@pytest.mark.parametrize("busy", [("a",), ("a", "b")])
def test_ranks_that_all_wait_are_stuck(busy: tuple[str, ...]) -> None:
    """Both in a collective that does not end, or one in a collective that the other one never comes to."""
    watched = Watched("a", "b")
    watched.run(1)
    watched.busy |= dict.fromkeys(busy, True)
    watched.run(STUCK_S - 0.2)
    assert not watched.stuck
    watched.run(0.5)
    assert watched.stuck and watched.frozen is None


def test_idle_ranks_are_not_stuck() -> None:
    watched = Watched("a", "b")
    watched.run(600)
    assert not watched.stuck
    watched.busy = {"a": True, "b": True}
    watched.run(STUCK_S - 0.2)
    assert not watched.stuck, "the time before the step does not count"


def test_a_stopped_process_is_known_before_it_can_speak() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        proc = Proc("a", popen)
        try:
            assert not proc.stopped
            popen.send_signal(signal.SIGSTOP)
            os.waitpid(popen.pid, os.WUNTRACED)
            assert proc.stopped
            popen.send_signal(signal.SIGCONT)
            os.waitpid(popen.pid, os.WCONTINUED)
            assert not proc.stopped
        finally:
            popen.kill()
        popen.wait()
        assert not proc.stopped


@pytest.mark.parametrize(
    ("joined", "computing", "alone"),
    [
        ([], [5], False),  # nobody has joined yet: both may be in step 6
        ([5], [4], False),  # it still has to come to where the other one is
        ([5], [5], True),  # in step 6, which the other one leaves out
        ([6], [5], False),  # in step 6, which the other one has behind it
        ([7, 5, 6], [5], True),
        ([5], [], False),  # it will join soon
    ],
)
def test_a_rank_that_the_others_have_left_alone(joined: list[int], computing: list[int], alone: bool) -> None:
    assert left_alone(joined, computing) is alone


def test_a_launcher_that_was_stopped_itself_blames_nobody() -> None:
    watched = Watched("a", "b")
    watched.busy = {"a": True, "b": True}
    watched.run(2, getting_on=("a",))
    watched.now += 3600
    watched.liveness.look(watched.now)
    assert watched.frozen is None and not watched.stuck
    watched.run(FROZEN_S + 0.5, silent=("b",), getting_on=("a",))
    assert watched.frozen == "b", "from now on silence counts again"


def test_an_installed_package_asks_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "demo_model" in launch.main.make_context("launch", []).params["path"]
    monkeypatch.setattr(launch, "DEMO_MODEL", tmp_path / "demo_model")  # as in site-packages, where none is
    with pytest.raises(ClusterError, match="--model is needed: the demo model comes with the repository"):
        launch._find_model(str(tmp_path / "demo_model"))


def test_launch_works_with_the_oldest_click_that_may_be_installed() -> None:
    """Before 8.4 its ParamType is no generic class."""
    code = "import click; click.ParamType = type('ParamType', (), {}); import launcher.options"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "found"), [("512MiB", 2**29), ("2G", 2**31), ("1.5k", 1536), ("1000000", 10**6), ("7b", 7)]
)
def test_sizes(text: str, found: int) -> None:
    assert size(text) == found


@pytest.mark.parametrize("text", ["5x", "", "GiB", "nan", "inf", "1e999"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size such as 512MiB or 2G"):
        size(text)


# ---- signals ------------------------------------------------------------------------------------------------------


HANG_UP_TWICE = """
import os, signal, sys
from launcher.control import Control
control = Control(f"ipc://{sys.argv[1]}/control.sock")
for _ in range(2):
    os.kill(os.getpid(), signal.SIGHUP)
print(control.stops, control.hang_ups)
"""


@pytest.mark.parametrize(
    ("terminal", "at_first", "heard"),
    [(True, signal.SIG_DFL, "1 0"), (True, signal.SIG_IGN, "0 0"), (False, signal.SIG_DFL, "0 2")],
    ids=["terminal", "nohup", "service"],
)
def test_what_a_hang_up_means(tmp_path: Path, terminal: bool, at_first: signal.Handlers, heard: str) -> None:
    """A terminal that is closed hangs up, wherever input comes from; its shell may say so as well."""
    ours, theirs = os.openpty()

    def in_session() -> None:
        os.setsid()
        signal.signal(signal.SIGHUP, at_first)
        if terminal:
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-c", HANG_UP_TWICE, str(tmp_path)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, preexec_fn=in_session, cwd=ROOT
    )
    os.close(ours)
    os.close(theirs)
    assert done.stdout.strip() == heard, done.stderr
