"""The learned time of a step, as a function of its tokens and of the context that they read."""

from dataclasses import dataclass

NEAR = 0.995  # weight of a step in the fit, per later step
OUTLIER = 2.0  # a step that was held up counts as at most so many times what it should have taken
KNOWN = 8  # steps with prompts, after which the fit is asked
KNOWN_ROUGHLY = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides how long a step takes: computed tokens, and cached tokens read by all rows together. `plain` says
    that no prompts are among the tokens."""

    tokens: int
    context: int
    plain: bool = True


class StepTimeModel:
    """Least squares for `base + per_token * tokens + per_context * context` over recent steps, newest weighing most.

    Sums of products are kept, so that learning and asking cost a few multiplications each. Steps with prompts have sums
    of their own: what they cost is not forgotten while nothing but decodes is computed.
    """

    def __init__(self) -> None:
        self._plain, self._mixed = _Sums(), _Sums()

    @property
    def samples(self) -> int:
        """Steps learned from."""
        return self._plain.samples + self._mixed.samples

    def learn(self, shape: StepShape, seconds: float) -> None:
        sums = self._plain if shape.plain else self._mixed
        if sums.samples >= KNOWN and seconds > OUTLIER * sums.mean:  # seldom, so that the fit is seldom asked
            seconds = min(seconds, OUTLIER * max(sums.mean, self.predict(shape)))
        sums.learn(shape, seconds)

    def coefficients(self) -> tuple[float, float, float]:
        """(base, per thousand tokens, per million context tokens) in seconds, none below zero.

        A little ridge keeps the answer finite while all steps seen were alike.
        """
        both = zip(self._plain.rows, self._mixed.rows, strict=True)
        a = [[plain + mixed for plain, mixed in zip(*rows, strict=True)] for rows in both]
        for i in range(3):
            a[i][i] += 1e-9
        for i in range(3):  # Gauss-Jordan on a symmetric positive definite matrix needs no pivoting
            a[i] = [v / a[i][i] for v in a[i]]
            for j in range(3):
                if j != i:
                    a[j] = [v - a[j][i] * w for v, w in zip(a[j], a[i], strict=True)]
        return max(0.0, a[0][3]), max(0.0, a[1][3]), max(0.0, a[2][3])

    def predict(self, shape: StepShape) -> float:
        """Seconds."""
        return _seconds(self.coefficients(), shape)

    def tokens_within(self, seconds: float, context: int) -> int | None:
        """How many tokens a step may have to take at most `seconds`; None while too little is known."""
        if self.samples < KNOWN:
            return None
        base, per_token, per_context = self.coefficients()
        if per_token <= 0:
            return None
        return max(0, int((seconds - base - per_context * context / 1e6) / per_token * 1e3))

    def seconds_of_prompts(self, tokens: int) -> float | None:
        """What so many prompt tokens take beside the fixed time of steps, roughly; None while nothing is known."""
        if self._mixed.samples < KNOWN_ROUGHLY:
            return None
        return self.coefficients()[1] * tokens / 1e3

    def tokens_for(self, slowdown: float, shape: StepShape) -> int | None:
        """How many more tokens make a step of `shape` take `slowdown` times as long; None while too little is known."""
        if self._mixed.samples < KNOWN:
            return None
        _, per_token, _ = found = self.coefficients()
        if per_token <= 0:
            return None
        return int((slowdown - 1.0) * _seconds(found, shape) / per_token * 1e3)

    def tokens_beside_fixed(self, share: float) -> int | None:
        """How many tokens of prompts make what a step takes without any the `share` of its time; None while too little
        is known."""
        if self._mixed.samples < KNOWN:
            return None
        base, per_token, _ = self.coefficients()
        if per_token <= 0:
            return None
        return int(base * (1.0 / share - 1.0) / per_token * 1e3)


def _seconds(coefficients: tuple[float, float, float], shape: StepShape) -> float:
    base, per_token, per_context = coefficients
    return base + per_token * shape.tokens / 1e3 + per_context * shape.context / 1e6


class _Sums:
    """Of the products of one, tokens, context and seconds, over recent steps."""

    def __init__(self) -> None:
        self.rows = [[0.0] * 4 for _ in range(3)]
        self.samples = 0

    @property
    def mean(self) -> float:
        """Seconds of a step; there must be one."""
        return self.rows[0][3] / self.rows[0][0]

    def learn(self, shape: StepShape, seconds: float) -> None:
        values = (1.0, shape.tokens / 1e3, shape.context / 1e6, seconds)
        self.rows = [
            [old * NEAR + value * other for old, other in zip(row, values, strict=True)]
            for row, value in zip(self.rows, values[:3], strict=True)
        ]
        self.samples += 1
