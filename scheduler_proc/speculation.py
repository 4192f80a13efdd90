"""Speculative decoding: who gets guesses, how many, and whether it pays now.

Nothing has to be tried to know how good guesses are: the tokens that come are the same with and without speculation, so
every request's guess is compared with its next token whether or not a worker ever saw it. Being off costs nothing but
that comparison, and nothing must be probed to be on again.

What guesses cost is measured: steps by their number of tokens, and the pause of a worker whose next plan had to wait
for tokens. Where anybody has guesses everybody waits for them, because a step for the others alone would take nearly as
long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.config import DRAWN_TOKENS, SchedulerConfig
from common.fields import IntArray
from common.messages import MAX_SLOTS, StepResult
from scheduler_proc.prompt_lookup import PromptLookup
from scheduler_proc.request import Request
from scheduler_proc.residents import Residents
from scheduler_proc.speculation_gain import Choice, Gaps, Prospect, Rate, StepCurve, choose
from scheduler_proc.step import Start, Step

_LEAST_GAIN, _LEAST_TO_BEGIN = 1.03, 1.08  # times as fast as without guesses: less is within what is known of times
_PLAIN_EVERY = 64  # steps with guesses, if these double the speed, until one without, whose time must stay known
_NEAR_ALL, _NEAR_OWN, _NEAR_LUCK = 0.99, 0.9, 0.95  # what a past guess, or step with guesses, counts per later one
_OWN_AFTER = 3.0  # guesses after which a request's own record outweighs that of all
_SUREST = 0.98
_FORGOTTEN = 1024  # times that guesses were weighed, until what they cost is measured anew
_TRIED = 64  # tokens of a step up to which it may be tried, and from there on four times what was


@dataclass(slots=True)
class Guesser:
    """A request's guesses, and how good they were."""

    lookup: PromptLookup
    record: Rate = field(default_factory=Rate)


class Speculation:
    """What the rest of the scheduler asks and tells. This one never guesses."""

    def follow(self, request: Request) -> None:
        """A request has got a slot."""

    def took(self, request: Request) -> None:
        """A token was appended to its tokens."""

    def better_wait(self, residents: Residents) -> bool:
        """Whether the next step should not be planned before the step in flight is known."""
        return False

    def guesses(self, ready: Sequence[Request], room: int) -> dict[int, IntArray]:
        """Guesses by request id, for requests that are not in a step in flight; at most `room` tokens in all."""
        return {}

    def done(self, step: Step, result: StepResult, now: int) -> None:
        """A step came back. `now` in ns."""


def can_guess(request: Request) -> bool:
    """Penalties and grammars follow single tokens in the worker: their requests get no guesses."""
    return request.grammar is None and not request.draw.needs_history


def _is_greedy(request: Request) -> bool:
    """The worker needs no logits for it, but the place of the largest."""
    draw = request.draw
    return not draw.temperature and draw.edits is None and draw.logprobs is None and request.grammar is None


def most_guesses(request: Request) -> int:
    """How many tokens may be drawn before its last one."""
    return request.max_tokens - request.generated - 1


