"""What goes into a step: decodes first, then chunks of prompts under a token budget, admitting as there is room.

In a burst (ramp_up.py) prompts go without decodes.

Decodes that find no page preempt juniors; in such a step nobody is admitted.
"""

from common.config import SCORED_TOKENS, SchedulerConfig
from common.fields import IntArray
from common.messages import ints
from scheduler_proc.admission import ADMISSIONS, Admission
from scheduler_proc.chunk_budget import ChunkBudget
from scheduler_proc.in_batch import awaited_snapshot, better_off_waiting
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.measures import Measures
from scheduler_proc.plan_builder import PlanBuilder
from scheduler_proc.policy import Policy
from scheduler_proc.pressure import make_room, spare_pages
from scheduler_proc.quarantine import Quarantine
from scheduler_proc.ramp_up import RampUp
from scheduler_proc.request import Event, Request, Status
from scheduler_proc.residents import Residents
from scheduler_proc.snapshots import Found, Saving, Track, saving_of
from scheduler_proc.speculation import Speculation
from scheduler_proc.step_time import StepShape, StepTimeModel

MOST_ENTERING = 2**20  # integers of a plan for requests that enter, if there are several: bounds its size
NO_GUESSES = ints()
MOVED_PAGES = 2**18  # between device and host, after which a plan admits nobody else: bounds its size and time
LOOK_AHEAD = 32  # waiting requests passed over in one step because a prefix of theirs is being computed
MAX_GRAMMAR_CHARS_PER_STEP = 2**21  # so that the plan fits in a frame


