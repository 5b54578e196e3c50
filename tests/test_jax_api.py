"""`mla_jax.decode` and `explain` as an interface: what they accept, refuse, choose, trace and lower."""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import mla_jax
from mla_jax import api, choice, device, interpret, jax_triton_compat, traced
from mla_kernels.device import INTERPRETER, KNOWN_DEVICES, DeviceFacts
from mla_kernels.launch import Refusal, TileDescriptor
from tests.conftest import INTERPRETED, cuda_devices
from tests.jax_lowered import kernel_calls

ROOT = Path(__file__).resolve().parent.parent
H200, A100 = KNOWN_DEVICES["NVIDIA H200"], KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"]
FASTEST = "hopper" if jax_triton_compat.gluon_supported() else "triton"  # for a dense call on an H200
KERNELS = {"hopper": "dense_kernel", "triton": "attend_kernel"}
RUNS_KERNELS = INTERPRETED or cuda_devices() > 0
BOTH = [
    pytest.param(
        "triton", marks=pytest.mark.skipif(not RUNS_KERNELS, reason="the kernels need a CUDA device or TRITON_INTERPRET=1")
    ),
    "reference",
]
BF16_BOUND = 2**-7  # outputs of order 1, rounded to bf16 twice (P and out)

needs_jax_triton = pytest.mark.skipif(
    not jax_triton_compat.available(), reason=f"kernels cannot be lowered: {jax_triton_compat.reason()}"
)


def dense(b=2, s_q=1, h_q=4, d_qk=576, page_size=16, pages=3, dtype="bfloat16"):
    """Keyword arguments of a dense call; request i has its own pages and 5 + 10 * i tokens."""
    rng = np.random.default_rng(0)
    return {
        "q": jnp.asarray(rng.standard_normal((b, s_q, h_q, d_qk)), dtype),
        "kv_cache": jnp.asarray(rng.standard_normal((b * pages, page_size, 1, d_qk)), dtype),
        "block_table": jnp.arange(b * pages, dtype=jnp.int32).reshape(b, pages),
        "cache_seqlens": 5 + 10 * jnp.arange(b, dtype=jnp.int32),
    }


def sparse(cache_format="bf16", b=2, s_q=1, h_q=4, topk=9, page_size=16, pages=3, extra=False):
    d_qk = 512 if cache_format == "model1_fp8" else 576
    call = dense(b, s_q, h_q, d_qk, page_size, pages)
    del call["block_table"], call["cache_seqlens"]
    call["indices"] = jnp.arange(b * s_q * topk, dtype=jnp.int32).reshape(b, s_q, topk) % (b * pages * page_size)
    call["topk_length"] = jnp.full(b, topk - 2, jnp.int32)
    if extra:
        call["extra_kv_cache"] = call["kv_cache"][::-1]
        call["extra_indices"] = call["indices"][..., ::-1]
        call["extra_topk_length"] = jnp.full(b, 3, jnp.int32)
    if cache_format != "bf16":
        for name in ("kv_cache", "extra_kv_cache"):
            if name in call:
                call[name] = mla_jax.quantize_cache(call[name], cache_format)
        if call["kv_cache"].ndim == 2:
            call["page_size"] = page_size
    return call


CALLS = [
    pytest.param(lambda: dense(), id="dense"),
    pytest.param(lambda: dense(s_q=3) | {"causal": True, "num_splits": 2}, id="dense-causal-splits"),
    pytest.param(lambda: dense(d_qk=320) | {"head_dim_v": 256}, id="dense-d320"),
    pytest.param(lambda: sparse() | {"attn_sink": jnp.array([-jnp.inf, 0.0, 3.0, jnp.inf])}, id="sparse-sink"),
    pytest.param(lambda: sparse("v32_fp8"), id="v32_fp8"),
    pytest.param(lambda: sparse("model1_fp8", extra=True), id="model1_fp8-extra"),
]


def split(call):
    """(arrays, options) of keyword arguments."""
    arrays = {name: value for name, value in call.items() if isinstance(value, jax.Array | np.ndarray)}
    return arrays, {name: value for name, value in call.items() if name not in arrays}


def jitted(call, **more):
    """`decode` as a jitted function of the arrays of `call`, and these arrays."""
    arrays, options = split(call)
    return jax.jit(lambda arrays: mla_jax.decode(**arrays, **options, **more)), arrays


def shapes(call):
    """`call` with shapes in place of arrays."""
    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype) if isinstance(v, jax.Array) else v for k, v in call.items()}


