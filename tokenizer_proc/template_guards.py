"""What a chat template may not do in one step: make something huge, or compute for long without a loop.

jinja2's sandbox keeps a template away from Python; it does not keep it from filling the memory with one filter. So
filters, methods, `+`, `%`, `*`, `**` and `~` run through here: each result costs steps of the budget by its size, and
what would be too large is refused before it is made. Sizes of nested values are counted as they would be written out,
because a list of the same list twice doubles with each round.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.visitor import NodeTransformer

MAX_SIZE = 2**24  # characters and entries of a value
ITEM_SIZE = 2**5  # what an entry counts beside its text: bounds how many are looked at
MAX_WIDTH = 2**12  # of padding, indentation, slices and number formats
MAX_BITS = 2**10  # of a product or power
STEP_SIZE = 2**7  # so much of a result costs a step
CONCAT = "concatenated"  # the filter that `~` becomes
# widths in a format that are too large, or come from a value
_REPEATING = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})|\{[^{}]*(\{|:[^{}]*\d{5})")
_PADDING = frozenset({
    "center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson", "format",
    "round",
})  # fmt: skip


def size_of(value: Any, most: int = MAX_SIZE) -> int:
    """Characters that a value has when it is written out, roughly; counting ends beyond `most`."""
    if isinstance(value, str):
        return len(value)
    waiting, size = [(value, 1)], 0
    while waiting and size <= most:
        item, times = waiting.pop()
        count = ITEM_SIZE
        inner: Collection[Any] | None = None
        if isinstance(item, str | bytes):
            count += len(item)
        elif isinstance(item, Mapping):
            inner = [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            inner = item
        elif isinstance(item, int):
            count += item.bit_length() // 3
        size += times * count
        if inner:
            waiting += _counted(inner, times)
    return size


def _counted(items: Collection[Any], times: int) -> list[tuple[Any, int]]:
    """Each with how often it is there: what doubles by holding the same list twice is looked at once."""
    once = {id(item): item for item in items}
    if len(once) == len(items):
        return [(item, times) for item in items]
    counts = Counter(map(id, items))
    return [(item, times * counts[number]) for number, item in once.items()]


def check_size(size: int, what: str) -> int:
    """Raises SecurityError for what is too large."""
    if size > MAX_SIZE:
        raise SecurityError(f"the result of {what} is too large")
    return size


def check_call(name: str, subject: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """What a filter or method may be given; returns the size of it all. Raises SecurityError."""
    given = [*arguments, *named.values()]
    if name in _PADDING and any(isinstance(a, int) and abs(a) > MAX_WIDTH for a in given):
        raise SecurityError(f"a number given to {name} is too large")
    if name in ("format", "format_map") and isinstance(subject, str):
        check_format(subject)
    size = check_size(size_of([subject, *given]), name)
    if name == "replace" and isinstance(subject, str) and len(given) > 1:
        old, new = str(given[0]), str(given[1])
        times = subject.count(old) if old else len(subject) + 1
        size = check_size(size + times * len(new), name)
    if name == "join":
        size = check_size(size + _joined(subject, given), name)
    if name == "indent" and isinstance(subject, str):
        size = check_size(size + subject.count("\n") * MAX_WIDTH, name) if len(subject) > MAX_WIDTH else size
    return size


def check_binop(operator: str, left: Any, right: Any) -> int:
    """Of + % * **; returns the size of the operands. Raises SecurityError."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > MAX_BITS:
            raise SecurityError(f"the result of {operator} is too large")
        return 0
    if operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                return check_size(len(repeated) * max(times, 0), operator)
        return 0
    if operator == "%" and isinstance(left, str):
        check_format(left)
        return check_size(size_of([left, right]), operator)
    lengths = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    return check_size(sum(lengths), operator)


def check_format(pattern: str) -> None:
    """Raises SecurityError for widths that are too large, or are values."""
    if _REPEATING.search(pattern):
        raise SecurityError("a width in a format is too large, or not a number in it")


def concatenated(parts: Iterable[Any]) -> str:
    """What `~` does."""
    values = list(parts)
    check_size(size_of(values), "~")
    return "".join(map(str, values))


class Guard(NodeTransformer):
    """Rewrites a template so that `~` is a filter, and every loop counts its rounds with the filter `counted`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, CONCAT, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node


def shown(value: Any) -> Any:
    """What an expression gives to the output, unless it is too large."""
    if not isinstance(value, str | int | float | Undefined | None):
        check_size(size_of(value), "an expression")
    return value


def _joined(subject: Any, given: list[Any]) -> int:
    """The separators of a join, as filter (values, separator) or method (separator, values)."""
    if isinstance(subject, str) and given and not isinstance(given[0], str):
        return len(subject) * _length(given[0])
    separator = given[0] if given and isinstance(given[0], str) else ""
    return len(separator) * _length(subject)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | Mapping) else MAX_WIDTH


def steps(size: int) -> int:
    """What a result of this size costs."""
    return 1 + size // STEP_SIZE
