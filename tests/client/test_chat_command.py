"""The chat command: what lines mean, the conversation, and the whole on a pipe and on a terminal."""

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_cli.conversation import HELP, Conversation, ConversationError, Do, parse_line
from common.messages import Abort, ErrorCode, Finish, Generate, RequestError
from tests.client.client_runs import CLIENT, run
from tests.client.fake_openai import FakeOpenAI
from tests.unit.fake_frontend import TIMEOUT_S, FakeFrontend, rows
from tests.unit.frontend_world import INFO


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("", (Do.NOTHING, "")),
        ("  \n", (Do.NOTHING, "")),
        (" hello /you ", (Do.SAY, "hello /you")),
        ("//etc/hosts", (Do.SAY, "/etc/hosts")),
        ("/system be brief", (Do.SYSTEM, "be brief")),
        ("/system", (Do.SYSTEM, "")),
        ("/save my file.json", (Do.SAVE, "my file.json")),
        ("/save", (Do.WRONG, "/save needs a file name")),
        ("/reset", (Do.RESET, "")),
        ("/reset now", (Do.WRONG, "/reset takes no argument")),
        ("/help", (Do.HELP, "")),
        ("/exit", (Do.EXIT, "")),
        ("/Exit", (Do.WRONG, "/Exit is no command; /help lists them")),
    ],
)
def test_what_a_line_means(line: str, meaning: tuple[Do, str]) -> None:
    assert parse_line(line) == meaning


def test_help_names_every_command() -> None:
    for word in ("/system", "/reset", "/save", "/help", "/exit", "Ctrl-C"):
        assert word in HELP


@given(st.none() | st.text(), st.lists(st.tuples(st.text(), st.text()), max_size=4))
def test_a_saved_conversation_is_loaded_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, turns: list[tuple[str, str]]
) -> None:
    conversation = Conversation(system)
    for said, answered in turns:
        conversation.say(said)
        conversation.answer(answered)
    path = tmp_path_factory.mktemp("c") / "saved.json"
    try:
        conversation.save(path)
    except UnicodeEncodeError:
        return  # a lone surrogate, which no terminal sends
    assert Conversation.load(path) == conversation


@pytest.mark.parametrize(
    "text",
    [
        "[", "{}", '{"messages": 5}', '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "x"}]}', '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "x"}]}', "[" * 100_000,
    ],
)  # fmt: skip
def test_other_files_are_no_conversations(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConversationError, match="not a saved conversation"):
        Conversation.load(path)
    ended = run("chat", "--load", str(path))
    assert ended.returncode == 2 and "not a saved conversation" in ended.stderr


def parrot(msg: Any) -> Iterable[Any]:
    """Answer a chat with its last message and the number of messages; `wait` begins and never goes on."""
    if isinstance(msg, Abort):
        yield rows(msg.rid, "", finish=Finish.ABORT)
    elif isinstance(msg, Generate):
        said = msg.chat[-1].content if msg.chat else ""
        if said == "wait":
            yield rows(msg.rid, "begun", 11)
        elif said == "half":
            yield rows(msg.rid, "half an answer", 11)
            yield RequestError(msg.rid, ErrorCode.INTERNAL, "broken")
        elif said == "fail":
            yield RequestError(msg.rid, ErrorCode.TOO_LONG, "does not fit", "prompt", 9)
        else:
            yield rows(msg.rid, f"{said}!", 11)
            yield rows(msg.rid, str(len(msg.chat or ())), 12, finish=Finish.STOP)


def contents(msg: Generate) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in msg.chat or ()]


def test_lines_of_a_pipe(short_dir: Path) -> None:
    saved = short_dir / "saved.json"
    lines = ["one", "", "two", "fail", "/nonsense", f"/save {saved}", "/reset", "three", "/system s", "four", "/system"]
    with FakeFrontend(short_dir / "run", parrot, info=INFO) as cluster:
        flags = ("--max-tokens", "9", "--temperature", "0.5", "--run-dir", str(short_dir / "run"))
        ended = run("chat", *flags, stdin="\n".join(lines))
        sent = [cluster.next(Generate) for _ in range(5)]
        again = run("chat", "--load", str(saved), "--run-dir", str(short_dir / "run"), stdin="five\n/exit\nsix\n")
        last = cluster.next(Generate)
        assert cluster.received.empty()
    assert (ended.returncode, again.returncode) == (1, 0), ended.stderr
    assert ended.stdout.splitlines() == ["one!1", "two!3", "three!1", "four!2"]
    assert ended.stderr.splitlines() == [
        "Error: prompt: does not fit (limit 9)", "Error: /nonsense is no command; /help lists them",
        f"(4 messages saved to {saved})", "(conversation forgotten)",
        "(system message set, conversation started anew)", "s", "Error: 2 lines failed",
    ]  # fmt: skip
    assert contents(sent[1]) == [("user", "one"), ("assistant", "one!1"), ("user", "two")]
    assert contents(sent[3]) == [("user", "three")] and contents(sent[4]) == [("system", "s"), ("user", "four")]
    assert (sent[0].params.max_tokens, sent[0].params.temperature) == (9, 0.5)
    assert contents(last) == [*contents(sent[1]), ("assistant", "two!3"), ("user", "five")]
    assert json.loads(saved.read_text())["messages"][-1] == {"role": "assistant", "content": "two!3"}