def lower_for_cuda(call, facts=H200, **more):
    function, arrays = jitted(call, **more)
    with mla_jax.device_facts(facts):
        return function.trace(shapes(arrays)).lower(lowering_platforms=("cuda",))


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.fixture
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
)


# Results


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("call", CALLS)
def test_results(call, implementation):
    call = call()
    out, lse = mla_jax.decode(**call, implementation=implementation)
    call.pop("num_splits", None)
    expected, expected_lse = mla_jax.decode_reference(**call)
    assert out.dtype == jnp.bfloat16
    assert out.shape == expected.shape
    assert lse.dtype == jnp.float32
    assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=BF16_BOUND, atol=BF16_BOUND)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)  # bf16 dequantisation moves the scores


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("call", CALLS)
def test_jit_gives_the_same_bits(call, implementation):
    call = call()
    function, arrays = jitted(call, implementation=implementation)
    assert_same_bits(function(arrays), mla_jax.decode(**call, implementation=implementation))


@pytest.mark.parametrize("implementation", BOTH)
def test_scan(implementation):
    """A decoding loop: the lengths grow from step to step."""
    call = dense()
    queries = jnp.stack([call["q"], call["q"] * 2, call["q"] * 3])

    def step(lengths, q):
        out, lse = mla_jax.decode(**{**call, "q": q, "cache_seqlens": lengths}, implementation=implementation)
        return lengths + 1, (out, lse)

    lengths, results = jax.lax.scan(step, call["cache_seqlens"], queries)
    assert (lengths == call["cache_seqlens"] + 3).all()
    for i in range(3):
        one = {**call, "q": queries[i], "cache_seqlens": call["cache_seqlens"] + i}
        assert_same_bits([r[i] for r in results], mla_jax.decode(**one, implementation=implementation))


@pytest.mark.parametrize("implementation", BOTH)
def test_donated_arguments(implementation):
    """A step that writes a token into a donated cache and attends to it reuses the cache's memory."""
    call = dense()
    row = jnp.ones((576,), jnp.bfloat16)
    updated = call["kv_cache"].at[0, 5, 0].set(row)
    expected = mla_jax.decode(**{**call, "kv_cache": updated}, implementation=implementation)

    def step(cache, rest):
        cache = cache.at[0, 5, 0].set(row)
        return cache, mla_jax.decode(kv_cache=cache, **rest, implementation=implementation)

    cache = jnp.array(call.pop("kv_cache"))
    new_cache, results = jax.jit(step, donate_argnums=0)(cache, call)
    assert cache.is_deleted()
    assert_same_bits([new_cache], [updated])
    assert_same_bits(results, expected)


@pytest.mark.parametrize("implementation", BOTH)
def test_numpy_arrays(implementation):
    call = dense()
    as_numpy = {name: np.asarray(array) for name, array in call.items()}
    assert_same_bits(
        mla_jax.decode(**as_numpy, implementation=implementation), mla_jax.decode(**call, implementation=implementation)
    )


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_bytes_of_any_dtype(dtype, implementation):
    call = sparse("v32_fp8")
    viewed = {**call, "kv_cache": jnp.asarray(np.asarray(call["kv_cache"]).view(dtype))}
    assert_same_bits(
        mla_jax.decode(**viewed, implementation=implementation), mla_jax.decode(**call, implementation=implementation)
    )


