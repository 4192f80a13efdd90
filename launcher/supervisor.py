"""The life of a cluster: start, watch, replace, drain, stop.

Losing a process never ends the others. Its unit is killed as a whole, and started again after a pause that grows with
every loss (`Restarts`). Once everything is loaded again, the launcher announces new numbers (Go in common/messages):

    a new epoch   when workers or scheduler are new: first the ranks join it and say how many steps they have executed.
                  Equal numbers mean that a dead scheduler left them in step; ranks that differ, or hang in a collective
                  that a peer will never come to, are replaced too. Only then the scheduler hears of it.
    a new term    when tokenizer, detokenizer or scheduler are new, or one of them has not heard all that another one
                  said (Resync): the tokenizer hands in its live requests again.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from common.child import END
from common.codec import checked
from common.config import ClusterConfig
from common.fields import FieldError
from common.messages import Drained, Fatal, Go, Joined, Progress, Pulse, Ready, Resync, ints
from common.run_dir import RunDir
from common.sockets import Endpoints
from launcher.control import Control
from launcher.liveness import Liveness, left_alone
from launcher.process import Proc, Spawner, State, Unit
from launcher.restarts import Restarts
from launcher.show import VERSION, describe
from launcher.table import GATEWAY, TOKENIZER, WORKERS, process_table

log = logging.getLogger(__name__)
SILENT_S = 1.0  # a drain that takes longer is explained
STOP_GRACE_S = 1.5  # from END to SIGKILL for a child
BLAME_S = 0.3  # after a first failure in the start, wait this long for its cause to show
TICK_S, QUIET_TICK_S = 0.1, 0.5  # how long to wait for news: while something is to be done, and else


class ClusterError(RuntimeError):
    """The cluster cannot start or go on; the text is for the user."""


class Supervisor:
    """The children of one cluster. Every method but `stop` may raise ClusterError."""

    def __init__(self, config: ClusterConfig, run_dir: RunDir):
        self._config = config
        self._run_dir = run_dir
        self._endpoints = Endpoints(run_dir.path)
        self._control = Control(self._endpoints.control)
        self._spawner = Spawner(config.run_dir)
        self._liveness = Liveness(config.supervision.freeze_timeout_s)
        self._units = {
            spec.name: Unit(spec, Restarts(config.supervision.restarts, config.supervision.restart_window_s))
            for spec in process_table(config)
        }
        self._go: Go | None = None  # as last announced
        self._announced = False  # to everybody
        self._term_due = self._epoch_due = False
        self._groups = 0
        self._former: set[bytes] = set()  # control identities of processes that have been replaced
        self._resyncs: list[tuple[str, str]] = []  # asked for: by which process, and why
        self._http_port: int | None = None
        self._drained = False
        self._outdated = False  # cluster.json
        self._began = time.monotonic()
        self._start_up_s = 0.0

    # ---- starting -------------------------------------------------------------------------------------------------

    def start(self, show: Callable[[Iterable[Proc]], None]) -> dict[str, object] | None:
        """Start all children and let them serve; what cluster.json says then, or None when a signal came first."""
        for unit in self._units.values():
            self._spawn(unit)
        deadline = self._began + self._config.start_timeout_s
        while not (self._announced and self._gateway_serves()):
            self._poll()
            if self._control.stops:
                return None
            self._check_start()
            show(self._procs())
            if time.monotonic() > deadline:
                late = ", ".join(p.name for p in self._procs() if p.ready is None) or "the worker ranks or the gateway"
                raise ClusterError(f"not ready after {self._config.start_timeout_s:g} s (--start-timeout): {late}")
            self._announce()
        self._start_up_s = time.monotonic() - self._began
        info = self._describe()
        try:
            self._run_dir.write_cluster(info)
        except OSError as error:
            raise ClusterError(f"cluster.json cannot be written to {self._run_dir.path}: {error.strerror}") from None
        return info

    def _gateway_serves(self) -> bool:
        """Whether the first HTTP request would be answered, if there is to be one."""
        unit = self._units.get(GATEWAY)
        return unit is None or all(p.joined for p in unit.procs.values())

    def _check_start(self) -> None:
        if not any(unit.first_failure() for unit in self._units.values()):
            return
        end = time.monotonic() + BLAME_S
        while time.monotonic() < end and not any(p.killed for p in self._procs()):
            self._poll()
        failed = [p for unit in self._units.values() if (p := unit.first_failure()) is not None]
        first = min(failed, key=lambda p: (not p.killed, p.fatal is None))
        raise ClusterError(_failure(first, "while starting"))

    def _spawn(self, unit: Unit) -> None:
        more: tuple[str, ...] = ()
        if unit.spec.name == WORKERS:
            more = ("--store", f"store-{self._groups}")
            self._groups += 1
            if self._go is not None:
                more += ("--settled", *map(str, (self._go.num_pages, self._go.slots, self._go.snapshots)))
        elif unit.spec.name == GATEWAY and self._http_port is not None:
            more = ("--port", str(self._http_port))  # clients know it
        self._former |= {proc.control_identity for proc in unit.procs.values()}
        unit.procs = {spec.name: self._spawner.start(spec, *more) for spec in unit.spec.processes}
        for name in unit.procs:  # it may be stopped before anybody looks at it
            self._liveness.pulse(name, 0, False, time.monotonic())
        unit.state = State.LOADING
        unit.due = time.monotonic() + self._config.start_timeout_s
        self._term_due |= unit.spec.new_term
        self._epoch_due |= unit.spec.new_epoch

    # ---- running --------------------------------------------------------------------------------------------------

    @property
    def go(self) -> Go:
        assert self._go is not None
        return self._go

    def serve(self) -> None:
        """Until a first signal and the end of all requests, the end of --drain-timeout, or a second signal."""
        until: float | None = None
        told = False
        hang_ups = self._control.hang_ups
        while True:
            self._poll()
            now = time.monotonic()
            if self._control.stops and until is None:
                until = now + self._config.supervision.drain_timeout_s
                self._drain()
            if until is not None and (self._drained or now >= until or self._control.stops > 1):
                return
            if until is not None and not told and until - now < self._config.supervision.drain_timeout_s - SILENT_S:
                told = True
                left = f"{until - now:.0f} s more (--drain-timeout)"
                log.warning("stopping: requests that run may finish for %s, a second signal ends them", left)
            if self._control.hang_ups > hang_ups:
                hang_ups = self._control.hang_ups
                self._renew_workers()
            self._supervise(now)

    def _drain(self) -> None:
        self._go = replace(self.go, draining=True)
        self._tell(p for unit in self._units.values() if unit.spec.name != WORKERS for p in unit.procs.values())

    def _renew_workers(self) -> None:
        unit = self._units[WORKERS]
        if unit.state is State.LOADED:
            log.warning("the workers are restarted, as asked for")
            self._end(unit, 0.0)

    def _supervise(self, now: float) -> None:
        self._liveness.look(now)
        for unit in self._units.values():
            match unit.state:
                case State.LOADING | State.LOADED:
                    self._check(unit, now)
                case State.ENDING if not any(p.alive for p in unit.procs.values()):
                    unit.state = State.PAUSING
                    self._rewrite_cluster()
                case State.PAUSING if now >= unit.due:
                    self._spawn(unit)
                    self._rewrite_cluster()
        if self._outdated:
            self._rewrite_cluster()
        self._resync(now)
        self._announce()
        self._tell_refused()

    def _check(self, unit: Unit, now: float) -> None:
        """Whether a unit is as it should be. A process that loads cannot speak: that it runs is its sign of life."""
        for proc in unit.procs.values():
            if proc.ready is None and not proc.stopped:
                self._liveness.pulse(proc.name, 0, False, now)
        names = unit.procs.keys()
        if (failed := unit.first_failure()) is not None:
            self._lost(unit, _failure(failed), now)
        elif (name := self._liveness.frozen(names, now)) is not None:
            self._lost(unit, f"{name} gave no sign of life for {self._liveness.frozen_s:g} s (--freeze-timeout)", now)
        elif self._liveness.stuck(names, now):
            self._lost(unit, f"the {unit.spec.name} got nowhere in a step for {self._liveness.stuck_s:g} s", now)
        elif unit.state is State.LOADING and now > unit.due:
            self._lost(unit, f"{unit.spec.name} was not ready after {self._config.start_timeout_s:g} s", now)

    def _lost(self, unit: Unit, problem: str, now: float) -> None:
        pause = unit.restarts.after_death(now)
        if pause is None:
            limit = self._config.supervision
            if limit.restarts:
                problem += f"; it was replaced {limit.restarts} times within {limit.restart_window_s:g} s (--restarts)"
            raise ClusterError(f"{problem} and took the cluster down")
        log.warning("%s; the %s will be replaced%s", problem, unit.spec.name, f" in {pause:g} s" if pause else "")
        self._end(unit, now + pause)

    def _resync(self, now: float) -> None:
        """Begin a new term for those that have missed something. It counts like the loss of a process."""
        resyncs, self._resyncs = self._resyncs, []
        for name, problem in resyncs:
            unit = next(unit for unit in self._units.values() if name in unit.procs)
            log.warning("%s has missed something (%s): a new term begins", name, problem)
            if not self._term_due and unit.restarts.after_death(now) is None:
                raise ClusterError(f"{name} missed something too often and took the cluster down; {problem}")
            self._term_due = True

    def _end(self, unit: Unit, due: float) -> None:
        unit.kill()
        unit.due = due
        for name in unit.procs:
            self._liveness.forget(name)

    # ---- telling them -----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Bring everybody into a new term or epoch, once everybody is there."""
        for unit in self._units.values():
            if unit.state is State.LOADING and all(p.ready for p in unit.procs.values()):
                unit.state = State.LOADED
                if self._announced and not (unit.spec.new_term or unit.spec.new_epoch):
                    self._tell(unit.procs.values())
        core = [unit for unit in self._units.values() if unit.spec.new_term or unit.spec.new_epoch]
        if any(unit.state is not State.LOADED for unit in core):
            return
        if self._term_due or self._epoch_due:
            self._announced = False
            self._go = self._next_go()
            if self._epoch_due:
                self._tell(self._units[WORKERS].procs.values())
            self._term_due = self._epoch_due = False
        if not self._announced and self._all_joined():
            self._announced = True
            self._tell(p for unit in self._units.values() if unit.spec.name != WORKERS for p in unit.procs.values())
            if self._groups > 1 or self.go.term or self.go.epoch:
                log.warning("everybody is there: term %d, epoch %d", self.go.term, self.go.epoch)

    def _next_go(self) -> Go:
        limits = _limits([p.ready for p in self._units[WORKERS].procs.values() if p.ready])
        restarts, refused = self._restarts(), self._refused()
        if self._go is None:
            return replace(limits, restarts=restarts, refused=refused)
        go = self._go
        if replace(limits, num_pages=go.num_pages) != _bare(go):
            raise ClusterError("the restarted workers have other limits than the first ones: did the model change?")
        go = replace(go, restarts=restarts, refused=refused)
        return replace(go, term=go.term + self._term_due, epoch=go.epoch + self._epoch_due)

    def _all_joined(self) -> bool:
        unit = self._units[WORKERS]
        joined = [p.joined for p in unit.procs.values() if p.joined and p.joined.epoch == self.go.epoch]
        late = [p.computing for p in unit.procs.values() if p.joined is None or p.joined.epoch != self.go.epoch]
        stuck = left_alone([j.steps for j in joined], [steps for steps in late if steps is not None])
        if late and not stuck:
            return False
        if stuck or len({j.steps for j in joined}) > 1:
            log.warning("the scheduler left the ranks out of step; the workers will be replaced")
            self._end(unit, 0.0)
            return False
        return True

    def _tell(self, procs: Iterable[Proc]) -> None:
        for proc in procs:
            if proc.ready is not None:
                self._control.send(proc.identity, self.go)

    # ---- hearing them -----------------------------------------------------------------------------------------------

    def _procs(self) -> list[Proc]:
        return [proc for unit in self._units.values() for proc in unit.procs.values()]

    @property
    def _settled(self) -> bool:
        """Whether everybody serves, and nothing is to be done before somebody says something."""
        return self._announced and all(unit.state is State.LOADED for unit in self._units.values())

    def _poll(self) -> None:
        for identity, msg in self._control.poll(QUIET_TICK_S if self._settled else TICK_S):
            own = identity[: identity.rfind(b".") + 1]
            proc = next((p for p in self._procs() if p.control_identity == own), None)
            if proc is not None and proc.name == msg.name:
                self._take(proc, identity, msg)
            elif own not in self._former:
                self._control.refused.by_cause["foreign"] += 1

    def _take(self, proc: Proc, identity: bytes, msg: object) -> None:
        match msg:
            case Ready(pid=pid) if pid == proc.popen.pid:
                proc.ready, proc.identity = msg, identity
                self._http_port = msg.info.get("http_port", self._http_port)
            case Fatal(problem=problem):
                proc.fatal = proc.fatal or problem
            case Progress(done=done, total=total):
                proc.progress = (done, total)
            case Pulse(progress=progress, busy=busy) if proc.ready is not None and proc.alive:
                proc.refused, proc.computing = msg.refused, msg.steps if busy else None
                self._liveness.pulse(proc.name, progress, busy, time.monotonic())
            case Joined():
                proc.joined = msg
            case Drained():
                self._drained = True
            case Resync(problem=problem):
                self._resyncs.append((proc.name, problem))

    def _restarts(self) -> dict[str, int]:
        return {name: unit.restarts.total for name, unit in self._units.items()}

    def _refused(self) -> dict[str, int]:
        """Refused frames of those that do not say so in Stats themselves."""
        workers = {p.name: p.refused for p in self._units[WORKERS].procs.values()}
        return {"launcher": self._control.refused.total, **workers}

    def _tell_refused(self) -> None:
        if self._announced and (refused := self._refused()) != self.go.refused:
            self._go = replace(self.go, refused=refused)
            self._tell(self._units[TOKENIZER].procs.values())

    def _describe(self) -> dict[str, object]:
        return describe(
            self._config, self._endpoints, self._procs(), self.go, self._http_port, self._restarts(), self._start_up_s
        )

    def _rewrite_cluster(self) -> None:
        """Bring cluster.json up to date. Where that cannot be written, as on a full disk, it is tried again later: the
        address in it, by which clients come, is still right."""
        try:
            self._run_dir.write_cluster(self._describe())
            self._outdated = False
        except OSError as error:
            if not self._outdated:
                log.warning("cluster.json is outdated until it can be written: %s", error.strerror)
            self._outdated = True

    # ---- stopping -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End every child, at most STOP_GRACE_S politely, and remove what the cluster made."""
        for proc in self._procs():
            if proc.alive:
                proc.popen.send_signal(END)
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline and any(p.alive for p in self._procs()):
            self._poll()
        for proc in self._procs():
            if proc.alive:
                proc.popen.kill()
            proc.popen.wait()
        self._control.close()
        self._run_dir.close()


