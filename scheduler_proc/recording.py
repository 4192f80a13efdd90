"""Recordings, their format and how to read them. `recorder.py` writes them, `timeline.py` replays them.

A recording holds every input of a scheduler and every plan that it answered with, so that a run can be replayed
exactly. It is a stream of msgpack objects, a header and then one list per call, in order:

    [MAGIC, FORMAT, PROTOCOL_VERSION, {SchedulerConfig}, num_pages, page_size, prefix_cache, host_pages, recurrent,
     snapshots, context_len, epoch, vocab_size]
    [HANDLE, now, frame]    [EXPIRE, now]    [PLAN, now, frame of the plan or nil]    [COMMIT, now, frame]
    [RESET, now, epoch, crashed]    [END, now, why]

Frames are those of the wire (common/codec.py), `now` is in nanoseconds. Prompts and sampled tokens are in it, so the
file is for its owner alone (mode 0600), and an existing file is never overwritten.
"""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack

from common.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION, FrameError, decode
from common.config import ConfigError, SchedulerConfig
from common.messages import Abort, AddRequest, GetStats, StepPlan, StepResult
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler

MAGIC = "rhizome-recording"
FORMAT = 4
CLOSED = "closed"
_MAX_NOW = 2**63 - 1


class Kind(IntEnum):
    HANDLE = 1
    EXPIRE = 2
    PLAN = 3
    COMMIT = 4
    END = 5
    RESET = 6


MESSAGES: dict[Kind, frozenset[type]] = {
    Kind.HANDLE: frozenset({AddRequest, Abort, GetStats}),
    Kind.PLAN: frozenset({StepPlan}),
    Kind.COMMIT: frozenset({StepResult}),
}


class RecordingError(ValueError):
    """A file is not a recording that can be read; the text says what is wrong and where."""


@dataclass(frozen=True, slots=True)
class Record:
    """One call. `message` is what was handled or committed, or the plan that came out; `frame` its bytes.

    The last record is always an END, whose `why` tells how the recording ended; `index` counts from 0. `epoch` and
    `crashed` are those of a RESET.
    """

    index: int
    kind: Kind
    now: int
    message: Any = None
    frame: bytes | None = None
    why: str = ""
    epoch: int = 0
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording's header. `records` reads the rest."""

    path: Path
    config: SchedulerConfig
    num_pages: int
    page_size: int
    prefix_cache: bool
    host_pages: int
    recurrent: bool
    snapshots: int
    context_len: int
    epoch: int
    vocab_size: int

    @classmethod
    def open(cls, path: Path) -> "Recording":
        """Raises RecordingError when the file does not begin like a recording of this version, OSError as usual."""
        with path.open("rb") as file:
            try:
                header = _unpacker(file).unpack()
            except msgpack.OutOfData:
                raise RecordingError(f"{path}: the file ends inside its header") from None
            except (msgpack.UnpackException, ValueError):
                header = None
        return cls(path, *_check_header(path, header))

    def new_scheduler(self) -> Scheduler:
        """A scheduler as it was when the recording began."""
        kv = KVManager(
            self.num_pages,
            self.page_size,
            prefix_cache=self.prefix_cache,
            host_pages=self.host_pages,
            recurrent=self.recurrent,
            snapshots=self.snapshots,
        )
        return Scheduler(self.config, kv, self.context_len, epoch=self.epoch, vocab_size=self.vocab_size)

    def records(self) -> Iterator[Record]:
        """All records in order. A file cut off anywhere gives what is whole; anything else raises RecordingError."""
        with self.path.open("rb") as file:
            unpacker = _unpacker(file)
            unpacker.skip()  # the header
            index, now = 0, 0
            while True:
                whole = unpacker.tell()
                try:
                    item = unpacker.unpack()
                except msgpack.OutOfData:
                    cut = os.fstat(file.fileno()).st_size - whole
                    tail = f", {cut} bytes of an unfinished record follow" if cut else ""
                    why = f"not closed: its process was killed or still runs{tail}"
                    yield Record(index, Kind.END, now, why=why)
                    return
                except (msgpack.UnpackException, ValueError) as error:
                    where = f"record {index} at byte {whole}"
                    raise RecordingError(f"{self.path}: {where} cannot be read ({error})") from None
                record = _check_record(f"{self.path}: record {index}", index, item)
                now = record.now
                yield record
                if record.kind is Kind.END:
                    if unpacker.tell() != os.fstat(file.fileno()).st_size:
                        raise RecordingError(f"{self.path}: something follows the end")
                    return
                index += 1