def test_a_message_that_fails_is_taken_back_with_what_came_of_its_answer(short_dir: Path) -> None:
    with FakeFrontend(short_dir, parrot, info=INFO) as cluster:
        ended = run("chat", "--run-dir", str(short_dir), stdin="half\ntwo\n")
        cluster.next(Generate)
        assert contents(cluster.next(Generate)) == [("user", "two")]
    assert ended.stdout == "half an answer\ntwo!1\n" and ended.stderr.startswith("Error: broken\n")


@pytest.mark.parametrize("name", ["~nosuchuser/f", "a\0b", "/nowhere/at/all"])
def test_names_that_cannot_be_written(short_dir: Path, name: str) -> None:
    with FakeFrontend(short_dir, parrot, info=INFO):
        ended = run("chat", "--run-dir", str(short_dir), stdin=f"/save {name}\none\n")
    assert ended.stdout == "one!1\n" and "cannot be written: " in ended.stderr, ended.stderr


class Terminal:
    """The client on a pseudo-terminal."""

    def __init__(self, *args: str, term: str = "dumb"):
        self._fd, inner = pty.openpty()
        self.process = subprocess.Popen(
            [*CLIENT, *args], stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": term}, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(inner)
        self.seen = ""

    def wait_asleep(self) -> None:
        """Until the client waits for a key: CPython's line editor loses a signal that comes while it handles one."""
        client, deadline = psutil.Process(self.process.pid), time.monotonic() + TIMEOUT_S
        naps = 0
        while naps < 5:
            assert time.monotonic() < deadline, "never waits"
            used = client.cpu_times()
            time.sleep(0.01)
            naps = naps + 1 if client.status() == psutil.STATUS_SLEEPING and client.cpu_times() == used else 0

    def wait_for(self, text: str) -> None:
        """Until this text appears, after what was waited for before."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} does not come: {self.seen}"
            try:
                self.seen += os.read(self._fd, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {text!r}: {self.seen}") from None
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            os.close(self._fd)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C on it becomes a signal


def test_a_terminal_with_ctrl_c_in_an_answer_and_at_the_prompt(short_dir: Path) -> None:
    with FakeFrontend(short_dir, parrot, info=INFO) as cluster:
        terminal = Terminal("chat", "--run-dir", str(short_dir))
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("one!1")
        terminal.wait_for("> ")
        terminal.type("wait\n")
        terminal.wait_for("begun")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.wait_asleep()
        terminal.type("\x03")
        terminal.wait_for("(Ctrl-D or /exit leaves)")
        terminal.wait_for("> ")
        terminal.type("two\n")
        terminal.wait_for("two!5")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.close() == 0
        cluster.next(Generate)
        waited = cluster.next(Generate)
        assert cluster.next(Abort).rid == waited.rid
        assert contents(cluster.next(Generate))[2:] == [("user", "wait"), ("assistant", "begun"), ("user", "two")]


def test_a_cluster_that_dies_does_not_take_the_conversation_with_it(short_dir: Path) -> None:
    terminal = None
    with FakeFrontend(short_dir / "run", parrot, info=INFO):
        terminal = Terminal("chat", "--run-dir", str(short_dir / "run"))
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("one!1")
    terminal.type("lost\n")
    terminal.wait_for("Error: ")
    with FakeFrontend(short_dir / "run", parrot, info=INFO):
        terminal.type("two\n")
        terminal.wait_for("two!3")
        terminal.type("/exit\n")
        assert terminal.close() == 0


def test_over_http() -> None:
    with FakeOpenAI() as server:
        ended = run("chat", "--url", server.url, stdin="one\nrefuse\ntwo\n")
        bodies = [server.requests.get()[2] for _ in range(3)]
    assert ended.stdout.splitlines() == ["one", "two"] and "temperature is too high" in ended.stderr
    assert [m["content"] for m in bodies[2]["messages"]] == ["one", "one", "two"]


def test_an_interrupt_on_a_pipe_ends_it(short_dir: Path) -> None:
    with FakeFrontend(short_dir, parrot, info=INFO):
        process = subprocess.Popen(
            [*CLIENT, "chat", "--run-dir", str(short_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        assert process.stdout.readline() == "one!1\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def test_no_cluster_and_wrong_options(short_dir: Path) -> None:
    ended = run("chat", "--run-dir", str(short_dir), stdin="hi\n")
    assert ended.returncode == 2 and "no cluster is running" in ended.stderr
    ended = run("chat", "--temperature", "200", stdin="hi\n")
    assert ended.returncode == 2 and "temperature: must be at least 0" in ended.stderr
