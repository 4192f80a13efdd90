"""Writing a recording (see recording.py) while a scheduler runs."""

import dataclasses
import logging
import os
from pathlib import Path
from types import TracebackType

import msgpack

from common.codec import PROTOCOL_VERSION, Message, encode
from common.config import SchedulerConfig
from common.messages import StepPlan, StepResult
from common.sampling_params import MAX_TOKEN_ID
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.recording import CLOSED, FORMAT, MAGIC, Kind
from scheduler_proc.scheduler import Scheduler

log = logging.getLogger(__name__)
MAX_BYTES = 2**30  # recording stops here, the scheduler goes on
BUFFER_BYTES = 2**18


class Recorder:
    """Appends records to a new file, buffered. Use it in a `with` statement, which writes the END record.

    Whatever goes wrong with the file later (a full disk, the size limit) ends the recording with a warning, never the
    scheduler. Raises OSError when the file exists or cannot be made.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=BUFFER_BYTES)
        self._path = path
        self._room = max_bytes
        self._last = 0
        self._unflushed = False
        self._packer = msgpack.Packer(use_bin_type=True)

    def header(self, scheduler: Scheduler) -> None:
        config, kv = dataclasses.asdict(scheduler.config), scheduler.kv
        host_pages = kv.tier.pool.num_pages if kv.tier is not None else 0
        snapshots = kv.snapshots.total if kv.snapshots is not None else 0
        states = (kv.snapshots is not None, snapshots)
        pool = (kv.pool.num_pages, kv.page_size, kv.prefix_cache, host_pages, *states)
        limits = (scheduler.context_len, scheduler.epoch, scheduler.vocab_size)
        self._write((MAGIC, FORMAT, PROTOCOL_VERSION, config, *pool, *limits))

    def put(self, kind: Kind, now: int, *rest: bytes | int | None) -> None:
        self._last = now
        self._write((kind, now, *rest))

    def flush(self) -> None:
        if self._unflushed and not self._file.closed:
            self._unflushed = False
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(str(error))

    def close(self, why: str = CLOSED) -> None:
        """End the recording; `why` is its last word."""
        if not self._file.closed:
            try:
                self._file.write(self._packer.pack((Kind.END, self._last, why[:1000])))
                self._file.close()
            except OSError as error:
                self._give_up(str(error))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(CLOSED if error is None else f"{type(error).__name__}: {error}")

    def _write(self, record: tuple[object, ...]) -> None:
        if self._file.closed:
            return
        data = self._packer.pack(record)
        self._room -= len(data)
        if self._room < 0:
            log.warning("the recording %s is full and ends here", self._path)
            self.close("the size limit was reached")
            return
        try:
            self._file.write(data)
            self._unflushed = True
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, problem: str) -> None:
        log.warning("the recording %s ends here: %s", self._path, problem)
        try:
            self._file.close()  # tries to write what is buffered once more; the descriptor is closed in any case
        except OSError:
            pass


class RecordedScheduler(Scheduler):
    """A scheduler that writes down what it is told, before it acts on it, and what it plans."""

    def __init__(
        self,
        recorder: Recorder,
        config: SchedulerConfig,
        kv: KVManager,
        context_len: int,
        *,
        epoch: int = 0,
        vocab_size: int = MAX_TOKEN_ID + 1,
    ):
        super().__init__(config, kv, context_len, epoch=epoch, vocab_size=vocab_size)
        self._recorder = recorder
        recorder.header(self)

    def handle(self, msg: Message, now: int) -> list[Message]:
        self._recorder.put(Kind.HANDLE, now, encode(msg))
        return super().handle(msg, now)

    def expire(self, now: int) -> list[Message]:
        self._recorder.put(Kind.EXPIRE, now)
        return super().expire(now)

    def plan(self, now: int) -> StepPlan | None:
        plan = None
        try:
            plan = super().plan(now)
        finally:  # a failing call is recorded too: the replay fails in the same place
            self._recorder.put(Kind.PLAN, now, None if plan is None else encode(plan))
        if plan is None and not self.has_work:
            self._recorder.flush()
        return plan

    def commit(self, result: StepResult, now: int) -> list[Message]:
        self._recorder.put(Kind.COMMIT, now, encode(result))
        return super().commit(result, now)

    def reset(self, epoch: int, now: int, *, crashed: bool) -> list[Message]:
        self._recorder.put(Kind.RESET, now, epoch, crashed)
        return super().reset(epoch, now, crashed=crashed)
