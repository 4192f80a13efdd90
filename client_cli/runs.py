"""Follow requests to their ends: streams, interruptions, and what goes wrong, over a connection of either kind."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from client_cli.errors import ClientError

if TYPE_CHECKING:
    from client_cli.link import Link
    from client_cli.target import Target
    from common.answer import Answer
    from common.json_request import JsonRequest
    from common.messages import RequestError
    from common.rows import Row

POLL_S = 0.1  # how late Ctrl-C may be noticed
ABORT_WAIT_S = 1.0


@contextmanager
def connected(target: "Target") -> Iterator["Link"]:
    """A connection whose requests are aborted on the server when the program ends early, for whatever reason."""
    link = target.open()
    try:
        yield link
    except KeyboardInterrupt:
        aborted = link.live
        abort_and_wait(link)
        raise KeyboardInterrupt(f"interrupted, requests aborted: {aborted}") from None
    except BrokenPipeError:
        abort_and_wait(link)
        raise
    finally:
        link.close()


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C is raised only where the given function is called, so that it cuts no message in two; a second one is
    raised at once."""
    asked = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def abort_and_wait(link: "Link") -> None:
    """Abort all live requests and give their last rows a moment to come; a second Ctrl-C ends the wait."""
    from common.connection import ConnectionLost

    deadline = time.monotonic() + ABORT_WAIT_S
    try:
        link.abort_all()
        while link.live and time.monotonic() < deadline:
            link.poll(deadline - time.monotonic())
    except (KeyboardInterrupt, ConnectionLost):
        pass


def describe(error: "RequestError") -> str:
    """The server's message with the field and limit it names."""
    from common.json_request import named_here

    error = named_here(error)
    text = error.problem
    if error.field and error.field not in text:
        text = f"{error.field}: {text}"
    if error.limit and str(error.limit) not in text:
        text += f" (limit {error.limit})"
    return text


def submit(link: "Link", request: "JsonRequest", *, stream: bool = True) -> "tuple[int, list[Answer]]":
    """Send a request; returns its id and an empty answer for each of its choices."""
    from common.answer import Answer

    answers = [Answer() for _ in range(request.n)]
    return link.submit(request.prompt, request.params, stream=stream, **request.options), answers


def run_one(
    link: "Link", request: "JsonRequest", on_row: "Callable[[Row, Answer], None]", check: Callable[[], None]
) -> "list[Answer]":
    """Submit a request and follow its choices to their ends; raises ClientError when the cluster refuses it.

    `on_row` gets each row and its choice so far.
    """
    from common.connection import Row
    from common.messages import Finish

    _, answers = submit(link, request)
    while any(answer.finish is Finish.NONE for answer in answers):
        check()
        for row in link.poll(POLL_S):
            if not isinstance(row, Row):
                raise ClientError(describe(row))
            answer = answers[row.choice]
            answer.add(row)
            on_row(row, answer)
    if any(answer.finish is Finish.ABORT for answer in answers):
        raise ClientError("the cluster aborted the request")
    return answers


def run_many(
    link: "Link",
    requests: "list[JsonRequest]",
    concurrency: int,
    on_result: Callable[[dict[str, Any]], None],
    check: Callable[[], None],
) -> int:
    """Run requests, at most `concurrency` at once, hand out results in their order, return how many failed."""
    from common.answer import result_of
    from common.messages import ErrorCode, Finish
    from common.rows import Row

    waiting = iter(enumerate(requests))
    live: dict[int, tuple[int, list[Answer]]] = {}
    done: dict[int, dict[str, Any]] = {}
    shown = failed = 0
    while shown < len(requests):
        check()
        while link.live < concurrency and (following := next(waiting, None)) is not None:
            index, request = following
            rid, answers = submit(link, request)
            live[rid] = (index, answers)
        for row in link.poll(POLL_S):
            index, answers = live[row.rid]
            if not isinstance(row, Row):
                code = ErrorCode(row.code).name.lower()
                done[index] = {"index": index, "error": {"code": code, "message": describe(row)}}
                failed += 1
            else:
                answers[row.choice].add(row)
                if any(answer.finish is Finish.NONE for answer in answers):
                    continue
                done[index] = {"index": index, **result_of(answers)}
                failed += any(answer.finish is Finish.ABORT for answer in answers)
            del live[row.rid]
        while shown in done:
            on_result(done.pop(shown))
            shown += 1
    return failed
