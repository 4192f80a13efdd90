"""What is wrong with what a client got, compared with what it would have got alone. Pure.

Which errors are allowed (everything else is `lost`):

| error                    | allowed                                                                              |
|--------------------------|--------------------------------------------------------------------------------------|
| connection lost          | ipc: the tokenizer was replaced in this round; HTTP: the gateway or the tokenizer    |
| not served (503, 500)    | HTTP only: the same, and before the first token or as the last event                 |
| overloaded (429)         | in a round with a burst, before the first token; or to a client that does not read   |
| deadline                 | to a request that has one                                                            |
| condemned                | once the workers were killed or frozen twice on this cluster: who was computed both times |
|                          | looks like the cause, and so does for ten minutes whoever asks for the same          |
| shutting down            | after SIGTERM, before the first token; after a second one always                     |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.messages import Finish
from tests.faults.catalog import CATALOG
from tests.faults.plan import Ask, Conduct

LATE_TOKENS = 256  # that may come between an abort and the end: no pipeline is so long
CONDEMNED = "the workers died"  # how the error of such a request begins


class Kind(Enum):
    """Of a finding. The first three are of requests, and must be zero."""

    LOST = "lost"  # tokens or an end are missing, or it ended with an error that was not allowed
    DUPLICATED = "duplicated"  # tokens or rows came twice
    WRONG = "wrong"  # other tokens, text or log probabilities
    ABORT = "abort"  # a request that its client had given up went on
    PAGES = "pages"  # at idle, free + cached pages are not all, or some are locked
    IDLE = "idle"  # the cluster has requests that nobody has
    DEATH = "death"  # a process ended that nobody had hurt, or was not replaced
    GROWTH = "growth"  # file descriptors or memory
    LEFT = "left"  # behind after the end
    END = "end"  # the cluster did not end as it should


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    what: str


class Ending(Enum):
    """How a request ended for its client."""

    FINISHED = "finished"  # each choice with a finish reason
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    STOPPING = "stopping"
    NOT_SERVED = "not served"
    CONDEMNED = "condemned"  # it looked as if it killed the workers
    OTHER_ERROR = "other error"
    DISCONNECTED = "disconnected"  # the cluster broke the connection
    LEFT = "left"  # the client itself did
    IGNORED = "ignored"  # so many tokens after its abort that the client waits no longer
    SILENT = "silent"  # it has not ended


@dataclass(slots=True)
class Choice:
    """One answer, as it came. `scored` are the tokens that log probabilities came for, `prompt_scored` those of the
    prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish = Finish.NONE
    scored: list[int] = field(default_factory=list)
    prompt_scored: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What a client got for an ask."""

    choices: list[Choice]
    ending: Ending = Ending.SILENT
    problem: str = ""
    stray_rows: int = 0  # after the end
    given_up_at: int | None = None  # how many tokens had come when its client aborted it

    @property
    def tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def late_tokens(self) -> int:
        """Those that came after its client had aborted it."""
        return 0 if self.given_up_at is None else self.tokens - self.given_up_at


Solo = Sequence[Choice]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a round may do to its requests."""

    tokenizer_replaced: bool = False
    gateway_replaced: bool = False
    burst: bool = False
    paused: bool = False  # a process stood still and went on: aborts may have come late
    condemned: bool = False  # the workers were lost more than once
    stopping: bool = False  # it was told to end
    stopped: bool = False  # and not to wait for what runs


class Served(Enum):
    """What became of a request that nothing was wrong with."""

    SERVED = "served"
    REFUSED = "refused explicitly"
    GIVEN_UP = "given up by the client"


