"""Runs Gluon functions that compute with numbers and vectors, on numpy: Triton's interpreter takes no Gluon.

So do the plain Triton functions that they call.

Numbers keep the widths that they have on the GPU, so that what overflows there overflows here.
"""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import KernelInterface


class Tensor(np.ndarray):
    """A number or a vector."""

    def __iadd__(self, other: Any) -> Any:  # a new value: another name may stand for the old one
        return self + other

    def to(self, dtype: Any) -> Any:
        return self.astype(dtype)


def tensor(value: Any, dtype: Any = None) -> Tensor:
    value = getattr(value, "value", value)  # of a constexpr
    if dtype is None and isinstance(value, int) and not isinstance(value, bool):
        dtype = np.int32
    return np.asarray(value, dtype).view(Tensor)


class Pointer:
    """An array, and an index or a vector of them."""

    def __init__(self, array: np.ndarray, index: Any = 0):
        self.array, self.index = array, index

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.index + offset)

    def _inside(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        index, mask = np.broadcast_arrays(self.index, mask)
        used = index[mask]
        assert ((used >= 0) & (used < self.array.size)).all(), f"element {used} of {self.array.size}"
        return index, mask

    def load(self, mask: Any, other: Any) -> Tensor:
        index, mask = self._inside(mask)
        return tensor(np.where(mask, self.array[np.where(mask, index, 0)], self.array.dtype.type(other)))

    def store(self, value: Any, mask: Any) -> None:
        index, mask = self._inside(mask)
        value = np.broadcast_to(value, index.shape)
        self.array[index[mask]] = value[mask]


def _reduce(values: tuple[Tensor, ...], axis: int, combine: Any) -> tuple[Tensor, ...]:
    assert axis == 0
    while (size := len(values[0])) > 1:  # a power of two, as all vectors are
        values = combine(*(x[: size // 2] for x in values), *(x[size // 2 :] for x in values))
    return tuple(tensor(x[0], x.dtype) for x in values)


def _scan(x: Tensor, axis: int, combine: Any) -> Tensor:
    assert combine(2, 3) == 5, "only sums are scanned here"
    return tensor(np.cumsum(x, axis=axis, dtype=x.dtype), x.dtype)


# Stands for both languages: what they share has the same names.
LANGUAGE = SimpleNamespace(
    int32=np.int32,
    int64=np.int64,
    BlockedLayout=lambda *_: None,
    to_tensor=tensor,
    arange=lambda start, end, layout=None: tensor(np.arange(start, int(getattr(end, "value", end))), np.int32),
    load=lambda pointer, mask=True, other=0: pointer.load(mask, other),
    store=lambda pointer, value, mask=True: pointer.store(value, mask),
    where=lambda condition, x, y: tensor(np.where(condition, x, y)),
    minimum=lambda x, y: tensor(np.minimum(x, y)),
    maximum=lambda x, y: tensor(np.maximum(x, y)),
    reduce=_reduce,
    associative_scan=_scan,
    # Used to tell the compiler that a value is the same in all threads.
    inline_asm_elementwise=lambda code, constraints, values, **_: values[0],
)


def _on_numpy(names: dict[str, Any], made: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The names of a module, its functions on numpy; `made` are those of the modules begun so far."""
    if id(names) not in made:
        made[id(names)] = {**names, "gl": LANGUAGE, "tl": LANGUAGE}
        for name, value in names.items():
            if isinstance(value, KernelInterface):  # compiled or interpreted, Gluon or not
                function = value.fn
                of_its_module = _on_numpy(function.__globals__, made)
                made[id(names)][name] = FunctionType(function.__code__, of_its_module, name, function.__defaults__)
    return made[id(names)]


def on_numpy(module: ModuleType) -> SimpleNamespace:
    """The functions of a module as Python functions of `tensor`s and `Pointer`s; constexprs are plain values."""
    return SimpleNamespace(**_on_numpy(vars(module), {}))
