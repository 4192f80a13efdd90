"""Triton's interpreter without what it does again and again, which was a third of its time: the same results."""

from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Its other versions, whose parts have other names, stay as they are."""
    if hasattr(interpreter, "_LangPatchScope") and not hasattr(interpreter._patch_lang, "quick"):
        _patch_once()
        _look_up_types()


def _patch_once() -> None:
    """A launch gives the language's functions their meaning in the interpreter, and takes it away at its end. Every
    call of a function on the device looked through all of the language to do so again."""
    patch, patched = interpreter._patch_lang, set[Any]()

    def patch_once(fn: Any) -> Any:
        modules = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules <= patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        scope = patch(fn)
        patched.update(modules)
        if is_launch:
            restore = scope.restore

            def restored() -> None:
                restore()
                patched.clear()

            scope.restore = restored
        return scope

    patch_once.quick = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once


def _look_up_types() -> None:
    """It made a table of all types whenever it needed an entry."""
    find, found = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def find_once(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = find_once