@pytest.mark.parametrize("implementation", [None, "triton", "reference"])
@pytest.mark.parametrize(("b", "s_q"), [(0, 1), (2, 0), (0, 0)])
def test_empty_calls_give_empty_results_and_launch_nothing(b, s_q, implementation, monkeypatch):
    monkeypatch.setattr(traced, "trace", None)
    call = dense() | {
        "q": jnp.zeros((b, s_q, 4, 576), jnp.bfloat16),
        "block_table": jnp.zeros((b, 3), jnp.int32),
        "cache_seqlens": jnp.zeros(b, jnp.int32),
    }
    out, lse = mla_jax.decode(**call, implementation=implementation)
    assert (out.shape, out.dtype) == ((b, s_q, 4, 512), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((b, 4, s_q), jnp.float32)
    assert "none, the result is empty" in str(mla_jax.explain(**call, implementation=implementation))


def test_a_call_without_pages_has_zero_rows():
    call = dense() | {"block_table": jnp.zeros((2, 0), jnp.int32)}
    out, lse = mla_jax.decode(**call)
    assert (out == 0).all()
    assert (lse == jnp.inf).all()


@pytest.mark.interpret
def test_no_result_depends_on_what_new_memory_holds(monkeypatch):
    call = dense(b=3) | {"cache_seqlens": jnp.array([0, 1, 48], jnp.int32)}
    out, lse = mla_jax.decode(**call)

    def poisoned(shape, dtype):
        made = np.empty(shape, dtype)
        made.fill(np.nan if made.dtype.kind == "f" else -(2**30))
        return made

    monkeypatch.setattr(interpret, "allocate", poisoned)
    again = mla_jax.decode(**call)
    assert_same_bits(again, (out, lse))
    assert (out[0] == 0).all()
    assert (lse[0] == jnp.inf).all()


@pytest.mark.interpret
def test_threads():
    """The interpreter is not thread-safe; calls wait for each other."""
    calls = [dense(s_q=i % 2 + 1) for i in range(6)]
    expected = [mla_jax.decode(**call) for call in calls]
    with ThreadPoolExecutor(3) as pool:
        for got, wanted in zip(pool.map(lambda call: mla_jax.decode(**call), calls), expected, strict=True):
            assert_same_bits(got, wanted)


# Compilation


@pytest.mark.parametrize("implementation", BOTH)
def test_eager_calls_compile_once(implementation):
    """Neither the scale, however it is given, nor lengths, tables and queries compile anything."""
    call = dense(h_q=5)

    def run(**changes):
        return jax.block_until_ready(mla_jax.decode(**{**call, **changes}, implementation=implementation))

    changes = [
        {"softmax_scale": 0.5},
        {"softmax_scale": 2},
        {"softmax_scale": np.float32(0.25)},
        {"softmax_scale": np.float64(0.25)},
        {"softmax_scale": jnp.float32(0.125)},
        {"cache_seqlens": call["cache_seqlens"] + 3},
        {"block_table": call["block_table"][::-1]},
        {"q": call["q"] * 2},
    ]
    run()
    run(softmax_scale=jnp.float32(1.0))  # the small functions that make this one fp32 [1]
    compilations.clear()
    results = [run(**change) for change in changes]
    assert compilations == []
    assert not np.array_equal(results[0][1], results[1][1])
    assert_same_bits(results[2], results[3])


def test_the_same_implementation_by_another_name_compiles_nothing(monkeypatch):
    choosing(monkeypatch, None)
    call = dense(h_q=7)
    expected = jax.block_until_ready(mla_jax.decode(**call))
    compilations.clear()
    for implementation in ("reference", ("reference",), ["reference"]):
        assert_same_bits(mla_jax.decode(**call, implementation=implementation), expected)
        assert mla_jax.explain(**call, implementation=implementation) == mla_jax.explain(**call)
    assert compilations == []


@pytest.mark.parametrize("implementation", BOTH)
def test_a_traced_scale_compiles_once(implementation):
    call = dense(h_q=6)
    function = jax.jit(lambda scale, lengths: mla_jax.decode(
        **{**call, "cache_seqlens": lengths}, softmax_scale=scale, implementation=implementation
    ))  # fmt: skip
    first = function(1.0, call["cache_seqlens"])
    longer = call["cache_seqlens"] + 1  # compiles a sum, if no test of this process had one before
    compilations.clear()
    second = jax.block_until_ready(function(0.5, longer))
    assert compilations == []
    assert not np.array_equal(first[1], second[1])
    wanted = {**call, "cache_seqlens": longer, "softmax_scale": 0.5, "implementation": implementation}
    assert_same_bits(second, mla_jax.decode(**wanted))


def test_scale_of_any_float_dtype_and_shape():
    call = dense()
    expected = mla_jax.decode(**call, softmax_scale=0.5)
    for scale in (jnp.array([0.5]), jnp.bfloat16(0.5), np.array([[0.5]]), np.float16(0.5)):
        assert_same_bits(mla_jax.decode(**call, softmax_scale=scale), expected)


# Choosing


def choosing(monkeypatch, facts):
    monkeypatch.setattr(api, "current_facts", lambda: facts)


@needs_jax_triton
def test_the_best_for_each_device_comes_first(monkeypatch):
    for facts, for_dense, for_sparse in (
        (None, "reference", "reference"),
        (INTERPRETER, "triton", "triton"),
        (H200, FASTEST, "triton"),
        (A100, "triton", "triton"),
    ):
        choosing(monkeypatch, facts)
        for call, chosen in ((dense(), for_dense), (dense(d_qk=320) | {"head_dim_v": 256}, for_sparse), (sparse(), for_sparse)):
            explanation = mla_jax.explain(**call)
            assert explanation.implementation == chosen
            assert explanation.facts == facts
            assert chosen not in explanation.refused


@pytest.mark.skipif(jax_triton_compat.gluon_supported(), reason="Gluon kernels can be lowered here")
def test_where_gluon_kernels_cannot_be_lowered_a_sentence_says_so(monkeypatch):
    choosing(monkeypatch, H200)
    (refusal,) = mla_jax.explain(**dense(), implementation=("hopper", "reference")).refused["hopper"]
    assert "jax-triton" in str(refusal)
    with pytest.raises(NotImplementedError, match=r"hopper: implementation: .*jax-triton"):
        mla_jax.explain(**dense(), implementation="hopper")


@needs_jax_triton
def test_a_name_forces_an_implementation_and_a_sequence_is_an_order(monkeypatch):
    choosing(monkeypatch, H200)
    for implementation, chosen in (
        ("reference", "reference"),
        ("triton", "triton"),
        (["reference", "triton"], "reference"),
        (("triton", "reference"), "triton"),
    ):
        assert mla_jax.explain(**dense(), implementation=implementation).implementation == chosen


def test_refused_implementations_are_passed_over_and_listed(monkeypatch):
    choosing(monkeypatch, None)
    explanation = mla_jax.explain(**dense(), implementation=("triton", "reference"))
    assert explanation.implementation == "reference"
    (refusal,) = explanation.refused["triton"]
    assert refusal.argument == "q"
    assert "CUDA" in str(explanation)


def test_one_error_lists_every_refusal(monkeypatch):
    choosing(monkeypatch, H200)
    for name in choice.IMPLEMENTATIONS:
        found = (Refusal("q", f"{name} dislikes it"), Refusal("indices", f"{name} cannot"))
        entry = replace(choice.IMPLEMENTATIONS[name], refusals=lambda problem, facts, found=found: found)
        monkeypatch.setitem(choice.IMPLEMENTATIONS, name, entry)
    choice.choose_for.cache_clear()
    with pytest.raises(NotImplementedError) as raised:
        mla_jax.decode(**dense(), implementation=["triton", "reference"])
    choice.choose_for.cache_clear()
    for line in ("triton: q: triton dislikes it", "reference: indices: reference cannot"):
        assert line in str(raised.value)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes every problem that the plan takes")
def test_a_gpu_does_not_fall_back_to_the_reference_by_itself():
    function, arrays = jitted(dense())
    old = DeviceFacts("NVIDIA GeForce GTX 1080", (6, 1), 20, 98_304)
    with mla_jax.device_facts(old), pytest.raises(NotImplementedError, match=r"triton: .*(8\.0|jax-triton)"):
        jax.eval_shape(function, arrays)


@pytest.mark.parametrize("wrong", ["cuda", "", (), ["triton", "fast"], 3, {"triton"}])
def test_unknown_implementations(wrong):
    with pytest.raises(ValueError, match=r"^implementation: expected None, one of 'hopper', 'triton', 'reference' or a seq"):
        mla_jax.decode(**dense(), implementation=wrong)


def test_explain():
    call = sparse("model1_fp8", extra=True)
    explanation = mla_jax.explain(**call, implementation="reference")
    text = str(explanation)
    assert "implementation: reference" in text
    assert "model1_fp8" in text
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    assert str(mla_jax.explain(**shapes(call), softmax_scale=scale, implementation="reference")) == text


@needs_jax_triton
@pytest.mark.compile
def test_explain_for_a_gpu():
    with mla_jax.device_facts("NVIDIA H200"):
        for call, chosen in ((dense(), FASTEST), (sparse(), "triton")):
            text = str(mla_jax.explain(**call))
            kernel = KERNELS[chosen]
            for words in (f"implementation: {chosen} (on CUDA, the reference on other platforms)", "NVIDIA H200", kernel):
                assert words in text


# Errors, all of them while tracing


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        (dense, {"q": shape(2, 4, 576)}, ValueError, "q: expected shape"),
        (dense, {"q": shape(2, 1, 4, 576, dtype="float32")}, ValueError, "q: expected bfloat16 or float16"),
        (dense, {"kv_cache": shape(6, 16, 1, 512)}, ValueError, "kv_cache: expected bfloat16 of shape"),
        (dense, {"kv_cache": shape(6, 16, 1, 600, dtype="uint8")}, ValueError, "kv_cache: 600 bytes a token"),
        (dense, {"block_table": shape(3, 3, dtype="int32")}, ValueError, "block_table: expected int32"),
        (dense, {"block_table": shape(2, 3, dtype="uint32")}, ValueError, "block_table: expected int32"),
        (dense, {"cache_seqlens": shape(3, dtype="int32")}, ValueError, "cache_seqlens: expected int32"),
        (dense, {"cache_seqlens": None}, ValueError, "cache_seqlens: needed"),
        (dense, {"indices": shape(2, 1, 9, dtype="int32")}, ValueError, "block_table: does not go with indices"),
        (dense, {"topk_length": shape(2, dtype="int32")}, ValueError, "topk_length: goes with indices"),
        (dense, {"attn_sink": shape(5, dtype="float32")}, ValueError, "attn_sink: expected float32"),
        (dense, {"head_dim_v": 600}, ValueError, "head_dim_v: expected at most"),
        (dense, {"num_splits": 0}, ValueError, "num_splits: expected a positive int"),
        (dense, {"causal": 1}, ValueError, "causal: expected a bool"),
        (dense, {"cache_format": "fp7"}, ValueError, "cache_format: expected one of"),
        (dense, {"cache_format": ["bf16"]}, ValueError, "cache_format: expected one of"),
        (dense, {"cache_format": "v41_fp8"}, NotImplementedError, "cache_format: 'v41_fp8' is reserved"),
        (dense, {"page_size": 8}, ValueError, "page_size: expected 16"),
        (dense, {"softmax_scale": shape(2, dtype="float32")}, ValueError, "softmax_scale: expected a number or"),
        (dense, {"softmax_scale": shape(dtype="int32")}, ValueError, "softmax_scale: expected a number or"),
        (dense, {"softmax_scale": "1"}, ValueError, "softmax_scale: expected a number or"),
        (dense, {"softmax_scale": float("nan")}, ValueError, "softmax_scale: expected a finite number"),
        (dense, {"softmax_scale": np.array([np.inf])}, ValueError, "softmax_scale: expected a finite number"),
        (dense, {"softmax_scale": 10**400}, ValueError, "softmax_scale: expected a finite number"),
        (dense, {"softmax_scale": 1e39}, ValueError, "softmax_scale: expected a finite number"),
        (sparse, {"indices": shape(2, 2, 9, dtype="int32")}, ValueError, "indices: expected int32"),
        (sparse, {"topk_length": shape(4, dtype="int32")}, ValueError, "topk_length: expected int32"),
        (sparse, {"causal": True}, ValueError, "causal: does not go with indices"),
        (sparse, {"extra_indices": shape(2, 1, 9, dtype="int32")}, ValueError, "extra_kv_cache: needed together"),
        (sparse, {"extra_kv_cache": shape(6, 16, 1, 576)}, ValueError, "extra_indices: needed together"),
        (sparse, {"extra_topk_length": shape(2, dtype="int32")}, ValueError, "extra_topk_length: goes with"),
    ],
)
def test_errors_name_the_argument_while_tracing(call, changes, error, message):
    changed = {**shapes(call()), **changes}
    arrays = {name: value for name, value in changed.items() if isinstance(value, jax.ShapeDtypeStruct)}
    options = {name: value for name, value in changed.items() if name not in arrays}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=f"^{message}"):
            jax.eval_shape(lambda arrays: mla_jax.decode(**arrays, **options), arrays)
        with pytest.raises(error, match=f"^{message}"):
            mla_jax.explain(**changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "q: expected a jax.Array or numpy.ndarray, got builtins.NoneType"),
        ({"block_table": [[0, 1, 2], [3, 4, 5]]}, "block_table: expected a jax.Array or numpy.ndarray, got builtins.list"),
        # JAX would make it int32 in silence
        ({"block_table": np.zeros((2, 3), np.int64)}, r"block_table: expected int32 of shape .*, got int64 \[2, 3\]"),
        ({"kv_cache": jax.ShapeDtypeStruct((6, 16, 1, 576), "bfloat16")}, "kv_cache: expected a jax.Array or numpy.ndarray"),
    ],
)
def test_what_is_no_array_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        mla_jax.decode(**{**dense(), **changes})


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels run on the CPU")
@needs_jax_triton
def test_kernels_on_a_platform_without_them():
    function, arrays = jitted(dense(), implementation="triton")
    with (
        mla_jax.device_facts(H200),
        pytest.raises(NotImplementedError, match="'triton' needs a CUDA device and got platform cpu"),
    ):
        function(arrays)


