"""The errors of a worker that have a cause with a name."""


class ModelError(ValueError):
    """A checkpoint, a setting or a model that cannot be served correctly.

    `field` names what is wrong (a config key, a tensor, a file, an argument), `value` is what was found there.
    """

    def __init__(self, field: str, value: object, reason: str) -> None:
        shown = repr(value)
        super().__init__(f"{field} = {shown if len(shown) <= 200 else shown[:200] + '...'}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class PlanError(ValueError):
    """A plan that contradicts what the worker knows: scheduler and worker disagree, and going on would corrupt."""
