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

from triton.runtime import interpreter
from triton.runtime.interpreter import _LangPatchScope, tl

_PLACES = (
    (interpreter.interpreter_builder, "options"),
    (interpreter, "_get_np_dtype"),
    (interpreter, "_patch_lang"),
    (tl.core.block_type, "__init__"),
    (tl.core.tensor, "__init__"),
)


def parts() -> tuple[Any, ...]:
    """What of the interpreter is replaced, as it is now."""
    return tuple(getattr(*place) for place in _PLACES)


_STOCK = parts()


def _put(new: tuple[Any, ...]) -> None:
    for place, part in zip(_PLACES, new, strict=True):
        setattr(*place, part)


def speed_up() -> None:
    """For all launches of this process."""
    options, np_dtype, patch_lang, init_type, _ = _STOCK
    # The range of every sum of integers is worked out in int64, which nothing but a debugging interpreter looks at.
    quick = replace(options, sanitize_overflow=options.debug)
    _put((quick, _by_name(np_dtype), _patch_once(patch_lang), _known_types(init_type), _known_shapes()))


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

    def builtin(owner: Any, name: str) -> bool:
        return tl.core.is_builtin(getattr(owner, name))

    def patch_once(fn: Any) -> Any:
        used = [lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())]
        if not used or builtin(tl.tensor, "__add__") or any(builtin(lang, "load") for lang in used):
            return patch(fn)
        return _LangPatchScope()

    return patch_once


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