def _unpacker(file: Any) -> Any:
    """With limits, so that damaged lengths neither allocate much nor pass for a cut-off file when they are absurd."""
    return msgpack.Unpacker(
        file, raw=False, strict_map_key=True, use_list=True, read_size=2**16, max_buffer_size=4 * MAX_FRAME_BYTES,
        max_bin_len=MAX_FRAME_BYTES, max_str_len=4096, max_array_len=16, max_map_len=64, max_ext_len=0,
    )  # fmt: skip


def _check_header(path: Path, header: object) -> tuple[Any, ...]:
    if not isinstance(header, list) or len(header) < 3 or header[0] != MAGIC:
        raise RecordingError(f"{path}: not a recording of a scheduler")
    if header[1:3] != [FORMAT, PROTOCOL_VERSION]:
        here = f"format {FORMAT} with protocol {PROTOCOL_VERSION}"
        raise RecordingError(f"{path}: recorded in format {header[1]} with protocol {header[2]}, this is {here}")
    if len(header) != 13:
        raise RecordingError(f"{path}: the header has {len(header)} fields, 13 belong there")
    config = _check_config(path, header[3])
    limits = {
        "num_pages": 1, "page_size": 1, "prefix_cache": None, "host_pages": 0, "recurrent": None, "snapshots": 0,
        "context_len": 2, "epoch": 0, "vocab_size": 1,
    }  # fmt: skip
    for (name, least), value in zip(limits.items(), header[4:], strict=True):
        if type(value) is not (bool if least is None else int) or (least is not None and not least <= value <= 2**31):
            raise RecordingError(f"{path}: {name} in the header is {value!r}")
    if header[7] and not header[6]:
        raise RecordingError(f"{path}: host_pages in the header is {header[7]} without a prefix cache")
    if header[8] and (header[7] or config.speculation != "off"):
        raise RecordingError(f"{path}: recurrent in the header goes with no host tier and no speculation")
    return (config, *header[4:])


def _check_config(path: Path, values: object) -> SchedulerConfig:
    known = {f.name: type(f.default) for f in dataclasses.fields(SchedulerConfig)}
    if not isinstance(values, dict) or set(values) != set(known):
        raise RecordingError(f"{path}: the scheduler's configuration is not that of this version")
    for name, kind in known.items():
        if type(values[name]) is not kind and not (kind is float and type(values[name]) is int):
            raise RecordingError(f"{path}: {name} in the configuration must be {kind.__name__}")
    try:
        return SchedulerConfig(**values)
    except ConfigError as error:
        raise RecordingError(f"{path}: {error}") from None


def _check_record(where: str, index: int, item: object) -> Record:
    if not isinstance(item, list) or len(item) < 2 or type(item[0]) is not int or item[0] not in set(Kind):
        raise RecordingError(f"{where} is not one of a known kind")
    kind, now, *rest = Kind(item[0]), *item[1:]
    if type(now) is not int or not 0 <= now <= _MAX_NOW:
        raise RecordingError(f"{where} has no time")
    if len(rest) != {Kind.EXPIRE: 0, Kind.RESET: 2}.get(kind, 1):
        raise RecordingError(f"{where} has {len(item)} fields")
    if kind is Kind.EXPIRE or (kind is Kind.PLAN and rest[0] is None):
        return Record(index, kind, now)
    if kind is Kind.END and isinstance(rest[0], str):
        return Record(index, kind, now, why=rest[0])
    if kind is Kind.RESET and type(rest[0]) is int and 0 <= rest[0] < 2**31 and type(rest[1]) is bool:
        return Record(index, kind, now, epoch=rest[0], crashed=rest[1])
    if not isinstance(rest[0], bytes) or kind not in MESSAGES:
        raise RecordingError(f"{where} has a wrong field")
    try:
        return Record(index, kind, now, decode(rest[0], MESSAGES[kind]), rest[0])
    except FrameError as error:
        raise RecordingError(f"{where} holds a bad frame: {error}") from None
