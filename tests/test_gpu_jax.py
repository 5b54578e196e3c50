"""The JAX front end on a GPU: under transformations, without copies, compiled once."""

from __future__ import annotations

import re

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp
import numpy as np

import mla_jax
from mla_jax import traced
from tests.arg_specs import ArgSpec
from tests.hopper_calls import by_implementation
from tests.inputs import make_inputs
from tests.judge import assert_close, judge, to_numpy

pytestmark = pytest.mark.gpu

DENSE = ArgSpec(batch=6, h_q=16, length=1000)
V32 = ArgSpec(format="v32_fp8", batch=3, s_q=2, h_q=128, length=900, topk=512, topk_length=True, scales="arbitrary")
MODEL1 = ArgSpec(
    format="model1_fp8", d_qk=512, batch=3, h_q=64, length=600, topk=128, topk_length=True, extra=(64, 512, True), sink="finite"
)
SPECS = (DENSE, V32, MODEL1)


def split(call, implementation="triton"):
    """(arrays, options) of a call of one implementation; skips the test where that does not serve it."""
    explanation = mla_jax.explain(**call, implementation=(implementation, "reference"))
    if explanation.implementation != implementation:
        pytest.skip("; ".join(map(str, explanation.refused[implementation])))
    arrays = {name: x for name, x in call.items() if hasattr(x, "shape")}
    options = {name: x for name, x in call.items() if name not in arrays}
    return arrays, options | {"implementation": implementation}


def assert_same_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        a, b = np.ascontiguousarray(to_numpy(x)), np.ascontiguousarray(to_numpy(y))
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a.view(np.uint8) == b.view(np.uint8)).all()


@by_implementation(
    [
        ArgSpec(batch=2, h_q=16, length=130, causal=True, s_q=2),
        ArgSpec(format="fp16", batch=3, h_q=40, length=300, d_qk=512, page_size=16, lengths="zeros", num_splits=3),
        ArgSpec(format="v32_fp8", batch=2, h_q=8, length=100, topk=64, index_kind="holes"),
        ArgSpec(format="model1_fp8", d_qk=512, batch=2, h_q=8, length=100, topk=64, sink="infinite"),
    ]
)
def test_against_fp64(spec, implementation):
    """Small enough for the judge in numpy: needs no other framework."""
    inputs = make_inputs(spec)
    arrays, options = split(inputs.to_jax(), implementation)
    assert_close(*mla_jax.decode(**arrays, **options), judge(inputs.as_call()))


def test_the_default_is_the_best_that_serves():
    arrays, options = split(make_inputs(DENSE).to_jax(), "hopper")
    best = mla_jax.decode(**arrays, **options)
    assert_same_bits(mla_jax.decode(**arrays), best)


@by_implementation(SPECS)
def test_eager_jit_and_scan_give_the_same_bits(spec, implementation):
    arrays, options = split(make_inputs(spec).to_jax(), implementation)
    expected = mla_jax.decode(**arrays, **options)
    jitted = jax.jit(lambda arrays: mla_jax.decode(**arrays, **options))
    assert_same_bits(jitted(arrays), expected)

    def step(carry, scale):
        return carry, mla_jax.decode(**carry, **options, softmax_scale=scale)

    _, found = jax.jit(lambda arrays, scales: jax.lax.scan(step, arrays, scales))(
        arrays, jnp.array([1.0, spec.d_qk**-0.5, 0.01], jnp.float32)
    )
    assert_same_bits([x[1] for x in found], expected)


@by_implementation([DENSE])
def test_vmap_folds_into_the_batch(spec, implementation):
    arrays, options = split(make_inputs(spec).to_jax(), implementation)
    expected = mla_jax.decode(**arrays, **options)
    mapped = {name: 0 if name != "kv_cache" else None for name in arrays}
    halves = {name: x.reshape(2, 3, *x.shape[1:]) if mapped[name] == 0 else x for name, x in arrays.items()}
    found = jax.vmap(lambda arrays: mla_jax.decode(**arrays, **options), in_axes=(mapped,))(halves)
    assert_same_bits([x.reshape(y.shape) for x, y in zip(found, expected, strict=True)], expected)


