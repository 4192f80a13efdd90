"""`chat`: a conversation in the terminal, or of the lines of a pipe."""

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from client_cli.conversation import HELP, Conversation, ConversationError, Do, parse_line
from client_cli.display import Display
from client_cli.errors import ClientError, named_failures
from client_cli.options import chat_options
from client_cli.runs import ABORT_WAIT_S, POLL_S, deferred_interrupt, describe
from client_cli.target import Target, target_options

if TYPE_CHECKING:
    from client_cli.link import Link
    from common.json_request import JsonRequest


@click.command("chat", context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--load", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Go on with a conversation "
              "that /save wrote.")  # fmt: skip
@chat_options
@target_options
def command(system: str | None, load: Path | None, options: dict[str, Any], target: Target) -> None:
    """Talk with the model.

    /system, /reset, /save, /help and /exit are commands; Ctrl-C stops an answer and keeps the session. Works on pipes
    too: every line is a message.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if system is not None and load is not None:
        raise click.UsageError("--system and --load exclude each other.")
    if options["tools"] is not None:
        target.need_local("--tools", "servers take the calls out of the answer")
    try:
        conversation = Conversation(system) if load is None else Conversation.load(load)
    except ConversationError as error:
        raise click.UsageError(str(error)) from None
    Chat(target, conversation, options).run()


class Chat:
    """The loop: read a line, do what it says. A connection that breaks is opened again for the next message."""

    def __init__(self, target: Target, conversation: Conversation, options: dict[str, Any]):
        self._target = target
        self._conversation = conversation
        self._options = options
        self._link: Link | None = None
        self._terminal = sys.stdin.isatty()
        self._failed = 0

    def run(self) -> None:
        self._check(self._conversation.messages or [{"role": "user", "content": "x"}])  # wrong options: say so now
        self._link = self._target.open()
        if self._terminal:
            with contextlib.suppress(ImportError):  # line editing where the platform has it
                import readline  # noqa: F401
            click.echo("/help lists the commands, Ctrl-D leaves.")
        try:
            while (line := self._read()) is not None and self._do(*parse_line(line)):
                pass
        finally:
            self._close()
        if self._failed and not self._terminal:  # a person has seen it
            raise ClientError(f"{self._failed} lines failed")

    def _read(self) -> str | None:
        """The next line; None at the end. Ctrl-C empties the line."""
        while True:
            try:
                return input("> " if self._terminal else "")
            except EOFError:
                if self._terminal:
                    click.echo()
                return None
            except UnicodeDecodeError as error:
                raise click.UsageError(f"stdin is not UTF-8: {error}") from None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                click.echo("\n(Ctrl-D or /exit leaves)")

    def _do(self, do: Do, text: str) -> bool:
        """Carry out a line; False when it was the last."""
        conversation = self._conversation
        match do:
            case Do.SAY:
                self._say(text)
            case Do.SYSTEM if text:
                conversation.set_system(text)
                self._notice("(system message set, conversation started anew)")
            case Do.SYSTEM:
                self._notice(conversation.system or "(no system message)")
            case Do.RESET:
                conversation.turns.clear()
                self._notice("(conversation forgotten)")
            case Do.SAVE:
                try:
                    conversation.save(Path(text).expanduser())
                    self._notice(f"({len(conversation.messages)} messages saved to {text})")
                except (OSError, RuntimeError, ValueError) as error:  # no such user, no such name
                    self._fail(f"{text!r} cannot be written: {getattr(error, 'strerror', error)}")
            case Do.HELP:
                self._notice(HELP)
            case Do.WRONG:
                self._fail(text)
            case Do.EXIT:
                return False
        return True

    def _notice(self, text: str) -> None:
        """On a pipe stdout is for answers alone."""
        click.echo(text, err=not self._terminal)

    def _fail(self, text: str) -> None:
        self._failed += 1
        click.echo(f"Error: {text}", err=True)

    def _say(self, text: str) -> None:
        """One turn. A message that fails is taken back, so that the conversation stays one that can go on."""
        self._conversation.say(text)
        answer: list[str] = []
        display = Display(sys.stdout)
        stopped = False
        try:
            with named_failures():
                stopped = self._answer(self._check(self._conversation.messages), answer, display)
        except click.ClickException as error:
            if display.begun:
                click.echo()
            self._fail(error.message)
            self._conversation.take_back()
            return
        if stopped and not answer:
            self._conversation.take_back()
        else:
            self._conversation.answer("".join(answer))

    def _check(self, messages: list[dict[str, str]]) -> "JsonRequest":
        from common.fields import FieldError
        from common.json_request import parse_request

        try:
            return parse_request({"messages": messages, **self._options})
        except FieldError as error:
            raise click.UsageError(f"{error.field.replace('_', '-')}: {error.problem}") from None

    def _answer(self, request: "JsonRequest", texts: list[str], display: Display) -> bool:
        """Stream an answer to the terminal and, without reasoning, into `texts`; true when Ctrl-C ended it."""
        from common.codec import FrameError
        from common.connection import ConnectionLost

        try:
            if self._link is None:
                self._link = self._target.open()
            with deferred_interrupt() as check:
                stopped = self._follow(self._link, request, texts, display, check)
            if not stopped and not self._terminal:
                check()  # it came with the last words: on a terminal it has nothing left to stop, on a pipe it ends us
            return stopped
        except (ConnectionLost, FrameError):
            self._close()
            raise

    def _follow(
        self, link: "Link", request: "JsonRequest", texts: list[str], display: Display, check: Callable[[], None]
    ) -> bool:
        from common.connection import Row
        from common.messages import Finish

        rid = link.submit(request.prompt, request.params, **request.options)
        finish = Finish.NONE
        while finish is Finish.NONE:
            try:
                check()
            except KeyboardInterrupt:
                self._stop(link, rid)
                click.echo(" (stopped)")
                return True
            for row in link.poll(POLL_S):
                if row.rid != rid:
                    continue
                if not isinstance(row, Row):
                    raise ClientError(describe(row))
                if row.text:
                    texts.append(row.text)
                display.add(row)
                finish = row.finish
        if finish is Finish.ABORT:
            raise ClientError("the cluster aborted the request")
        click.echo(" (the token limit was reached)" if finish is Finish.LENGTH and self._terminal else "")
        return False

    def _stop(self, link: "Link", rid: int) -> None:
        """End an answer on the server; a connection that does not confirm it is not used again."""
        deadline = time.monotonic() + ABORT_WAIT_S
        link.abort(rid)
        while link.live and time.monotonic() < deadline:
            link.poll(deadline - time.monotonic())
        if link.live:
            self._close()

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