# Transformations


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(
    ("call", "mapped"),
    [
        pytest.param(lambda: dense(s_q=2) | {"causal": True}, ("q", "block_table", "cache_seqlens"), id="dense"),
        pytest.param(lambda: dense(), ("q",), id="q-alone"),
        pytest.param(lambda: dense() | {"num_splits": 2}, ("cache_seqlens",), id="lengths-alone"),
        pytest.param(
            lambda: sparse("model1_fp8", extra=True) | {"attn_sink": jnp.arange(4.0)},
            ("q", "indices", "topk_length", "extra_indices", "extra_topk_length"),
            id="sparse-extra",
        ),
    ],
)
def test_vmap_folds_into_the_batch(call, mapped, implementation):
    arrays, options = split(call())
    options["implementation"] = implementation
    changes = {"q": 2, "block_table": 1, "cache_seqlens": 3, "indices": 1, "extra_indices": 2}
    stacked = {
        n: jnp.stack([arrays[n], arrays[n] * changes[n] if n == "q" else arrays[n] + changes.get(n, -1)]) for n in mapped
    }
    rest = {name: array for name, array in arrays.items() if name not in mapped}
    results = jax.vmap(lambda one: mla_jax.decode(**one, **rest, **options))(stacked)
    for i in range(2):
        one = {name: array[i] for name, array in stacked.items()}
        out, lse = mla_jax.decode(**one, **rest, **options)
        np.testing.assert_allclose(results[0][i].astype(np.float32), out.astype(np.float32), rtol=BF16_BOUND, atol=BF16_BOUND)
        np.testing.assert_allclose(results[1][i], lse, rtol=1e-5, atol=1e-5)
        if "num_splits" in options:  # then a row's bits do not depend on the rest of the batch
            assert_same_bits([r[i] for r in results], (out, lse))


