"""Between every process and the launcher."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from common.codec import message
from common.fields import Bool, Int, IntArray, Ints, MapOf, Str
from common.messages.types import MAX_BATCH_TOKENS, MAX_COUNT, MAX_END_TOKENS, MAX_RID, Number
from common.sampling_params import MAX_TOKEN_ID


@message
@dataclass(frozen=True, slots=True)
class Ready:
    """A process has loaded all it needs. `info` holds what others must know of it (a worker: its pages, limits),
    `labels` what a user wants to read (a worker: architecture, dtype, device)."""

    TAG: ClassVar[int] = 13
    name: Annotated[str, Str(64, 1)]
    pid: Annotated[int, Int(1, 2**31)]
    info: Annotated[dict[str, int], MapOf(Int(0, MAX_RID), 64 + MAX_END_TOKENS)]
    labels: Annotated[dict[str, str], MapOf(Str(256), 16)] = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class Fatal:
    """A process ends because of `problem`, in words that a user understands."""

    TAG: ClassVar[int] = 14
    name: Annotated[str, Str(64, 1)]
    problem: Annotated[str, Str(8192)]


@message
@dataclass(frozen=True, slots=True)
class Go:
    """All processes are ready: serve within these limits. Sent again when one of the other fields has changed. `labels`
    are for users to read. `num_pages` are on the device, `host_pages` more in the host tier.

    Of a `recurrent` model, some layers keep a state of fixed size of all that a request has computed, instead of keys
    and values. The workers hold one for each running request, of which there may be `slots` at once (or as many as are
    configured, if that is less), and `snapshots` more, from which requests can start.

    `term` numbers the conversations between tokenizer, scheduler and detokenizer, `epoch` those between scheduler and
    workers. When one of the partners was replaced, a new one begins, with sockets of its own (common/sockets.py), and
    nothing of the old one is heard any more. `draining`: finish what is there and take nothing new. `restarts` counts
    by process, `refused` the frames that those which cannot say so themselves have refused.
    """

    TAG: ClassVar[int] = 15
    num_pages: Annotated[int, Int(1, MAX_RID)]
    page_size: Annotated[int, Int(1, 4096)]
    context_len: Annotated[int, Int(2, MAX_BATCH_TOKENS)]
    vocab_size: Annotated[int, Int(1, MAX_TOKEN_ID)]
    eos_token_ids: Annotated[IntArray, Ints(MAX_END_TOKENS, 0, MAX_TOKEN_ID)]
    labels: Annotated[dict[str, str], MapOf(Str(256), 16)] = field(default_factory=dict)  # rank 0's, and `version`
    term: Number = 0
    epoch: Number = 0
    draining: Annotated[bool, Bool()] = False
    restarts: Annotated[dict[str, int], MapOf(Int(0, MAX_COUNT), 128)] = field(default_factory=dict)
    refused: Annotated[dict[str, int], MapOf(Int(0, MAX_COUNT), 128)] = field(default_factory=dict)
    host_pages: Number = 0
    recurrent: Annotated[bool, Bool()] = False
    slots: Number = 0
    snapshots: Number = 0


@message
@dataclass(frozen=True, slots=True)
class Pulse:
    """A process is alive. `progress` changes with all that its work comes on while `busy` with it. `refused` counts
    the frames that it has refused, `steps` the plans that a worker rank has executed in its life."""

    TAG: ClassVar[int] = 40
    name: Annotated[str, Str(64, 1)]
    progress: Annotated[int, Int(0, MAX_COUNT)]
    busy: Annotated[bool, Bool()]
    refused: Annotated[int, Int(0, MAX_COUNT)] = 0
    steps: Annotated[int, Int(0, MAX_COUNT)] = 0


@message
@dataclass(frozen=True, slots=True)
class Joined:
    """A worker rank takes plans of `epoch`, and of no earlier one. It has executed `steps` plans in its life: ranks
    whose numbers differ have diverged. From the gateway: it is connected to the tokenizer (both numbers are 0)."""

    TAG: ClassVar[int] = 41
    name: Annotated[str, Str(64, 1)]
    epoch: Number
    steps: Annotated[int, Int(0, MAX_COUNT)]


@message
@dataclass(frozen=True, slots=True)
class Drained:
    """The tokenizer takes no new requests, and every one that it had has been answered."""

    TAG: ClassVar[int] = 42
    name: Annotated[str, Str(64, 1)]


@message
@dataclass(frozen=True, slots=True)
class Resync:
    """Something that tokenizer, detokenizer or scheduler said to this process was lost on its way: a new term is
    needed, in which all live requests are handed in again."""

    TAG: ClassVar[int] = 43
    name: Annotated[str, Str(64, 1)]
    problem: Annotated[str, Str(8192)]


@message
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a process has come with loading, in units of its own (bytes of weights)."""

    TAG: ClassVar[int] = 16
    name: Annotated[str, Str(64, 1)]
    done: Annotated[int, Int(0, MAX_COUNT)]
    total: Annotated[int, Int(0, MAX_COUNT)]
