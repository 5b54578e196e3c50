"""Takes out of Triton's interpreter what takes half of its time and changes no result.

Which operations are computed, on which numbers and in which order, stays as it is: `tests/test_interpreter.py` compares bits.
The interpreter as it comes, which users run, runs there, in `tests/test_packaging.py` and in the demo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, _LangPatchScope, interpreter_semantic, tl

_PLACES = (
    (interpreter.interpreter_builder, "options"),
    (interpreter, "_get_np_dtype"),
    (interpreter, "_patch_lang"),
    (interpreter, "_patch_attr"),
    (interpreter, "_convert_float"),
    (interpreter, "_validate_np_data_size"),
    (interpreter_semantic, "binary_op_type_checking_impl"),
    (interpreter_semantic, "broadcast_impl_value"),
    (interpreter_semantic, "cast"),
    (TensorHandle, "__init__"),
    (tl.core.block_type, "__init__"),
    (tl.core.tensor, "__init__"),
)
# Types that an operation on two of them leaves as they are.
_PLAIN = frozenset(("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp32", "fp64"))
# A constant of at most so many elements is kept, and so many of them.
_KEPT_ELEMENTS, _KEPT_CONSTANTS = 65_536, 2_048


def parts() -> tuple[Any, ...]:
    """What of the interpreter is replaced, as it is now."""
    return tuple(getattr(*place) for place in _PLACES)


_STOCK = parts()


def _put(new: tuple[Any, ...]) -> None:
    for place, part in zip(_PLACES, new, strict=True):
        setattr(*place, part)


def speed_up() -> None:
    """For all launches of this process."""
    options, np_dtype, patch_lang, _, convert, valid, check, broadcast, cast, _, init_type, _ = _STOCK
    # The range of every sum of integers is worked out in int64, which nothing but a debugging interpreter looks at.
    quick = replace(options, sanitize_overflow=options.debug)
    _put(
        (
            quick,
            _by_name(np_dtype),
            _patch_once(patch_lang),
            _called_directly,
            _by_table(convert),
            _fits(valid),
            _known_operands(check),
            _known_broadcasts(broadcast),
            _cast_if_needed(cast),
            _handle,
            _known_types(init_type),
            _known_shapes(),
        )
    )


@contextmanager
def stock() -> Iterator[None]:
    """The interpreter as it comes."""
    quick = parts()
    _put(_STOCK)
    try:
        yield
    finally:
        _put(quick)


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`find(dtype)`, which makes a table each time that it is asked, once for each dtype."""
    found: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return find(scalar)
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return np_dtype


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch(fn)` replaces the operations of `triton.language` by interpreted ones, which a launch takes back at its end.

    Every call of a device function asks for it again, and finds them replaced.
    """

    used_by: dict[Any, list[Any]] = {}

    def builtin(owner: Any, name: str) -> bool:
        return tl.core.is_builtin(getattr(owner, name))

    def patch_once(fn: Any) -> Any:
        if fn not in used_by:
            used_by[fn] = [lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())]
        used = used_by[fn]
        if not used or builtin(tl.tensor, "__add__") or any(builtin(lang, "load") for lang in used):
            return patch(fn)
        return _LangPatchScope()

    return patch_once


def _called_directly(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replaces an operation by one that is given the interpreter; the stock one copies the keywords of each call."""

    def call(*args: Any, **more: Any) -> Any:
        more["_semantic"] = interpreter_semantic
        return member(*args, **more)

    scope.set_attr(owner, name, call)


def _by_table(convert: Callable[..., Any]) -> Callable[..., Any]:
    """`convert`, which takes numbers apart, with a table of what it makes of all bf16 numbers in fp32."""
    tables: list[np.ndarray] = []

    def by_table(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given.name != "bf16" or wanted.name != "fp32":
            return convert(data, given, wanted, rounding)
        if not tables:
            tables.append(convert(np.arange(2**16, dtype=np.uint16), given, wanted, None))
        return tables[0][data]

    return by_table


def _fits(valid: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`valid(array, dtype)`, whether a dtype has the bits of an array's elements."""

    def fits(array: Any, dtype: Any) -> bool:
        return (type(dtype) is tl.dtype and array.itemsize * 8 <= dtype.primitive_bitwidth) or valid(array, dtype)

    return fits


def _handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """The constructor of what holds a tensor's numbers."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.dtype or data.itemsize * 8 > dtype.primitive_bitwidth:
        self.__post_init__()  # which raises where the numbers are too wide


def _known_operands(check: Callable[..., Any]) -> Callable[..., Any]:
    """`check` brings two operands to one type and shape: which ones is asked once, and a constant is made once for each."""
    scalars: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    constants: dict[tuple[Any, ...], tuple[np.ndarray, Any, Any]] = {}

    def two_tensors(lhs: Any, rhs: Any, *flags: Any, **more: Any) -> Any:
        if lhs.type.name == rhs.type.name and lhs.dtype.name in _PLAIN:
            return lhs, rhs
        key = (lhs.type.name, rhs.type.name, flags, *more.items())
        if key not in scalars:
            results = check(lhs, rhs, *flags, **more)
            scalars[key] = results[0].dtype, results[1].dtype
            return results
        left, right = scalars[key]
        return interpreter_semantic.broadcast_impl_value(
            interpreter_semantic.cast(lhs, left), interpreter_semantic.cast(rhs, right)
        )

    def check_once(lhs: Any, rhs: Any, *flags: Any, **more: Any) -> Any:
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            return two_tensors(lhs, rhs, *flags, **more)
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        if type(tensor) is not tl.tensor or type(number) not in (int, float, bool) or number != number:
            return check(lhs, rhs, *flags, **more)
        key = (tensor.type.name, type(number), number, left, flags, *more.items())
        if key in constants:
            data, dtype, kind = constants[key]
            made = tl.tensor(TensorHandle(data, dtype), kind)
            return (tensor, made) if left else (made, tensor)
        results = check(lhs, rhs, *flags, **more)
        same, made = results if left else results[::-1]
        data = made.handle.data
        if same is tensor and data.size <= _KEPT_ELEMENTS and len(constants) < _KEPT_CONSTANTS:
            data.flags.writeable = False
            constants[key] = data, made.handle.dtype, made.type
        return results

    return check_once


def _known_broadcasts(broadcast: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`broadcast` brings two tensors to one shape; their types are worked out once for each pair of types."""
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def made(x: Any, kind: Any) -> Any:
        if x.type.name == kind.name:
            return x
        builder = interpreter_semantic.builder
        if x.type.is_block():
            return tl.tensor(builder.create_broadcast(x.handle, list(kind.shape)), kind)
        return tl.tensor(builder.create_splat(kind, x.handle), kind)

    def broadcast_once(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and len(left.shape) != len(right.shape):
            return broadcast(lhs, rhs)
        key = left.name, right.name
        if key not in known:
            results = broadcast(lhs, rhs)
            known[key] = results[0].type, results[1].type
            return results
        return made(lhs, known[key][0]), made(rhs, known[key][1])

    return broadcast_once


def _cast_if_needed(cast: Callable[..., Any]) -> Callable[..., Any]:
    """`cast(x, dtype)`, which compares types at length."""

    def cast_if_needed(x: Any, dtype: Any, *more: Any) -> Any:
        plain = x.dtype.name in _PLAIN and x.dtype.name == dtype.scalar.name
        return x if plain else cast(x, dtype, *more)

    return cast_if_needed


def _known_types(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """The constructor of a block's type, which checks a shape and spells a name, once for each shape and dtype."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        extents = [extent.value if isinstance(extent, tl.constexpr) else extent for extent in shape]
        key = (element_ty.name, *extents)
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = (self.shape, self.numel, self.name)

    return init_once


def _known_shapes() -> Callable[[Any, Any, Any], None]:
    """The constructor of a tensor, which wraps every extent of its shape, once for each shape."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        extents = tuple(type.shape.values) if type.is_block() else ()
        if extents not in known:
            known[extents] = (tl.constexpr(math.prod(extents)), tl.tuple([tl.constexpr(extent) for extent in extents]))
        self.numel, self.shape = known[extents]

    return init