def test_nested_vmap_and_any_axis():
    call = dense()
    q = jnp.stack([jnp.stack([call["q"] * (3 * i + j + 1) for j in range(3)], 2) for i in range(2)], 1)  # [b, 2, s_q, 3, ...]
    rest = {name: array for name, array in call.items() if name != "q"}
    inner = jax.vmap(lambda q: mla_jax.decode(q, **rest)[0], in_axes=2, out_axes=1)
    results = jax.jit(jax.vmap(inner, in_axes=1))(q)
    for i in range(2):
        for j in range(3):
            out, _ = mla_jax.decode(call["q"] * (3 * i + j + 1), **rest)
            np.testing.assert_allclose(
                results[i, :, j].astype(np.float32), out.astype(np.float32), rtol=BF16_BOUND, atol=BF16_BOUND
            )


@pytest.mark.parametrize("name", ["kv_cache", "extra_kv_cache", "attn_sink", "softmax_scale"])
def test_vmap_over_what_all_requests_share_says_what_to_do(name):
    call = sparse(extra=True) | {"attn_sink": jnp.arange(4.0), "softmax_scale": jnp.float32(0.5)}
    stacked = jnp.stack([call.pop(name)] * 2)
    with pytest.raises(NotImplementedError, match=rf"^{name}: .*vmap.*q, indices, topk_length, extra_indices.*jax\.lax\.map"):
        jax.vmap(lambda one: mla_jax.decode(**call, **{name: one}))(stacked)