class NgramSpeculation(Speculation):
    """Guesses by prompt lookup, as many as pay."""

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self._drawn = min(max(config.max_running, DRAWN_TOKENS), MAX_SLOTS)
        self._curves = {True: StepCurve(), False: StepCurve()}  # of steps that are greedy throughout, of others
        self._gaps = Gaps()
        self._records: dict[int, Rate] = {}  # of all requests' guesses, by how long the match was
        self._hope = False  # some request may have guesses
        self._ready = 0  # when the last step's tokens were ready in the worker (ns)
        self._since_plain = 0  # steps with guesses since the last one without
        self._expected = 0.0  # guesses of the step in flight that should be right
        self._weighed = 0  # how often, since their costs were forgotten
        self._luck = Rate(5.0, 5.0)  # how many were, of those expected to be: who picks the best overestimates it

    def follow(self, request: Request) -> None:
        if can_guess(request) and most_guesses(request) > 0:
            if request.guesser is None:
                config = self._config
                lookup = PromptLookup(request.tokens, config.prompt_lookup_min, config.prompt_lookup_max)
                request.guesser = Guesser(lookup)
            request.guesser.lookup.search()
            self._hope |= request.guesser.lookup.at >= 0

    def took(self, request: Request) -> None:
        guesser = request.guesser
        if guesser is None:
            return
        length = guesser.lookup.length
        right = guesser.lookup.took()
        if right is not None:
            self._record(length).learn(right, _NEAR_ALL)
            guesser.record.learn(right, _NEAR_OWN)
        self._hope |= guesser.lookup.at >= 0

    def better_wait(self, residents: Residents) -> bool:
        if not self._hope:
            return False
        ready = residents.decoding()
        return self._choose(ready, self._drawn - len(ready), pauses=2)[1].gain > _LEAST_TO_BEGIN

    def guesses(self, ready: Sequence[Request], room: int) -> dict[int, IntArray]:
        if not self._hope:
            return {}
        able = [request for request in ready if not request.pending]
        if not able:
            return {}
        requests, choice = self._choose(able, min(room, self._drawn - len(ready)), rows=len(ready))
        if choice.gain <= _LEAST_GAIN or self._since_plain > _PLAIN_EVERY * (choice.gain - 1):
            return {}
        self._expected = choice.right
        pairs = zip(requests, choice.counts, strict=True)
        return {r.rid: r.guesser.lookup.guesses(count) for r, count in pairs if count and r.guesser is not None}

    def done(self, step: Step, result: StepResult, now: int) -> None:
        if len(result.times) == 3:
            _, started, ready = result.times
            if step.shape.plain and step.sampled:
                greedy = all(map(_is_greedy, step.sampled))
                self._curves[greedy].learn(step.shape.tokens, (ready - started) / 1e9)
            if self._ready and step.start is not Start.IDLE:
                self._gaps.learn((started - self._ready) / 1e9, ahead=step.start is Start.AHEAD)
            self._gaps.learn_way((now - ready) / 1e9)
            self._ready = ready
        self._since_plain = self._since_plain + 1 if step.guesses else 0
        if step.guesses:
            self._luck.right = _NEAR_LUCK * self._luck.right + sum(result.accepted)
            self._luck.of = _NEAR_LUCK * self._luck.of + self._expected

    def _choose(
        self, ready: Sequence[Request], room: int, *, rows: int = 0, pauses: int = 1
    ) -> tuple[list[Request], Choice]:
        """The guesses for a step of `rows` requests (those of `ready`, if 0), and the requests that they are for. The
        worker pauses after a step with guesses, and before one that does not follow another."""
        requests: list[Request] = []
        prospects: list[Prospect] = []
        for request in ready:
            guesser = request.guesser
            if guesser is not None and guesser.lookup.at >= 0:
                most = min(self._config.num_speculative_tokens, most_guesses(request))
                if most > 0:
                    requests.append(request)
                    prospects.append(Prospect(self._chance(guesser), most, min(1, request.pending)))
        self._hope = bool(prospects) or rows > len(ready)
        if not prospects or room <= 0:
            return [], Choice([], 0.0)
        return requests, self._weigh(prospects, rows or len(ready), room, all(map(_is_greedy, ready)), pauses)

    def _weigh(self, prospects: list[Prospect], rows: int, room: int, greedy: bool, pauses: int) -> Choice:
        """The best guesses for `prospects`; without counts or a gain where nothing can be guessed yet."""
        curve = self._curves[greedy]
        self._forget(rows)
        room = min(room, max(_TRIED, 4 * curve.most) - rows)
        if not curve.most or room <= 0:
            return Choice([], 0.0)
        gaps, luck = self._gaps, min(1.0, self._luck.right / self._luck.of)
        ahead = gaps.ahead if self._config.steps_in_flight > 1 else gaps.after
        return choose(prospects, rows, room, curve.seconds, gap_ahead=ahead, gap_after=pauses * gaps.after, luck=luck)

    def _forget(self, rows: int) -> None:
        """Now and then what guesses cost in steps of so many rows: what was held up once, and has looked dear since,
        would not be tried again."""
        self._weighed += 1
        if self._weighed < _FORGOTTEN:
            return
        self._weighed = 0
        self._gaps.forget_after()
        self._luck = Rate(5.0, 5.0)
        for curve in self._curves.values():
            curve.forget(rows)

    def _chance(self, guesser: Guesser) -> float:
        """That a request's next guess is right: by its own record, and that of matches as long as its own."""
        own, others = guesser.record, self._record(guesser.lookup.length)
        usual = others.right / others.of
        return min(_SUREST, (own.right + _OWN_AFTER * usual) / (own.of + _OWN_AFTER))

    def _record(self, length: int) -> Rate:
        return self._records.setdefault(length.bit_length(), Rate(1.0, 2.0))


class AlwaysNgram(NgramSpeculation):
    """As many guesses as there is room for, whatever they cost: no measured time decides."""

    def _weigh(self, prospects: list[Prospect], rows: int, room: int, greedy: bool, pauses: int) -> Choice:
        free = choose(prospects, rows, room, lambda tokens: 1.0, gap_ahead=0.0, gap_after=0.0)
        return replace(free, gain=math.inf)


def make_speculation(config: SchedulerConfig) -> Speculation:
    """By `config.speculation`."""
    kinds = {"off": lambda _: Speculation(), "ngram": NgramSpeculation, "ngram-always": AlwaysNgram}
    return kinds[config.speculation](config)
