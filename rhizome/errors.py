"""What the Python API raises, beside ValueError for arguments."""

import os

from common.json_request import named_here
from common.messages import ErrorCode, RequestError

SHUTTING_DOWN = ErrorCode.SHUTTING_DOWN.name.lower()


class ClusterError(RuntimeError):
    """The cluster did not start, or went away. The text says why."""


def check_process(owner: int) -> None:
    """Refuse a call in a forked child, whose connections would wait for threads that are not there. Raises
    ClusterError."""
    if os.getpid() != owner:
        raise ClusterError("this LLM is of the process before the fork; make one here, or LLM.connect(run_dir)")


class GenerationError(RuntimeError):
    """The cluster refused a request or ended it with an error.

    `index` is its place among the prompts of the call, `code` the kind of error (invalid, too_long, overloaded,
    shutting_down, internal, deadline, aborted), `field` and `limit` name what was wrong, where something was.
    """

    def __init__(self, index: int, code: str, problem: str, field: str = "", limit: int = 0):
        named = f"{field}: {problem}" if field and field not in problem else problem
        super().__init__(f"prompt {index}: {named}")
        self.index = index
        self.code = code
        self.field = field
        self.limit = limit

    @classmethod
    def of(cls, index: int, error: RequestError) -> "GenerationError":
        error = named_here(error)
        return cls(index, ErrorCode(error.code).name.lower(), error.problem, error.field, error.limit)