@pytest.mark.parametrize("implementation", BOTH)
def test_gradients_are_refused_in_words(implementation):
    arrays, _ = split(dense())
    q = arrays.pop("q")

    def loss(q, stop=lambda x: x):
        return mla_jax.decode(stop(q), **arrays, implementation=implementation)[0].astype(jnp.float32).sum()

    for derivative in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(NotImplementedError, match=r"forward-only.*stop_gradient"):
            derivative(q)
    assert (jax.grad(lambda q: loss(q, jax.lax.stop_gradient) + q.astype(jnp.float32).sum())(q) == 1).all()


# Lowering for CUDA on a machine without it


def uses_of_arguments(lowered):
    """Names of the operations that read each argument of the lowered function, through the functions it calls."""
    module = lowered.compiler_ir("stablehlo")
    functions = {f.name.value: f for f in module.body.operations}

    def uses(value):
        names = set()
        for use in value.uses:
            operation = use.owner
            if operation.name == "func.call":
                callee = functions[operation.attributes["callee"].value]
                names |= uses(callee.regions[0].blocks[0].arguments[use.operand_number])
            else:
                names.add(operation.name)
        return names

    return {str(argument.type): uses(argument) for argument in functions["main"].regions[0].blocks[0].arguments}


CUDA_CALLS = [
    *CALLS,
    pytest.param(lambda: dense(h_q=16, d_qk=512, page_size=64, dtype="float16"), id="dense-d512-fp16"),
    pytest.param(
        lambda: sparse("v32_fp8") | {"kv_cache": jnp.zeros((6, 16, 1, 656), jnp.float8_e4m3fn)}, id="v32_fp8-as-float8"
    ),
    pytest.param(
        lambda: sparse("model1_fp8") | {"kv_cache": jnp.zeros((6, 16, 1, 584), jnp.int8), "page_size": None},
        id="model1-as-int8",
    ),
]


