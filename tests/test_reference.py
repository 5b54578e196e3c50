"""The references of both front ends against an independent fp64 judge, and against each other."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.arg_specs import ArgSpec, through_jax
from tests.inputs import jax_array, make_inputs
from tests.judge import assert_close, judge, to_fp64, to_numpy

FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("torch", "jax")
]
FORMATS = ("bf16", "fp16", "v32_fp8", "model1_fp8")
WIDTH = {"bf16": 576, "fp16": 576, "v32_fp8": 576, "model1_fp8": 512}
LENGTHS = (0, 1, 20, 64, 65, 140)
BF16 = ml_dtypes.bfloat16


def matrix() -> list[ArgSpec]:
    """Every format in every mode at every length, with the remaining factors dealt around."""
    sinks, kinds = ("none", "finite", "infinite"), ("equal", "ragged", "zeros", "wild")
    layouts, sizes = ("contiguous", "padded", "interleaved", "skewed"), (64, 16, 1, 53)
    index_kinds = ("plain", "holes", "out_of_range", "first64", "empty_rows")
    specs = []
    for f, fmt in enumerate(FORMATS):
        for m, mode in enumerate(("dense", "causal", "sparse", "extra")):
            for n, length in enumerate(LENGTHS):
                i = f + m + n
                spec = ArgSpec(
                    format=fmt,
                    d_qk=WIDTH[fmt],
                    batch=3,
                    s_q=3 if mode == "causal" else 1 + i % 2,
                    h_q=5,
                    page_size=sizes[(i + m) % 4],
                    length=length,
                    lengths=kinds[(i + n) % 4],
                    sink=sinks[i % 3],
                    causal=mode == "causal",
                    layout=layouts[i % 4],
                    scales="arbitrary" if fmt == "v32_fp8" and n % 2 else "pow2",
                    views=bool(n % 2),
                )
                if mode in ("sparse", "extra"):
                    spec = replace(
                        spec, topk=max(length, 1) + 7 * (n % 2), topk_length=bool(n % 3), index_kind=index_kinds[n % 5]
                    )
                if mode == "extra":
                    spec = replace(spec, extra=((32, 70, True) if n % 2 else (5, 33, False)))
                specs.append(spec)
    return specs


# Calls of a kind that has broken published kernels; ids as in a report.
CASES = {
    "nan-tail-of-a-small-page": ArgSpec(page_size=4, length=13),
    "batch-padded-with-empty-requests": ArgSpec(batch=5, length=70, lengths="zeros"),
    "arbitrary-scales-and-zero-tiles": ArgSpec(format="v32_fp8", scales="arbitrary", length=100, batch=2),
    "large-logits": ArgSpec(std=100.0, length=140, batch=2),
    "large-logits-and-sink": ArgSpec(std=100.0, length=140, sink="infinite", format="v32_fp8"),
    "published-deviation": ArgSpec(std=0.1, length=300, batch=2),
    "s_q-3": ArgSpec(s_q=3, length=40, causal=True, h_q=4),
    "s_q-5": ArgSpec(s_q=5, length=40, causal=True, h_q=4),
    "s_q-7-longer-than-the-request": ArgSpec(s_q=7, length=3, causal=True, h_q=4),
    "latent-256-rope-64": ArgSpec(d_qk=320, d_v=256, length=70),
    "latent-256-rope-32": ArgSpec(d_qk=288, d_v=256, length=70),
    "no-rope": ArgSpec(d_qk=512, d_v=512, length=70),
    "one-head": ArgSpec(h_q=1, length=70),
    "63-heads": ArgSpec(h_q=63, length=20),
    "126-heads": ArgSpec(h_q=126, length=20),
    "three-kv-heads": ArgSpec(h_q=12, h_kv=3, length=70, batch=2, layout="padded"),
    "three-kv-heads-causal": ArgSpec(h_q=12, h_kv=3, length=70, s_q=2, causal=True, sink="finite"),
    "page-2": ArgSpec(page_size=2, length=65),
    "page-61": ArgSpec(page_size=61, length=65, format="model1_fp8", d_qk=512),
    "page-576": ArgSpec(page_size=576, length=700, format="model1_fp8", d_qk=512, layout="interleaved"),
    "topk-1": ArgSpec(topk=1, length=40, batch=2),
    "topk-100-of-few-tokens": ArgSpec(topk=100, length=12, batch=2, format="model1_fp8", d_qk=512),
    "topk-2047": ArgSpec(topk=2047, length=1900, h_q=4),
    "many-blocks-of-keys": ArgSpec(length=1100, batch=2, lengths="ragged", h_q=4, sink="finite"),
    "many-blocks-in-two-caches": ArgSpec(
        format="v32_fp8", length=1100, topk=1100, topk_length=True, h_q=4, extra=(16, 600, True), index_kind="holes"
    ),
}


def run(framework: str, call: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    if framework == "torch":
        from mla_torch.reference import decode_reference
    else:
        from mla_jax.reference import decode_reference
    return decode_reference(**{name: x for name, x in call.items() if name != "num_splits"}, **options)


def convert(framework: str, x: Any) -> Any:
    """A numpy array as one of the framework, on the CPU; anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    if framework == "jax":
        return jax_array(x)
    import torch

    for name in ("bfloat16", "float8_e4m3fn"):
        if x.dtype == getattr(ml_dtypes, name):
            return torch.from_numpy(x.view({1: np.uint8, 2: np.int16}[x.itemsize])).view(getattr(torch, name))
    return torch.from_numpy(x)


