"""Running interpreted kernels: through the front ends that are installed, or alone, in poisoned and guarded memory."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_kernels.device import INTERPRETER
from mla_kernels.launch import Launch, Plan
from mla_kernels.plan import plan_decode
from mla_kernels.problem import TensorSpec, make_problem
from tests.inputs import Inputs, Scope
from tests.judge import Judgement, assert_close, judge, to_numpy

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_JAX = importlib.util.find_spec("jax") is not None
GUARD = 64  # elements before and behind a buffer

if HAS_TORCH:
    import torch

    import mla_torch
    from mla_torch import launcher
if HAS_JAX:
    import jax

    import mla_jax
    from mla_jax import interpret

Results = tuple[np.ndarray, np.ndarray]

# For the `pytestmark` of tests that interpret kernels: numpy warns where a huge sink or score rightly overflows to inf.
INTERPRET = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


class Memory:
    """Hands out buffers full of poison: NaN, or an int32 that leads far outside of everything.

    `buffers` are those handed out so far.
    """

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []
        self._bases: list[np.ndarray] = []

    def array(self, shape: Any, dtype: Any) -> np.ndarray:
        dtype = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
        size = math.prod(shape)
        base = np.empty(size + 2 * GUARD, dtype)
        base.view(np.uint8)[:] = self._poison(dtype)
        self._bases.append(base)
        self.buffers.append(base[GUARD : GUARD + size].reshape(shape))
        return self.buffers[-1]

    def tensor(self, shape: Any, *, dtype: Any, device: Any) -> Any:
        """The same as a PyTorch tensor; stands in for `torch.empty`."""
        array = self.array(shape, str(dtype).removeprefix("torch."))
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(dtype)
        return torch.from_numpy(array)

    def assert_guards_hold(self) -> None:
        for base in self._bases:
            ends = np.concatenate([base[:GUARD], base[-GUARD:]])
            assert (ends.view(np.uint8) == self._poison(base.dtype)).all(), f"written beside a buffer of {base.size} elements"

    @staticmethod
    def _poison(dtype: np.dtype) -> int:
        return 0x7F if dtype.kind in "iu" else 0xFF


@contextmanager
def poisoned_memory() -> Iterator[Memory]:
    """All that either front end allocates within comes from a `Memory`, whose guards are checked at the end."""
    memory = Memory()
    with pytest.MonkeyPatch.context() as patch:
        if HAS_TORCH:
            patch.setattr(launcher, "allocate", memory.tensor)
        if HAS_JAX:
            patch.setattr(interpret, "allocate", memory.array)
        yield memory
    memory.assert_guards_hold()


def decode_torch(inputs: Inputs, **more: Any) -> Results:
    """The interpreted kernels through `mla_torch.decode`."""
    call = inputs.to_torch() | more
    with poisoned_memory():
        out, lse = mla_torch.decode(**call, implementation="triton")
    return to_numpy(out), to_numpy(lse)


def decode_jax(inputs: Inputs, jit: bool = True, **more: Any) -> Results:
    """The interpreted kernels through `mla_jax.decode`."""
    call = inputs.to_jax() | more
    arrays = {name: x for name, x in call.items() if isinstance(x, jax.Array)}
    options = {name: x for name, x in call.items() if name not in arrays}

    def decode(arrays: dict[str, Any]) -> Any:
        return mla_jax.decode(**arrays, **options, implementation="triton")

    with poisoned_memory():
        out, lse = jax.block_until_ready((jax.jit(decode) if jit else decode)(arrays))
    return np.asarray(out), np.asarray(lse)


def decode_either(inputs: Inputs, **more: Any) -> Results:
    """Through one of the front ends, for tests of the kernels alone."""
    return decode_torch(inputs, **more) if HAS_TORCH else decode_jax(inputs, **more)


def decode_both(inputs: Inputs, **more: Any) -> Results:
    """Through every front end that is installed; their results must be the same bits."""
    results = [decode(inputs, **more) for decode, has in ((decode_torch, HAS_TORCH), (decode_jax, HAS_JAX)) if has]
    for other in results[1:]:
        assert_same_bits(results[0], other)
    return results[0]


def assert_judged(results: Results, inputs: Inputs, **more: Any) -> Judgement:
    """Asserts that results of `inputs` agree with fp64; returns what fp64 gives."""
    expected = judge(inputs.as_call() | more)
    spec = inputs.spec
    assert_close(
        *results,
        expected,
        power_of_two_scales=spec.scales == "pow2",
        published_bounds=spec.std == 0.1 and not more,
    )
    return expected


def check(inputs: Inputs, **more: Any) -> tuple[Results, Judgement]:
    """Runs through all front ends and judges."""
    results = decode_both(inputs, **more)
    return results, assert_judged(results, inputs, **more)


def assert_same_bits(results: Results, others: Results) -> None:
    for name, a, b in zip(("out", "lse"), results, others, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        width = f"u{a.itemsize}"
        differs = np.argwhere(a.view(width) != b.view(width))
        assert not len(differs), f"{name}{differs[0].tolist()}: {a[tuple(differs[0])]!r} and {b[tuple(differs[0])]!r}"


def launch(step: Launch, arrays: Mapping[str, np.ndarray], *, grid: Any = None, scalars: Any = None, **constants: Any) -> None:
    """Interprets one launch of a plan on numpy arrays; `constants` and what else is given replace what the plan says."""
    inputs = [_host(arrays[name]) for name in step.input_arrays]
    outputs = [_host(arrays[name]) for name in step.outputs]
    step.kernel[grid or step.grid](*inputs, *(scalars or step.scalars), *outputs, **{**step.constexprs, **constants})


def _host(array: np.ndarray) -> Any:
    """As the interpreter takes it, without a copy."""
    if HAS_JAX:
        return interpret.HostArray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def plan_of(inputs: Inputs) -> Plan:
    """The plan of the interpreter for the arrays of a call as numpy strides them."""
    call = {
        name: TensorSpec(x.shape, x.dtype.name, tuple(s // x.itemsize for s in x.strides)) if isinstance(x, np.ndarray) else x
        for name, x in inputs.as_call().items()
    }
    return plan_decode(make_problem(**call), INTERPRETER)


def arrays_of(inputs: Inputs) -> dict[str, np.ndarray]:
    """The arrays of a call by the names that plans use, without a copy."""
    call = inputs.as_call()
    arrays = {"q": call["q"], "kv_cache": call["kv_cache"], "table": inputs.main.table, "lengths": inputs.main.lengths}
    if inputs.extra is not None:
        arrays |= {
            "extra_kv_cache": call["extra_kv_cache"],
            "extra_table": inputs.extra.table,
            "extra_lengths": inputs.extra.lengths,
        }
    arrays["attn_sink"] = inputs.attn_sink
    arrays["softmax_scale"] = np.full(1, inputs.spec.d_qk**-0.5, np.float32)
    return {name: array for name, array in arrays.items() if array is not None}


def pages_of(scope: Scope) -> np.ndarray:
    """Bytes [pages, page stride]."""
    return scope.cache.buffer[scope.cache.offset :].reshape(scope.cache.num_pages, scope.cache.page_stride)


def move_pages(scope: Scope, place: np.ndarray, pages: np.ndarray) -> Scope:
    """Moves page i to `place[i]` of `pages`, the bytes [pages, page stride] of another cache, and points the table there.

    `pages` must be contiguous.
    """
    for i, page in enumerate(pages_of(scope)):
        pages[place[i]] = page
    cache = replace(scope.cache, num_pages=len(pages), offset=0, buffer=pages.reshape(-1))
    size = cache.page_size if scope.table.ndim == 3 else 1
    inside = (scope.table >= 0) & (scope.table < len(place) * size)
    entry = np.where(inside, scope.table, 0)
    moved = place[entry // size] * size + entry % size
    return Scope(cache, np.where(inside, moved, scope.table).astype(np.int32), scope.lengths)