def judge(ask: Ask, outcome: Outcome, solo: Solo, allowed: Allowed) -> Served | Finding:
    """The verdict on one request."""

    def finding(kind: Kind, what: str) -> Finding:
        way = "http" if ask.http else "ipc"
        return Finding(kind, f"{ask.request} ({way}, {ask.conduct.value}, {outcome.ending.value}): {what}")

    if outcome.stray_rows:
        return finding(Kind.DUPLICATED, f"{outcome.stray_rows} rows after the end")
    for number, (got, expected) in enumerate(zip(outcome.choices, solo, strict=True)):
        complete = got.finish in (Finish.STOP, Finish.LENGTH)
        if (wrong := compare(got, expected, complete=complete, endless=CATALOG[ask.request].endless)) is not None:
            return finding(wrong[0], f"choice {number}: {wrong[1]}")
    match outcome.ending:
        case Ending.FINISHED:
            aborted = [c for c in outcome.choices if c.finish is Finish.ABORT]
            if aborted and ask.conduct is not Conduct.CANCEL:
                return finding(Kind.LOST, "aborted, and nobody had asked for it")
            if outcome.late_tokens > LATE_TOKENS and not allowed.paused:
                return finding(Kind.ABORT, f"{outcome.late_tokens} tokens came after its client had given it up")
            return Served.GIVEN_UP if aborted else Served.SERVED
        case Ending.LEFT:
            return Served.GIVEN_UP
        case Ending.IGNORED:
            if not allowed.paused:
                return finding(Kind.ABORT, f"it went on for {LATE_TOKENS} tokens after its client had given it up")
            return Served.GIVEN_UP
        case Ending.SILENT:
            return finding(Kind.LOST, "it has not ended")
        case _ if _may_end(ask, outcome, allowed):
            return Served.REFUSED
    return finding(Kind.LOST, f"this error is not allowed: {outcome.problem}")


def _may_end(ask: Ask, outcome: Outcome, allowed: Allowed) -> bool:
    gone = allowed.tokenizer_replaced or (ask.http and allowed.gateway_replaced)
    match outcome.ending:
        case Ending.OVERLOADED:
            return (allowed.burst and not outcome.tokens) or ask.conduct is Conduct.SLOW
        case Ending.DEADLINE:
            return ask.conduct is Conduct.DEADLINE
        case Ending.CONDEMNED:
            return allowed.condemned
        case Ending.STOPPING:
            return allowed.stopped or (allowed.stopping and not outcome.tokens)
        case Ending.NOT_SERVED:
            return ask.http and gone
        case Ending.DISCONNECTED:
            return gone
    return False


def compare(got: Choice, expected: Choice, *, complete: bool, endless: bool) -> tuple[Kind, str] | None:
    """What is wrong with an answer: all of it when `complete`, else its beginning. Of an endless one, the known
    beginning is compared."""
    tokens = got.tokens[: len(expected.tokens)] if endless else got.tokens
    wrong = compare_tokens(tokens, expected.tokens, complete=complete and not endless)
    if wrong is not None or endless:
        return wrong
    # an answer that was ended in the middle of a character has U+FFFD for what there was of it
    text = got.text.removesuffix("\ufffd") if got.finish is Finish.ABORT else got.text
    if not expected.text.startswith(text):
        return Kind.WRONG, f"the text differs: {got.text!r}, alone {expected.text!r}"
    if complete and (got.text, got.finish) != (expected.text, expected.finish):
        return Kind.WRONG, f"text or end differ: {got.text!r} {got.finish}, alone {expected.text!r} {expected.finish}"
    if got.scored != expected.scored[: len(got.scored)] or (complete and len(got.scored) != len(expected.scored)):
        return Kind.WRONG, "log probabilities of other tokens"
    if got.prompt_scored != expected.prompt_scored[: len(got.prompt_scored)]:
        return Kind.WRONG, "log probabilities of other prompt tokens"
    if (complete or got.tokens) and len(got.prompt_scored) != len(expected.prompt_scored):
        return Kind.LOST, f"log probabilities of {len(got.prompt_scored)} prompt tokens"
    return None


def compare_tokens(got: Sequence[int], expected: Sequence[int], *, complete: bool) -> tuple[Kind, str] | None:
    """Whether `got` is `expected`, or its beginning where it is not complete; if not, in which way it is wrong."""
    got, expected = list(got), list(expected)
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    if at == len(got):
        missing = len(expected) - at
        return (Kind.LOST, f"the last {missing} tokens are missing") if complete and missing else None
    words = f"at token {at}: got {got[at : at + 6]}, alone {expected[at : at + 6]}"
    rest = got[at:]
    for count in range(1, max(len(rest), len(expected) - at) + 1):
        again = got[:at][-count:]
        if count <= at and rest[:count] == again and _begins(expected[at:], rest[count:]):
            return Kind.DUPLICATED, f"{count} tokens came twice {words}"
        if count < len(expected) - at and _begins(expected[at + count :], rest):
            return Kind.LOST, f"{count} tokens are missing {words}"
    return Kind.WRONG, f"other tokens {words}"


def _begins(whole: list[int], part: list[int]) -> bool:
    return whole[: len(part)] == part