@by_implementation(SPECS)
def test_nothing_is_compiled_twice(spec, implementation):
    """New values of scale, lengths and tables, and fewer live requests, run what is compiled."""
    arrays, options = split(make_inputs(spec).to_jax(), implementation)
    jitted = jax.jit(lambda arrays, scale: mla_jax.decode(**arrays, **options, softmax_scale=scale))
    jitted(arrays, 0.1)
    mla_jax.decode(**arrays, **options)
    eager = traced._decode._cache_size()
    lengths = "topk_length" if spec.sparse else "cache_seqlens"
    table = "indices" if spec.sparse else "block_table"
    for i in range(3):
        changed = arrays | {lengths: jnp.where(jnp.arange(spec.batch) < i, arrays[lengths] // 2, 0), table: arrays[table][::-1]}
        found = jitted(changed, 0.2 + i)
        assert_same_bits(mla_jax.decode(**changed, **options, softmax_scale=0.2 + i), found)
        assert jnp.isinf(found[1][i:]).all() or spec.extra
    assert jitted._cache_size() == 1
    assert traced._decode._cache_size() == eager


@by_implementation(SPECS)
def test_the_cache_is_not_copied(spec, implementation):
    """A cache of 4 GiB, compiled and not allocated: no copy of it in the program, and no room for one."""
    arrays, options = split(make_inputs(spec).to_jax(), implementation)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    cache = shapes["kv_cache"]
    pages = 2**32 // (cache.dtype.itemsize * int(np.prod(cache.shape[1:])))
    shapes["kv_cache"] = jax.ShapeDtypeStruct((pages, *cache.shape[1:]), cache.dtype)
    compiled = jax.jit(lambda arrays: mla_jax.decode(**arrays, **options)).lower(shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**28
    name = {"bfloat16": "bf16", "uint8": "u8"}[str(cache.dtype)]
    made = re.compile(rf"= {name}\[{pages},[0-9,]*\]\S* ([a-z0-9-]+)")
    assert set(made.findall(compiled.as_text())) <= {"parameter", "bitcast", "get-tuple-element"}
    assert "triton_kernel_call" in compiled.as_text()


@by_implementation([DENSE])
def test_a_donated_cache_stays_where_it_is(spec, implementation):
    """A decode loop that owns its cache: written in place, decoded, handed on."""
    arrays, options = split(make_inputs(spec).to_jax(), implementation)
    cache = arrays.pop("kv_cache")
    page = arrays["block_table"][0, 0]

    def step(cache, row, arrays):
        cache = cache.at[page, 0, 0].set(row)
        return cache, mla_jax.decode(kv_cache=cache, **arrays, **options)

    row = jnp.linspace(-1, 1, spec.d_qk, dtype=jnp.bfloat16)
    _, expected = jax.jit(step)(cache, row, arrays)
    donating = jax.jit(step, donate_argnums=0)
    mine = cache + 0
    where = mine.unsafe_buffer_pointer()
    for _ in range(2):
        mine, found = donating(mine, row, arrays)
        assert mine.unsafe_buffer_pointer() == where
        assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_bytes_of_every_dtype(dtype):
    arrays, options = split(make_inputs(V32).to_jax())
    expected = mla_jax.decode(**arrays, **options)
    viewed = arrays | {"kv_cache": arrays["kv_cache"].view(dtype)}
    assert_same_bits(mla_jax.decode(**viewed, **options), expected)


@by_implementation([ArgSpec(batch=7, h_q=8, length=20)])
def test_more_rows_than_a_grid_dimension_holds(spec, implementation):
    arrays, options = split(make_inputs(spec).to_jax(), implementation)
    copies = 65_536 // spec.batch + 2
    rows = jnp.arange(copies * spec.batch) % spec.batch
    many = {name: x if name == "kv_cache" else x[rows] for name, x in arrays.items()}
    expected = mla_jax.decode(**arrays, **options | {"num_splits": 1})
    for num_splits in (1, None):
        found = mla_jax.decode(**many, **options | {"num_splits": num_splits})
        for x, y in zip(found, expected, strict=True):
            assert (x.reshape(copies, *y.shape) == y).all()