class Planner:
    """Fills steps from `residents` and `waiting`, with pages of `kv`."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        waiting: Policy,
        residents: Residents,
        step_time: StepTimeModel,
        speculation: Speculation,
        measures: Measures,
        quarantine: Quarantine,
    ):
        self.admission: Admission = ADMISSIONS[config.admission]()
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._residents = residents
        self.chunks = ChunkBudget(step_time, config.chunk_tokens, config.chunk_slowdown, config.itl_target_ms / 1e3)
        self._ramp_up = RampUp(step_time, self.chunks)
        self._speculation = speculation
        self._measures = measures
        self._quarantine = quarantine

    def fill(self, step: PlanBuilder, now: int) -> None:
        """Plan as much as the budget and the pages allow, perhaps nothing. `now` in ns."""
        ready = self._residents.decoding()
        held = self._holds_answers(ready, now)
        preempted = False if held else self._plan_decodes(step, ready)
        if self._residents.prefilling or len(self._waiting):
            self._plan_prompts(step, now, preempted=preempted)
        if held and not step.num_tokens:  # nobody can start
            preempted = self._plan_decodes(step, ready)
        self._share_prefills(step)
        if step.num_tokens and not preempted:
            self.admission.after_step()

    def _plan_prompts(self, step: PlanBuilder, now: int, *, preempted: bool) -> None:
        """Beside the decodes that are planned: admit requests, and cut the next chunks of prompts."""
        room = self._config.max_batch_tokens - step.num_tokens
        decodes = StepShape(step.num_tokens, sum(r.cached_len for r in step.rows))
        guesses = step.num_tokens - len(step.rows)
        if self._quarantine:
            self._admit_suspect(step, now)
        elif not preempted:
            self._admit(step, _least(room, self.chunks.most(decodes)), now)
        left = sum(r.extend_len for r in self._residents.prefilling)
        order = self._waiting.chunk_order(list(self._residents.prefilling))
        whole = order[0].extend_len if order and not self._waiting.concurrent_prefills else 0
        budget = _least(room, self.chunks.tokens(decodes, left, len(self._waiting), whole, guesses))
        for request in order:
            room = min(budget, SCORED_TOKENS - step.num_scored_tokens) if request.unscored else budget
            if room > 0:
                budget -= self._plan_chunk(step, request, room)

    def _holds_answers(self, ready: list[Request], now: int) -> bool:
        """Whether `ready`, those that could decode, wait for prompts."""
        if not self._waiting.alike or self._config.itl_target_ms or not self._config.chunk_slowdown:
            return False
        residents = self._residents
        starting = min(len(self._waiting), residents.free)
        return self._ramp_up.holds(ready, residents.prefilling, starting, now)

    def _plan_decodes(self, step: PlanBuilder, ready: list[Request]) -> bool:
        """Plan one token for each of `ready` that can have a page, and guesses at more where they pay; True when
        somebody was preempted for it."""
        spare = spare_pages(self._kv, ready)
        guesses: dict[int, IntArray] = {}
        if spare < 0:
            ready = make_room(ready, self._kv, self._residents.holders, self._preempt)
        else:
            room = self._config.max_batch_tokens - len(ready)
            prompts = bool(self._residents.prefilling or len(self._waiting))
            guesses = self._speculation.guesses(ready, room // 2 if prompts else room)
        page_size = self._kv.page_size
        for request in ready:
            own = guesses.get(request.rid, NO_GUESSES) if guesses else NO_GUESSES
            if own:
                more = self._kv.pages_ahead(request, request.cached_len + 1, len(own))
                spare -= more
                if spare < 0:  # guesses are not worth a page that somebody else needs
                    spare += more
                    own = NO_GUESSES
            length = 1 + len(own)
            if request.cached_len + length > len(request.pages) * page_size:  # seldom: saves two calls for the others
                step.append_pages(request, self._kv.grow(request, request.cached_len + length))
            if own:
                step.chunk(request, request.tokens[-1:] + own, samples=True, guesses=len(own))
            else:
                step.decode(request)
            request.cached_len += length
            request.pending += length
        if self._kv.snapshots is not None:
            self._follow_answers(step, ready)
        return spare < 0

    def _follow_answers(self, step: PlanBuilder, decoding: list[Request]) -> None:
        """With a recurrent model: keep the states of answers, at ends of pages."""
        kv, least_gain = self._kv, self._config.in_batch_gain
        for request in decoding:
            length = request.cached_len
            number = kv.follow_answer(request, length, least_gain, step.saved_states)
            if number is not None:
                step.save_state(request, length, number)

    def _preempt(self, victim: Request) -> None:
        if victim.status is Status.PREFILLING:
            self._residents.prefilling.remove(victim)
        victim.on(Event.PREEMPT)
        victim.preemptions += 1
        self._measures.counts["preempted"] += 1
        self._residents.settle(victim)
        self.admission.after_preemption(self._residents.running())

    def _admit(self, step: PlanBuilder, budget: int, now: int) -> None:
        """Start waiting requests while they fit and there is budget that running prefills leave."""
        load = _Load()
        for request in self._residents.prefilling:
            load.add(request)
        if load.tokens >= budget and not self._waiting.overtakes:
            return  # before the queue is put in order, which may take long
        admitted: list[Request] = []
        looked = entering = 0
        for request in self._waiting.order(now):
            if budget <= 0 or self._residents.full or looked > LOOK_AHEAD:
                break
            full = load.tokens >= budget
            if (full or load.delays(request)) and not self._waiting.starts_beside(request, self._residents.prefilling):
                if full:
                    break
                looked += 1
                continue
            if step.grammar_chars > MAX_GRAMMAR_CHARS_PER_STEP:
                break
            if self._shares_soon(request):
                looked += 1
                continue
            if len(self._kv.copies) > 2 * MOVED_PAGES:
                break
            if not admitted:
                self.admission.begin(self._kv, self._residents.running())
            size = self._size(request)
            if (entering and entering + size > MOST_ENTERING) or not self._try_admit(step, request):
                break
            admitted.append(request)
            load.add(request)
            entering += size
        for request in admitted:
            self._started(request, now)

    def _started(self, request: Request, now: int) -> None:
        self._waiting.remove(request)
        if not request.started:
            self._measures.started(request, now)
            request.started = now

    def _size(self, request: Request) -> int:
        """Integers of a plan that lets it in: its pages, what its draws name, and its tokens where a history or a
        grammar needs them."""
        tokens, answer = len(request.tokens), len(request.tokens) - request.prompt_len
        history = tokens if request.draw.needs_history else 0
        named = request.draw.edits.named if request.draw.edits is not None else 0
        return self._kv.pages_for(tokens) + named + history + (answer if request.grammar is not None else 0)

    def _admit_suspect(self, step: PlanBuilder, now: int) -> None:
        """Start one that may have killed the workers, when nobody is there whom it could harm."""
        if self._residents.holders():
            return
        request = self._quarantine.next()
        self.admission.begin(self._kv, ())
        if request is not None and self._try_admit(step, request):
            self._started(request, now)

    def _shares_soon(self, request: Request) -> bool:
        prefilling, gain = self._residents.prefilling, self._config.in_batch_gain
        if not (prefilling and self._kv.prefix_cache):
            return False
        ahead = self._waiting.not_behind(request, prefilling)
        if self._kv.snapshots is None:
            return better_off_waiting(request, self._kv, ahead, gain)
        awaited = awaited_snapshot(request, self._kv, ahead, gain)
        if awaited is None:
            return False
        saving, point = awaited
        saving.wait(point)
        return True

    def _try_admit(self, step: PlanBuilder, request: Request) -> bool:
        match = self._kv.lock_prefix(request)
        if not self.admission.fits(self._kv, request):
            self._kv.unlock_prefix(request, match)
            return False
        if self._kv.take_room(request, match):
            self._measures.counts["copied_pages"] += 1
        request.on(Event.ADMIT)
        self._residents.enter(request)
        self.admission.started(self._kv, request)
        if request.cached_prompt < 0:
            request.cached_prompt = min(request.cached_len, request.prompt_len - 1)
            if not request.counted:
                self._measures.found(request, 0 if match is None else match.from_host)
        self.chunks.admitted(request.extend_len)
        step.enter(request)
        if match is not None and match.found is not None:
            self._starts_from(step, request, match.found)
        self._speculation.follow(request)
        return True

    def _starts_from(self, step: PlanBuilder, request: Request, found: Found) -> None:
        """With a recurrent model."""
        snapshots = self._kv.snapshots
        assert snapshots is not None
        if found.start:
            snapshots.load(found.number)
            step.load_state(request, found.number)
        if snapshots.total:
            length, size = len(request.tokens), self._kv.page_size
            request.saving = saving_of(found, length, size, self._config.in_batch_gain)
            request.track = Track(found.deepest)

    def _plan_chunk(self, step: PlanBuilder, request: Request, budget: int) -> int:
        length = min(request.extend_len, budget)
        start = request.cached_len
        request.cached_len += length
        last = request.extend_len == 0
        step.chunk(request, request.tokens[start : start + length], samples=last)
        if request.unscored:
            begin, end = max(start, request.scored), min(start + length, request.prompt_len - 1)
            if begin < end:
                step.score(request, begin, end)
        if last:
            request.on(Event.PREFILL_PLANNED)
            request.pending += 1
            self._residents.prefilling.remove(request)
        return length

    def _share_prefills(self, step: PlanBuilder) -> None:
        """Publish what prompts compute in this step, chunk by chunk, so that the next one can share it: workers execute
        steps in order. Of what is published, snapshots are taken."""
        for request in step.chunks:
            saving = request.saving
            if request.status is Status.PREFILLING or len(request.tokens) == request.prompt_len or saving is not None:
                self._kv.publish(request)
            if saving is not None:
                self._save_states(step, request, saving)

    def _save_states(self, step: PlanBuilder, request: Request, saving: Saving) -> None:
        for length in saving.due(request.cached_len):
            awaited = length in saving.awaited
            snapshot = self._kv.save_state(request, length, step.saved_states, awaited=awaited)
            if snapshot is not None:
                step.save_state(request, length, snapshot)
                if request.track is not None:
                    request.track.start = length


class _Load:
    """What prompts in work would take of one step: all that they have left, but for the bound on what is scored."""

    def __init__(self) -> None:
        self._plain = self._scored = 0

    def add(self, request: Request) -> None:
        if request.unscored:
            self._scored += request.extend_len
        else:
            self._plain += request.extend_len

    def delays(self, request: Request) -> bool:
        """Whether `request` would get no chunk, because others of its kind are in work."""
        return request.unscored and self._scored >= SCORED_TOKENS

    @property
    def tokens(self) -> int:
        return self._plain + min(self._scored, SCORED_TOKENS)


def _least(room: int, limit: int | None) -> int:
    return room if limit is None else min(room, limit)