def run_numpy(framework: str, call: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = run(framework, {name: convert(framework, x) for name, x in call.items()}, **options)
    return to_numpy(out), to_numpy(lse)


def check_spec(framework: str, spec: ArgSpec, **bounds: Any) -> None:
    inputs = make_inputs(spec)
    call = inputs.to_torch() if framework == "torch" else inputs.to_jax()
    expected = judge(inputs.as_call())
    out, lse = run(framework, call)
    assert to_numpy(out).dtype == inputs.q.dtype
    assert to_numpy(lse).dtype == np.float32
    assert_close(out, lse, expected, power_of_two_scales=spec.scales == "pow2", **bounds)
    lse = to_fp64(lse)[np.isfinite(expected.lse)]
    # A reference rounds nothing to 16 bits on the way, whatever the scales.
    assert np.all(np.abs(lse - expected.lse[np.isfinite(expected.lse)]) <= 1e-6 * np.maximum(1, expected.score_norm.max()))
    if framework == "torch":
        import torch

        out, lse = run("torch", call, dtype=torch.float64)
        assert out.dtype == lse.dtype == torch.float64
        assert_close(out, lse, expected)


@pytest.mark.parametrize("spec", matrix(), ids=lambda spec: spec.id)
def test_matrix_torch(spec: ArgSpec) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    check_spec("torch", spec)


def pairs_of_the_matrix() -> list[ArgSpec]:
    """A quarter: every format in every mode, and each length with every format and in every mode."""
    chosen = []
    for i, spec in enumerate(matrix()):
        fmt, mode, length = i // (4 * len(LENGTHS)), i // len(LENGTHS) % 4, i % len(LENGTHS)
        if mode == (fmt + length) % 4:
            chosen.append(spec)
    return chosen


# Each call is compiled.
@pytest.mark.parametrize("spec", through_jax(pairs_of_the_matrix()), ids=lambda spec: spec.id)
def test_matrix_jax(spec: ArgSpec) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    check_spec("jax", spec)


@pytest.mark.parametrize("name", CASES)
def test_cases_torch(name: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    check_spec("torch", CASES[name], published_bounds=CASES[name].std == 0.1)


@pytest.mark.parametrize("name", through_jax(CASES))
def test_cases_jax(name: str) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    check_spec("jax", CASES[name], published_bounds=CASES[name].std == 0.1)


def dense_call(rng: np.random.Generator, lengths: list[int], s_q: int = 1, h_q: int = 2, page_size: int = 8) -> dict[str, Any]:
    """A bf16 call whose requests own consecutive pages."""
    b, width = len(lengths), max(-(-max(lengths) // page_size), 1)
    return {
        "q": rng.standard_normal((b, s_q, h_q, 512)).astype(BF16),
        "kv_cache": rng.standard_normal((b * width, page_size, 1, 512)).astype(BF16),
        "block_table": np.arange(b * width, dtype=np.int32).reshape(b, width),
        "cache_seqlens": np.array(lengths, np.int32),
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_in_a_selected_key_reaches_its_own_rows_only(framework: str) -> None:
    call = dense_call(np.random.default_rng(0), [20, 20], s_q=3)
    call["causal"] = True
    call["kv_cache"][2, 3, 0, 9] = np.nan  # token 19 of 20 of request 0: seen by the last query alone
    out, lse = run_numpy(framework, call)
    assert_close(out, lse, judge(call))
    assert np.isnan(out[0, 2].astype(np.float32)).all()
    assert np.isfinite(out[0, :2].astype(np.float32)).all()
    assert np.isfinite(out[1].astype(np.float32)).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("byte_dtype", ["uint8", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("fmt", ["v32_fp8", "model1_fp8"])
def test_bytes_of_any_type_and_value(framework: str, fmt: str, byte_dtype: str) -> None:
    """All byte values, NaN codes among them, so that a conversion on the way would show."""
    rng = np.random.default_rng(1)
    token_bytes, d_qk = (656, 576) if fmt == "v32_fp8" else (584, 512)
    cache = rng.integers(0, 256, (4, 16, 1, token_bytes)).astype(np.uint8)
    call = {
        "q": rng.standard_normal((1, 32, 2, d_qk)).astype(BF16),
        "kv_cache": cache.view(getattr(ml_dtypes, byte_dtype) if byte_dtype.startswith("float8") else byte_dtype),
        "indices": np.arange(32, dtype=np.int32).reshape(1, 32, 1),  # one key a row: V comes out as it is stored
        "softmax_scale": 0.0,
    }
    expected = judge(call).out
    out, _ = run_numpy(framework, call)
    fits = np.abs(expected) < 3e38
    np.testing.assert_array_equal(
        out[fits].astype(np.float64), expected[fits].astype(np.float32).astype(BF16).astype(np.float64)
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_model1_pages_as_bytes(framework: str) -> None:
    """[pages, page_bytes] with page sizes of its own for each cache."""
    rng = np.random.default_rng(2)
    inputs = make_inputs(
        ArgSpec(format="model1_fp8", d_qk=512, topk=40, length=40, page_size=16, extra=(5, 20, False), batch=2)
    )
    call = inputs.as_call()
    call["kv_cache"], call["extra_kv_cache"] = (
        np.ascontiguousarray(scope.cache.pages()) for scope in (inputs.main, inputs.extra) if scope is not None
    )
    call |= {"page_size": (16, 5), "cache_format": "model1_fp8", "softmax_scale": float(rng.uniform(0.01, 0.1))}
    assert_close(*run_numpy(framework, call), judge(call))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_empty_calls(framework: str) -> None:
    rng = np.random.default_rng(3)
    call = dense_call(rng, [5, 5])
    for b, s_q in ((0, 1), (2, 0)):
        part = call | {
            "q": call["q"][:b, :s_q],
            "block_table": call["block_table"][:b],
            "cache_seqlens": call["cache_seqlens"][:b],
        }
        out, lse = run_numpy(framework, part)
        assert out.shape == (b, s_q, 2, 512)
        assert lse.shape == (b, 2, s_q)
    no_pages = {"kv_cache": call["kv_cache"][:0], "q": call["q"], "attn_sink": np.array([np.inf, 0], np.float32)}
    for table in (
        {"indices": np.array([[[0, -1, 3]], [[7, 7, 7]]], np.int32)},
        {"block_table": np.zeros((2, 0), np.int32), "cache_seqlens": np.array([3, 0], np.int32)},
        {"block_table": np.full((2, 3), -1, np.int32), "cache_seqlens": np.array([0, -4], np.int32)},
        {"block_table": np.zeros((2, 3), np.int32), "cache_seqlens": np.array([3, 100], np.int32)},
    ):
        out, lse = run_numpy(framework, no_pages | table)
        assert not out.astype(np.float32).any()
        assert np.isposinf(lse).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("sink", [-np.inf, np.inf, -100.0, 100.0, 0.5])
def test_sink(framework: str, sink: float) -> None:
    call = dense_call(np.random.default_rng(4), [30, 0])
    call["q"] = (call["q"].astype(np.float32) * 60).astype(BF16)  # logits far above 88
    plain, lse = run_numpy(framework, call)
    call["attn_sink"] = np.array([sink, -np.inf], np.float32)
    out, lse_with_sink = run_numpy(framework, call)
    assert_close(out, lse_with_sink, judge(call))
    np.testing.assert_array_equal(lse, lse_with_sink)
    np.testing.assert_array_equal(out[:, :, 1], plain[:, :, 1])
    if sink == np.inf:
        assert not out[:, :, 0].astype(np.float32).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_many_rows(framework: str) -> None:
    """b * s_q above 65,535."""
    rng = np.random.default_rng(5)
    b, s_q, d = 8193, 8, 64
    cache = rng.standard_normal((4, 4, 1, d)).astype(BF16)
    call = {
        "q": rng.standard_normal((b, s_q, 1, d)).astype(BF16),
        "kv_cache": cache,
        "indices": rng.integers(-1, 16, (b, s_q, 2)).astype(np.int32),
        "head_dim_v": d,
    }
    out, lse = run_numpy(framework, call)
    picked = np.array([0, 1, 4095, 4096, 8191, 8192])
    part = call | {"q": call["q"][picked], "indices": call["indices"][picked]}
    assert_close(out[picked], lse[picked], judge(part))
    assert (np.isposinf(lse[:, 0]) == (call["indices"] < 0).all(-1)).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_fp32_queries_and_cache(framework: str, sparse: bool) -> None:
    rng = np.random.default_rng(6)
    call = dense_call(rng, [70, 20], s_q=2)
    if sparse:
        del call["block_table"], call["cache_seqlens"]
        call["indices"] = rng.integers(-1, 16, (2, 2, 30)).astype(np.int32)
    call |= {name: rng.standard_normal(call[name].shape).astype(np.float32) for name in ("q", "kv_cache")}
    out, lse = run_numpy(framework, call)
    assert out.dtype == np.float32
    assert_close(out, lse, judge(call))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_errors(framework: str) -> None:
    call = dense_call(np.random.default_rng(7), [5])
    with pytest.raises(ValueError, match="kv_cache: expected the dtype of q"):
        run_numpy(framework, call | {"q": call["q"].astype(np.float32)})
    with pytest.raises(ValueError, match="kv_cache: expected float16"):
        run_numpy(framework, call | {"q": call["q"].astype(np.float16)}, cache_format="fp16")
    with pytest.raises(ValueError, match="block_table: does not go with indices"):
        run_numpy(framework, call | {"indices": np.zeros((1, 1, 3), np.int32)})
    with pytest.raises(ValueError, match="dtype: expected"):
        run_numpy(framework, call, dtype=convert(framework, call["q"]).dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *((name, [1, 2]) for name in ("q", "kv_cache", "block_table", "cache_seqlens", "attn_sink")),
        *((name, None) for name in ("q", "kv_cache")),
        *(("softmax_scale", scale) for scale in ("x", True, np.ones(2, np.float32), np.ones(1, np.int32), 10**400, np.nan)),
        ("dtype", "x"),
        ("dtype", None),
        ("cache_format", ["bf16"]),
    ],
)
def test_wrong_arguments_are_named_as_by_decode(framework: str, argument: str, value: Any) -> None:
    call = dense_call(np.random.default_rng(7), [5]) | {argument: value}
    with pytest.raises(ValueError, match=f"^{argument}: expected "):
        run(framework, {name: convert(framework, x) for name, x in call.items()})


def test_derivatives_and_other_devices_are_refused_by_the_torch_reference() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = {name: convert("torch", x) for name, x in dense_call(np.random.default_rng(7), [5]).items()}
    with pytest.raises(ValueError, match=r"^block_table: expected device cpu, as q has, got meta"):
        run("torch", call | {"block_table": call["block_table"].to("meta")})
    with pytest.raises(ValueError, match=r"^q: requires a gradient; decode_reference is forward-only"):
        run("torch", call | {"q": call["q"].clone().requires_grad_()})
    with pytest.raises(ValueError, match=r"^q: belongs to a transform of torch.func"):
        torch.func.grad(lambda q: run("torch", call | {"q": q})[0].sum())(call["q"])


def test_front_ends_agree() -> None:
    """Both references in fp32 on one set of bytes, far closer than 16-bit bounds."""
    pytest.importorskip("torch", reason="compares with PyTorch")
    pytest.importorskip("jax", reason="compares with JAX")
    rng = np.random.default_rng(8)
    call = dense_call(rng, [140, 65, 0, 1], s_q=2, h_q=3)
    call |= {name: call[name].astype(np.float32) for name in ("q", "kv_cache")}
    call |= {"causal": True, "attn_sink": rng.standard_normal(3).astype(np.float32)}
    (out, lse), (jax_out, jax_lse) = run_numpy("torch", call), run_numpy("jax", call)
    np.testing.assert_allclose(out, jax_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, jax_lse, rtol=1e-6, atol=1e-6)
