"""Executes a plan's interpreted kernels on the host, inside a JAX callback; no other framework is needed.

Triton's interpreter takes tensors with the methods of PyTorch's.  `HostArray` is the part of them that it asks for, over
numpy, so that kernels run interpreted where PyTorch is not installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from mla_kernels.cache_plan import CachePlan
from mla_kernels.launch import INTERPRETER_LOCK, Plan
from mla_kernels.problem import BYTE_DTYPES

from .device import interpreting

# Every buffer comes from this function: a test that replaces it poisons all of them.
allocate = np.empty

# XLA calls back with denormals flushed to zero, a mode that new threads inherit: this one is started before it is set.
_WORKER = ThreadPoolExecutor(1, thread_name_prefix="mla-interpreter") if interpreting() else None
if _WORKER is not None:
    _WORKER.submit(int).result()


class HostStorage:
    """The memory of a `HostArray`."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def size(self) -> int:
        return self.array.nbytes

    def cpu(self) -> HostStorage:
        return self

    def copy_(self, other: HostStorage) -> HostStorage:
        """Nothing to do: `cpu` handed out this memory, not a copy."""
        return self


class HostArray:
    """A C-contiguous numpy array with the methods that Triton's interpreter calls on a tensor."""

    def __init__(self, array: np.ndarray | None = None, dtype: str | None = None):
        self.array = array
        self.dtype = dtype if array is None else array.dtype.name

    def data_ptr(self) -> int:
        return self.untyped_storage().data_ptr()

    def untyped_storage(self) -> HostStorage:
        return HostStorage(self._array())

    def element_size(self) -> int:
        return self._array().itemsize

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self._array().shape

    def stride(self) -> tuple[int, ...]:
        array = self._array()
        return tuple(step // array.itemsize for step in array.strides)

    def new_empty(self, size: Any, device: str = "cpu") -> HostArray:
        """An array of this dtype without memory, which `set_` gives it."""
        return HostArray(dtype=self.dtype)

    def set_(self, storage: HostStorage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> HostArray:
        self.array = storage.array
        return self

    def _array(self) -> np.ndarray:
        if self.array is None:
            raise RuntimeError("this array has no memory yet")
        return self.array


def execute(plan: Plan, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Runs the launches of `plan` in order on the host and returns its buffers `out` and `lse`.

    Arrays of int8 and float8_e4m3fn reach the kernels as uint8.
    """
    live = execute_launches(plan, arrays)
    return live["out"], live["lse"]


def execute_launches(plan: Plan | CachePlan, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs the launches of `plan` in order on the host and returns all arrays by name.

    Those of the call that a launch updates are copies, because what XLA hands to a callback is not the callback's to change.
    """
    live = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    for name, array in live.items():
        if array.dtype.name in BYTE_DTYPES:
            live[name] = array.view(np.uint8)
    for name, buffer in plan.buffers.items():
        live[name] = allocate(buffer.shape, buffer.dtype)
    for name in {name for launch in plan.launches for name in launch.outputs} - set(plan.buffers):
        live[name] = live[name].copy()
    with INTERPRETER_LOCK:
        for launch in plan.launches:
            inputs = [HostArray(live[name]) for name in launch.input_arrays]
            outputs = [HostArray(live[name]) for name in launch.outputs]
            launch.kernel[launch.grid](*inputs, *launch.scalars, *outputs, **launch.constexprs)
    return live


# `jax.pure_callback` would put the operands back on a device for its callback, which then waits for them on one of the
# few threads that have to bring them: calls from several threads can wait forever.  This callback gets them as numpy arrays.
_interpret_p = Primitive("mla_decode_interpret")
_interpret_p.multiple_results = True
_interpret_p.def_impl(functools.partial(xla.apply_primitive, _interpret_p))


@_interpret_p.def_abstract_eval
def _interpret_abstract_eval(*_: Any, results: Sequence[jax.core.ShapedArray], **__: Any) -> Sequence[jax.core.ShapedArray]:
    return results


def _interpret_lowering(ctx: Any, *operands: Any, callback: Callable[..., Any], **_: Any) -> Any:
    results, _token, _keepalive = mlir.emit_python_callback(
        ctx, callback, None, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=False, returns_token=False
    )
    return results


mlir.register_lowering(_interpret_p, _interpret_lowering)


def run(plan: Plan, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Traces a callback that executes `plan`.

    Args:
      plan: of interpreted kernels.
      arrays: the arrays of the call by the names that the plan's launches use.

    Returns:
      `(out, lse)`; `out` is rounded once, to nearest even, from the plan's buffer to the dtype of q.
    """
    problem = plan.problem

    def interpret(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        out, lse = execute(plan, arrays)
        return out.astype(problem.dtype), lse

    results = (
        jax.core.ShapedArray(problem.out_shape, np.dtype(problem.dtype)),
        jax.core.ShapedArray(problem.lse_shape, np.dtype("float32")),
    )
    out, lse = call_back(interpret, arrays, results)
    return out, lse


def run_cache(plan: CachePlan, arrays: Mapping[str, jax.Array], result: str) -> jax.Array:
    """Traces a callback that executes a plan for a cache, and gives the array called `result`: a buffer, or what is updated."""
    made = plan.buffers.get(result)
    shape, dtype = (
        (made.shape, jax.numpy.dtype(made.dtype)) if made is not None else (arrays[result].shape, arrays[result].dtype)
    )

    def interpret(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray]:
        return (execute_launches(plan, arrays)[result].view(dtype),)

    (array,) = call_back(interpret, arrays, (jax.core.ShapedArray(shape, dtype),))
    return array


def call_back(
    function: Callable[[Mapping[str, np.ndarray]], tuple[np.ndarray, ...]],
    arrays: Mapping[str, jax.Array],
    results: tuple[jax.core.ShapedArray, ...],
) -> list[jax.Array]:
    """Traces a call of `function` on the host, with the arrays by their names."""
    names = tuple(arrays)

    def interpret(*values: Any) -> tuple[np.ndarray, ...]:
        return function(dict(zip(names, map(np.asarray, values), strict=True)))

    def callback(*values: Any) -> tuple[np.ndarray, ...]:
        return interpret(*values) if _WORKER is None else _WORKER.submit(interpret, *values).result()

    return _interpret_p.bind(*arrays.values(), callback=callback, results=results)