@needs_jax_triton
@pytest.mark.compile
@pytest.mark.parametrize("call", CUDA_CALLS)
def test_default_path_on_cuda(call):
    call = call()
    lowered = lower_for_cuda(call)
    with mla_jax.device_facts(H200):
        plan = mla_jax.explain(**call).plan
    calls = kernel_calls(lowered)
    assert [c.name for c in calls] == [launch.name for launch in plan.launches]
    for c, launch in zip(calls, plan.launches, strict=True):
        assert c.grid == launch.grid
        # A warp-specialised kernel has the warps of all its partitions; it is launched with what its code demands.
        assert c.num_warps >= launch.num_warps
        assert f".reqntid {32 * c.num_warps}" in " ".join(c.ptx.split())
        assert c.compute_capability == 90
        assert tuple(p for p in c.params if isinstance(p, int)) == tuple(s % 2**64 for s in launch.scalars)
        described = [x for x in launch.inputs if isinstance(x, TileDescriptor)]
        assert [(d.shape, d.strides, d.block_shape) for d in c.descriptors] == [
            (x.shape, (x.row_stride, 1), x.block_shape) for x in described
        ]
        assert [p for p in c.params if isinstance(p, str)] == [
            *("descriptor" if x in described else "pointer" for x in launch.inputs),
            *("pointer" for _ in launch.outputs),
        ]
        assert c.aliases == launch.aliases
        assert c.shared_memory <= H200.shared_memory
    text = lowered.as_text(debug_info=True)
    assert "triton_kernel_call" in text
    for launch in plan.launches:
        assert launch.name in text
    # No copy of a cache: nothing but a kernel reads it.
    names = {"bfloat16": "bf16", "float16": "f16", "uint8": "ui8", "int8": "i8", "float8_e4m3fn": "f8E4M3FN"}
    for name in ("kv_cache", "extra_kv_cache"):
        if name in call:
            cache = call[name]
            mlir = f"tensor<{'x'.join(map(str, cache.shape))}x{names[cache.dtype.name]}>"
            assert uses_of_arguments(lowered)[mlir] == {"stablehlo.custom_call"}


@needs_jax_triton
@pytest.mark.compile
def test_cuda_under_transformations():
    call = dense()
    rest = {name: array for name, array in call.items() if name != "q"}

    def steps(q, rest):
        def step(carry, q):
            return carry, jax.vmap(lambda q: mla_jax.decode(q, **rest)[0])(q)

        return jax.lax.scan(step, 0, q)[1]

    with mla_jax.device_facts(H200):
        q = jax.ShapeDtypeStruct((5, 3, *call["q"].shape), "bfloat16")
        lowered = jax.jit(steps).trace(q, shapes(rest)).lower(lowering_platforms=("cuda",))
    attend = next(c for c in kernel_calls(lowered) if c.name == KERNELS[FASTEST])
    assert attend.operands[0] == "tensor<6x1x4x576xbf16>"  # q of three examples of two requests


@needs_jax_triton
@pytest.mark.compile
def test_one_traced_function_serves_cpu_and_cuda(on_cpu):
    function, arrays = jitted(dense())
    with mla_jax.device_facts(H200):
        assert_same_bits(function(arrays), mla_jax.decode(**arrays, implementation="reference"))
        traced = function.trace(arrays)
        assert len(kernel_calls(traced.lower(lowering_platforms=("cuda",)))) > 0
        assert kernel_calls(traced.lower(lowering_platforms=("cpu",))) == []


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is a device of its own")
@pytest.mark.skipif(device.current_facts() is not None, reason="this machine has a CUDA device")
def test_without_facts_no_kernel_is_traced():
    function, arrays = jitted(dense())
    assert kernel_calls(function.trace(arrays).lower(lowering_platforms=("cuda",))) == []


# Device facts


