"""What the code of a module's class says about it, where transformers has no name for that."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn


def names_used(module: nn.Module) -> frozenset[str]:
    """The names of attributes, globals and methods that the functions of the module's class use."""
    kind: Any = type(module)
    return _names_used(kind)


@cache  # models have few classes and many modules
def _names_used(kind: Any) -> frozenset[str]:
    functions = (inspect.unwrap(value) for value in vars(kind).values() if inspect.isfunction(value))
    return frozenset(name for function in functions for name in _names(function.__code__))


def _names(code: Any) -> Iterator[str]:
    """Those that a function's code uses, and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)
