"""A request and its states, events and transitions. Every change of state goes through the table below."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from common.fields import IntArray
from common.sampling_params import DrawParams, Grammar

if TYPE_CHECKING:
    from scheduler_proc.radix_node import Node
    from scheduler_proc.snapshots import Saving, Track
    from scheduler_proc.speculation import Guesser


class Status(Enum):
    WAITING = auto()  # in the queue: owns no page, no slot
    PREFILLING = auto()  # owns a slot and pages; some of its known tokens are not in any plan yet
    DECODING = auto()  # all known tokens are planned; one new token a step
    PREEMPTED = auto()  # gave its slot and pages back under pressure; goes to the queue again
    FINISHED = auto()  # its last token is known; kept only while steps with it are in flight
    ABORTED = auto()  # ended from outside; kept only while steps with it are in flight


class Event(Enum):
    ADMIT = auto()
    PREFILL_PLANNED = auto()  # the last chunk is in a plan
    FINISH = auto()  # stop token or length limit
    ABORT = auto()  # by the client, or because it went away
    PREEMPT = auto()
    REQUEUE = auto()


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.WAITING, Event.ADMIT): Status.PREFILLING,
    (Status.PREFILLING, Event.PREFILL_PLANNED): Status.DECODING,
    (Status.DECODING, Event.FINISH): Status.FINISHED,
    # an abort may come in every state in which the request still lives
    (Status.WAITING, Event.ABORT): Status.ABORTED,
    (Status.PREFILLING, Event.ABORT): Status.ABORTED,
    (Status.DECODING, Event.ABORT): Status.ABORTED,
    (Status.PREEMPTED, Event.ABORT): Status.ABORTED,
    # a preempted request keeps its tokens, so its next prefill recomputes what the cache has lost, and no more
    (Status.PREFILLING, Event.PREEMPT): Status.PREEMPTED,
    (Status.DECODING, Event.PREEMPT): Status.PREEMPTED,
    (Status.PREEMPTED, Event.REQUEUE): Status.WAITING,
    # the step that was in flight when it was preempted may bring its last token
    (Status.PREEMPTED, Event.FINISH): Status.FINISHED,
}


class IllegalTransition(RuntimeError):
    """An event came in a state that does not allow it: a bug in the scheduler."""


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Lengths, in tokens, always cached_len <= device_len:

        0          cached_prompt           cached_len        len(tokens)     device_len
        |-- from the --|-- computed, or in ----|-- known, not ---|-- sampled by ---|
        |  prefix cache|   a plan in flight    |   planned yet   |  plans in flight|
    """

    rid: int
    tokens: IntArray  # prompt, then every committed output token
    prompt_len: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    draw: DrawParams
    salt: str = ""  # namespace of the prefix cache
    priority: int = 0  # higher goes first
    deadline: int = 0  # ns; 0 is none
    grammar: Grammar | None = None
    ignore_eos: bool = False
    arrival: int = 0  # ns
    since: int = 0  # ns; when it came to the cluster, perhaps in an earlier term: its wait counts from then
    started: int = 0  # ns; when it was first admitted
    seq: int = 0  # order of arrival, unique
    status: Status = Status.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)  # page table: pages[i] holds tokens [i * page_size, ...)
    node: "Node | None" = None  # deepest locked radix tree node
    shared_pages: int = 0  # how many leading entries of `pages` belong to the tree too
    cached_prompt: int = -1  # prompt tokens found in the cache at first admission; -1 before it
    cached_len: int = 0
    pending: int = 0  # sampled by plans in flight, not yet known; all guesses of one count as right until then
    guesser: "Guesser | None" = None
    saving: "Saving | None" = None  # where its prompt leaves snapshots, with a recurrent model
    track: "Track | None" = None  # the snapshot that goes along with its answer
    steps_in_flight: int = 0
    preemptions: int = 0
    losses: int = 0  # how often the workers were lost with a step of it in flight, since it got on
    all_losses: int = 0  # the same, since it came
    suspected_len: int = 0  # tokens, those of plans included, that it had when that happened last
    counted: bool = False  # its prompt's tokens are among those that were counted
    scored: int = 0  # how many tokens from the first have given their prediction to `prompt_logprobs`

    def on(self, event: Event) -> None:
        """Apply an event. Raises IllegalTransition when the table does not have it."""
        try:
            self.status = TRANSITIONS[self.status, event]
        except KeyError:
            raise IllegalTransition(f"request {self.rid}: {event.name} in {self.status.name}") from None

    @property
    def device_len(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def extend_len(self) -> int:
        """Tokens that the next forward passes have to compute."""
        return len(self.tokens) + self.pending - self.cached_len

    @property
    def unscored(self) -> bool:
        """Prompt tokens must be computed for what they predict."""
        return self.draw.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache: the last one's logits are needed, and those that are to be scored."""
        return min(self.scored if self.unscored else len(self.tokens), len(self.tokens) - 1)

    @property
    def generated(self) -> int:
        """Output tokens, those in flight included."""
        return len(self.tokens) + self.pending - self.prompt_len

    @property
    def answer(self) -> IntArray:
        """The committed output tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self.max_tokens - self.generated

    @property
    def ends_at_limit(self) -> bool:
        """Nothing that the model says ends it before `max_tokens`."""
        return not self.stop_token_ids and self.grammar is None

    @property
    def seniority(self) -> tuple[int, int, int]:
        """Sorts those first who keep their pages longest under pressure: high priority, then early arrival."""
        return (-self.priority, self.since, self.seq)

    @property
    def is_running(self) -> bool:
        """It holds pages and will compute more."""
        return self.status is Status.DECODING or self.status is Status.PREFILLING

    @property
    def ended(self) -> bool:
        return self.status is Status.FINISHED or self.status is Status.ABORTED  # asked for every row of every step

    @property
    def kv_len_at_end(self) -> int:
        """Tokens in the KV cache at its longest: the last output token is never an input."""
        return self.prompt_len + self.max_tokens - 1