@needs_jax_triton
@pytest.mark.compile
def test_a_function_is_traced_again_for_another_device():
    function, arrays = jitted(dense())
    capabilities = []
    for facts in ("NVIDIA H200", KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"], "NVIDIA H200"):
        with mla_jax.device_facts(facts) as given:
            assert given.name == (facts if isinstance(facts, str) else facts.name)
            calls = kernel_calls(function.trace(arrays).lower(lowering_platforms=("cuda",)))
        capabilities.append(calls[0].compute_capability)
    assert capabilities == [90, 80, 90]


@pytest.mark.parametrize("wrong", ["H200", 90, None])
def test_unknown_device_facts(wrong):
    with pytest.raises(ValueError, match=r"^device_facts: expected DeviceFacts or"), mla_jax.device_facts(wrong):
        pass


def test_facts_from_a_jax_device():
    h200 = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", core_count=132)
    assert device.facts_of(h200) == H200
    small = SimpleNamespace(device_kind="NVIDIA GeForce RTX 4090", compute_capability="8.9", core_count=128)
    assert device.facts_of(small) == DeviceFacts("NVIDIA GeForce RTX 4090", (8, 9), 128, 101_376)
    unknown = SimpleNamespace(device_kind="NVIDIA of tomorrow", compute_capability="13.0", core_count=200)
    assert device.facts_of(unknown).shared_memory == 49_152
    assert device.facts_of(SimpleNamespace(device_kind="NVIDIA H200")) == H200
    with pytest.raises(ValueError, match="compute capability"):
        device.facts_of(SimpleNamespace(device_kind="something else"))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is a device of its own")
def test_facts_from_an_abstract_mesh():
    if jax.__version_info__ < (0, 11):
        pytest.skip("abstract devices have a kind since jax 0.11")
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    target = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=target)):
        assert device.current_facts() == H200


# Imports


def in_fresh_process(code: str, **environment: str) -> str:
    """What `code` prints in a process of its own."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_jax_one_sentence_says_what_to_install():
    code = """
import sys
sys.modules["jax"] = None
try:
    import mla_jax
except ImportError as error:
    print(error)
"""
    assert in_fresh_process(code) == "mla_jax needs JAX: install mla-decode[jax]"


@pytest.mark.interpret
def test_interpreted_kernels_without_torch():
    code = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
import jax, jax.numpy as jnp, mla_jax
q = jnp.ones((1, 1, 4, 576), jnp.bfloat16)
cache = jnp.ones((2, 4, 1, 576), jnp.bfloat16)
call = q, cache, jnp.zeros((1, 1), jnp.int32), jnp.full(1, 3, jnp.int32)
assert mla_jax.explain(*call).implementation == "triton"
out, lse = jax.jit(mla_jax.decode)(*call)
print((out == 1).all(), out.dtype)
"""
    assert in_fresh_process(code, TRITON_INTERPRET="1") == "True bfloat16"


@pytest.mark.parametrize("tier", ["0", pytest.param("1", marks=pytest.mark.interpret)])
def test_shard_map(tier):
    """Two devices, each with its half of the requests, whose caches are sharded or shared."""
    code = """
import jax, jax.numpy as jnp, numpy as np, mla_jax
from jax.sharding import AxisType, PartitionSpec as P
from tests.jax_lowered import kernel_calls
from mla_jax import jax_triton_compat, device
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
q = jnp.asarray(rng.standard_normal((4, 1, 4, 576)), jnp.bfloat16)
cache = jnp.asarray(rng.standard_normal((8, 16, 1, 576)), jnp.bfloat16)
table = jnp.asarray(rng.integers(0, 4, (4, 3)), jnp.int32)
lengths = jnp.array([5, 40, 0, 17], jnp.int32)
call = q, cache, table, lengths
for of_cache, of_q, of_lengths in ((P(), P("x"), P("x")), (P("x"), P("x"), P("x")), (P("x"), P(), P())):
    for check in (True, False):
        specs = (of_q, of_cache, of_lengths, of_lengths)
        f = jax.shard_map(mla_jax.decode, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check)
        out, lse = jax.jit(f)(*call)
        parts = []
        for shard in range(2):
            half = [np.split(np.asarray(x), 2)[shard] if s == P("x") else x for x, s in zip(call, specs)]
            parts.append(mla_jax.decode(*half)[1])
        np.testing.assert_allclose(np.asarray(lse), np.concatenate(parts), rtol=1e-4)
        if not device.interpreting() and jax_triton_compat.available():
            with mla_jax.device_facts("NVIDIA H200"):
                lowered = jax.jit(f).trace(*call).lower(lowering_platforms=("cuda",))
            assert len(kernel_calls(lowered)) > 1
print("done")
"""
    flags = "--xla_force_host_platform_device_count=2"
    assert in_fresh_process(code, TRITON_INTERPRET=tier, XLA_FLAGS=flags) == "done"


@pytest.mark.interpret
def test_threads_with_a_large_cache():
    """A callback never waits for the threads that XLA runs it on."""
    call = dense(b=1, h_q=1, page_size=64, pages=200)
    function, arrays = jitted(call)
    expected = function(arrays)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: jax.block_until_ready(function({**arrays, "q": arrays["q"]})), range(8)):
            assert_same_bits(result, expected)


def test_public_names():
    for name in ("decode", "explain", "device_facts", "quantize_cache", "dequantize_cache", "decode_reference", "token_slots"):
        assert name in mla_jax.__all__
        assert callable(getattr(mla_jax, name))
