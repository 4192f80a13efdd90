"""Triton's interpreter without what it does again and again, which was three quarters of its time: the same results,
and results with a numpy that is newer than it, too."""

from dataclasses import replace
from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BUILTIN = tl.core.builtin(lambda: None).__code__


def quicken() -> None:
    """Its other versions, whose parts have other names, stay as they are."""
    if hasattr(interpreter, "_LangPatchScope") and not hasattr(interpreter._patch_lang, "quick"):
        _patch_once()
        _look_up_types()
        _check_nothing_in_vain()
        _know_equal_types()
        _know_shapes()
        _know_operands()
        _call_directly()
        _trust_itself()
        _index_by_one_number()


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


def _check_nothing_in_vain() -> None:
    """Every sum of integers was computed in 64 bits too and compared, for an assertion that debug mode alone makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _know_equal_types() -> None:
    """A type was compared with itself by its name, after a search for constants in it."""
    for cls in (tl.dtype, tl.pointer_type, tl.block_type):
        equal = cls.__eq__
        cls.__eq__ = lambda self, other, equal=equal: self is other or equal(self, other)


def _know_shapes() -> None:
    """Each value made the type of its block, with a name, and the constants of its shape."""
    init_block, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    blocks, shapes = dict[Any, dict[str, Any]](), dict[Any, Any]()

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, tl.tuple) else shape
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in sizes])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = self.__dict__ | {"of_tensors": {}}
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.setdefault("of_tensors", {})
        if not known:
            init_tensor(self, None, type)
            sizes = tuple([size.value for size in self.shape.values])
            known.update(shape=shapes.setdefault(sizes, self.shape), numel=self.numel, dtype=self.dtype)
        self.__dict__.update(known, handle=handle, type=type)

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor
    tl.block_type.to_ir = lambda self, builder: self  # which was made anew


def _know_operands() -> None:
    """Operands of one type and one shape have nothing to be cast or broadcast to."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def check_operands(
        self: Any, lhs: Any, rhs: Any, lhs_ptr: bool = False, rhs_ptr: bool = False, arithmetic: bool = True,
        div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        same = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype is rhs.dtype
        if same and not div_or_mod and not lhs.dtype.is_ptr():
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, div_or_mod)

    def broadcast_operands(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = check_operands
    TritonSemantic.broadcast_impl_value = broadcast_operands


def _call_directly() -> None:
    """Every call of a function of the language went through two others that looked at its keywords."""
    patch, semantic = interpreter._patch_attr, interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not BUILTIN:
            patch(obj, name, member, builder, scope)
            return

        def call(*args: Any, inner: Any = member.__wrapped__, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _trust_itself() -> None:
    """It looked at the size of all numbers that it had computed, and for constants in all that it was given."""
    interpreter.TensorHandle.__post_init__ = lambda self: None
    unwrap = tl.core._unwrap_if_constexpr
    plain = {int, bool, float, str, tl.tensor, tl.dtype, tl.pointer_type, tl.block_type}
    tl.core._unwrap_if_constexpr = lambda o: o if o.__class__ in plain else unwrap(o)


def _index_by_one_number() -> None:
    """Scalars are arrays of one number, which Triton 3.6 still gave to `int`: numpy 2.4 refuses that."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor
