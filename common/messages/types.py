"""Limits, field types and codes that several messages use."""

from array import array
from enum import IntEnum
from functools import partial
from typing import Annotated

from common.fields import FieldError, Int, IntArray, Ints, Str
from common.sampling_params import MAX_TOKEN_ID

MAX_RID = 2**31 - 1
MAX_SLOTS = 2**14
MAX_BATCH_TOKENS = 2**22
MAX_PROMPT_CHARS = 2**24
MAX_CHAT_MESSAGES = 4096
MAX_CHOICES = 64
MAX_DRAFT_TOKENS = 64  # guesses of one request in a step
MAX_TEMPLATE_CHARS = 2**20
MAX_PROMPT_END = 256
MAX_TOKEN_BYTES = 2**12
MAX_TOOLS_CHARS = 2**20
MAX_TEMPLATE_ARGS_CHARS = 2**16
MAX_COPIES = 2**21  # of pages in a plan, so that it fits in a frame
MAX_STATE_SAVES = 2**15  # in a plan
MAX_COUNT = 2**62
MAX_END_TOKENS = 256  # by which a model ends its answers
MAX_MS = 2**31 - 1

Rid = Annotated[int, Int(0, MAX_RID)]
Rids = Annotated[IntArray, Ints(MAX_SLOTS)]
TokenIds = Annotated[IntArray, Ints(MAX_BATCH_TOKENS, 0, MAX_TOKEN_ID)]
Counts = Annotated[IntArray, Ints(MAX_SLOTS)]
Times = Annotated[IntArray, Ints(16, 0, 2**63 - 1, "q")]
CacheSalt = Annotated[str, Str(256)]
Priority = Annotated[int, Int(-1000, 1000)]
Milliseconds = Annotated[int, Int(0, MAX_MS)]
Number = Annotated[int, Int(0, MAX_RID)]


class Finish(IntEnum):
    """Why a request ended, as a code in a batch's `finish` column."""

    NONE = 0  # it goes on
    STOP = 1  # end-of-sequence token, stop token or stop string
    LENGTH = 2  # max_tokens, or the context window or KV cache is full
    ABORT = 3  # the client asked for it or went away


class ErrorCode(IntEnum):
    """What kind of refusal a RequestError is; names are those that a gateway turns into HTTP statuses."""

    INVALID = 1  # a field is wrong: the client's mistake
    TOO_LONG = 2  # prompt does not fit the context window or the KV cache
    OVERLOADED = 3  # a queue limit was reached, try again
    SHUTTING_DOWN = 4  # the cluster is stopping
    INTERNAL = 5  # our mistake
    DEADLINE = 6  # not finished in the time that the client gave it


_LAST_FINISH = max(Finish)
no_ints = partial(array, "i")  # an empty column, several times as fast as `ints()`


def ints(*values: int) -> IntArray:
    return array("i", values)


def known_finish(codes: bytes) -> None:
    if codes and max(codes) > _LAST_FINISH:
        raise FieldError("finish", f"codes must be at most {_LAST_FINISH}, got {max(codes)}")


def same_length(what: str, *columns: IntArray | bytes | tuple[object, ...]) -> None:
    length = len(columns[0])
    for column in columns:
        if len(column) != length:
            raise FieldError(what, f"columns must have the same length, got {[len(c) for c in columns]}")
