"""The learned time of a step, as a function of its tokens and of the context that they read."""

from dataclasses import dataclass

NEAR = 0.995  # weight of a step in the fit, per later step


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides how long a step takes: computed tokens, and cached tokens read by all rows together."""

    tokens: int
    context: int


class StepTimeModel:
    """Least squares for `base + per_token * tokens + per_context * context` over recent steps, newest weighing most.

    Three sums of products are kept, so that learning and asking cost a few multiplications each.
    """

    def __init__(self) -> None:
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self.samples = 0

    def learn(self, shape: StepShape, seconds: float) -> None:
        t, c = shape.tokens / 1e3, shape.context / 1e6
        (one, by_t, by_c), (_, tt, tc), (_, _, cc) = self._moments  # symmetric
        one, by_t, by_c = one * NEAR + 1.0, by_t * NEAR + t, by_c * NEAR + c
        tt, tc, cc = tt * NEAR + t * t, tc * NEAR + t * c, cc * NEAR + c * c
        self._moments = [[one, by_t, by_c], [by_t, tt, tc], [by_c, tc, cc]]
        y, y_t, y_c = self._targets
        self._targets = [y * NEAR + seconds, y_t * NEAR + t * seconds, y_c * NEAR + c * seconds]
        self.samples += 1

    def coefficients(self) -> tuple[float, float, float]:
        """(base, per thousand tokens, per million context tokens) in seconds, none below zero.

        A little ridge keeps the answer finite while all steps seen were alike.
        """
        a = [[*row, target] for row, target in zip(self._moments, self._targets, strict=True)]
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
        base, per_token, per_context = self.coefficients()
        return base + per_token * shape.tokens / 1e3 + per_context * shape.context / 1e6

    def tokens_within(self, seconds: float, context: int) -> int | None:
        """How many tokens a step may have to take at most `seconds`; None while too little is known."""
        if self.samples < 8:
            return None
        base, per_token, per_context = self.coefficients()
        if per_token <= 0:
            return None
        return max(0, int((seconds - base - per_context * context / 1e6) / per_token * 1e3))
