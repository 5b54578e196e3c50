"""Calls of real size on a GPU: each framework against fp64, and both bit by bit against each other."""

from __future__ import annotations

import importlib.util
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the judge of real sizes needs it")

import mla_torch
from mla_torch import launcher
from tests import gpu_tools
from tests.arg_specs import real_specs
from tests.gpu_tools import assert_right, assert_same_bits, judge, skip_where_refused
from tests.hopper_calls import by_implementation, cases_by_implementation
from tests.inputs import make_inputs
from tests.judge import cosine_difference, to_numpy

pytestmark = pytest.mark.gpu

HAS_JAX = importlib.util.find_spec("jax") is not None


@by_implementation(real_specs())
def test_spec(spec, implementation, monkeypatch):
    """PyTorch in poisoned buffers, twice; JAX; and, bit by bit, all the same.

    JAX has no strides, so where the spec has views or interleaved pages its kernels are others than PyTorch's.
    """
    inputs = make_inputs(spec)
    call = inputs.to_torch(gpu_tools.DEVICE)
    best = skip_where_refused(call, implementation)
    monkeypatch.setattr(launcher, "allocate", gpu_tools.poisoned)
    result = mla_torch.decode(**call, implementation=implementation)
    again = mla_torch.decode(**call, implementation=None if best else implementation)
    expected = judge(call, spec)
    assert_right(result, expected, spec)
    assert_same_bits(again, result)
    if spec.scales != "pow2" and spec.std == 1:  # `expected` is by rounded keys; as a whole, `out` agrees with those stored
        stored = judge(call).out
        finite = np.isfinite(stored)
        assert cosine_difference(to_numpy(result[0]).astype(np.float64)[finite], stored[finite]) <= 1e-5
    if not HAS_JAX:
        pytest.skip("PyTorch agrees with fp64; JAX is not installed to be compared with it")
    import mla_jax
    from mla_jax import jax_triton_compat

    if implementation == "hopper" and not jax_triton_compat.gluon_supported():
        pytest.skip("PyTorch agrees with fp64; JAX needs jax-triton 0.4 for Gluon kernels")
    from_jax = mla_jax.decode(**inputs.to_jax(), implementation=implementation)
    assert_right(from_jax, expected, spec)
    assert_same_bits(from_jax, result)


def test_the_specs_stay_few_enough_to_compile(capsys):
    """Compiling takes most of this tier's time: the number of binaries is said, and bounded."""
    from mla_torch.api import explain

    found = Counter()
    seen = set()
    for spec, implementation in cases_by_implementation(real_specs()):
        call = make_inputs(spec).to_torch(gpu_tools.DEVICE)
        refused = explain(**call, implementation=(implementation, "reference")).plan is None
        for launch in () if refused else explain(**call, implementation=implementation).plan.launches:
            reads_keys = "kv_cache" in launch.input_arrays
            dtype = spec.format if reads_keys else "fp16" if spec.format == "fp16" else "bf16"
            key = (launch.name, tuple(launch.constexprs.items()), launch.num_warps, launch.num_stages, dtype)
            found[launch.name] += key not in seen
            seen.add(key)
    with capsys.disabled():
        print(f"\n{len(real_specs())} specs of real size: " + ", ".join(f"{n} of {name}" for name, n in found.items()))
    assert found.total() < 420  # pieces of two kinds are merged