def _failure(proc: Proc, when: str = "") -> str:
    words = [proc.name, proc.death or "failed", *([when] if when else [])]
    return " ".join(words) + (f": {proc.fatal}" if proc.fatal else "")


def _limits(workers: list[Ready]) -> Go:
    """The limits that hold for all ranks; end-of-sequence ids come as eos_0, eos_1, ... Raises ClusterError where
    they are beyond what can be announced."""
    info = workers[0].info
    eos = sorted(value for key, value in info.items() if key.startswith("eos_"))
    go = Go(
        num_pages=min(w.info["num_pages"] for w in workers),
        page_size=info["page_size"],
        context_len=info["context_len"],
        vocab_size=info["vocab_size"],
        eos_token_ids=ints(*eos),
        labels=workers[0].labels | {"version": VERSION},
        host_pages=min(w.info.get("host_pages", 0) for w in workers),
        recurrent="slots" in info,
        slots=min(w.info.get("slots", 0) for w in workers),
        snapshots=min(w.info.get("snapshots", 0) for w in workers),
    )
    try:
        return checked(go)
    except FieldError as error:
        raise ClusterError(f"the workers' limits cannot be announced: {error}") from None


def _bare(go: Go) -> Go:
    """Only the limits."""
    limits = Go(go.num_pages, go.page_size, go.context_len, go.vocab_size, go.eos_token_ids, go.labels)
    return replace(limits, host_pages=go.host_pages, recurrent=go.recurrent, slots=go.slots, snapshots=go.snapshots)
