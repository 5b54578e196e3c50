"""What only one of the references has to keep, and the judge itself."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.arg_specs import ArgSpec
from tests.inputs import make_inputs
from tests.judge import assert_close, judge, to_numpy
from tests.test_reference import FORMATS, WIDTH, convert, dense_call, run, run_numpy

BF16 = ml_dtypes.bfloat16


class TestTorch:
    @pytest.fixture(autouse=True)
    def _needs_torch(self) -> None:
        pytest.importorskip("torch", reason="PyTorch is not installed")

    @pytest.mark.parametrize("fmt", ["bf16", "v32_fp8", "model1_fp8"])
    def test_offsets_above_2_31(self, fmt: str) -> None:
        """Pages more than 2**31 elements and 4 GiB into a cache, of which only the used pages are ever touched."""
        import torch

        token = {"bf16": 576, "v32_fp8": 656, "model1_fp8": 584}[fmt]
        dtype = torch.bfloat16 if fmt == "bf16" else torch.uint8
        pages, size = 5 * 2**30 // (64 * token), 64
        cache = torch.empty((pages, size, 1, token), dtype=dtype)
        rng = np.random.default_rng(9)
        small = make_inputs(ArgSpec(format=fmt, d_qk=WIDTH[fmt], length=3 * 64, h_q=2))
        call, own = small.to_torch(), torch.from_numpy(rng.choice(np.arange(pages * 9 // 10, pages), 3, replace=False))
        cache[own] = call["kv_cache"][call["block_table"][0, :3].long()]
        expected = run("torch", call)
        out, lse = run("torch", call | {"kv_cache": cache, "block_table": own.int()[None]})
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        del call["block_table"], call["cache_seqlens"]
        indices = (own[:, None] * size + torch.arange(size)).reshape(1, 1, -1).int()
        out, lse = run("torch", call | {"kv_cache": cache, "indices": indices})
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_no_copy_of_the_cache(self, fmt: str) -> None:
        """No operation makes a tensor nearly as large as the cache, which is an interleaved view."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        largest = 0

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal largest
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor) and not func.is_view:
                    largest = max(largest, result.untyped_storage().nbytes())
                return result

        call = make_inputs(ArgSpec(format=fmt, d_qk=WIDTH[fmt], length=64, batch=2, layout="interleaved")).to_torch()
        cache = call["kv_cache"]
        grown = cache.new_zeros((400, 2, *cache.shape[1:]))
        if fmt == "model1_fp8":
            grown = cache.new_zeros((800, 37440))[:, : 64 * 584].unflatten(1, (64, 1, 584)).unflatten(0, (400, 2))
        view = grown[:, 1]
        view[: len(cache)] = cache
        expected = run("torch", call)
        with Watch():
            out, lse = run("torch", call | {"kv_cache": view})
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        assert 0 < largest < view.numel() * view.element_size() // 4

    def test_fp64_queries(self) -> None:
        import torch

        rng = np.random.default_rng(10)
        call = dense_call(rng, [70, 20])
        call |= {name: rng.standard_normal(call[name].shape) for name in ("q", "kv_cache")}
        call["softmax_scale"] = torch.tensor(0.05, dtype=torch.float64)
        out, lse = run_numpy("torch", call)
        assert out.dtype == lse.dtype == np.float64
        assert_close(out, lse, judge(call))

    def test_rows_are_found_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        import mla_torch.reference

        call = make_inputs(ArgSpec(batch=4, s_q=3, length=100, lengths="ragged", causal=True)).to_torch()
        out, lse = run("torch", call, dtype=torch.float64)
        monkeypatch.setattr(mla_torch.reference, "CHUNK_VALUES", 5 * 100 * 576)
        part, lse_part = run("torch", call, dtype=torch.float64)
        torch.testing.assert_close(out, part, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, lse_part, rtol=1e-12, atol=1e-12)


class TestJax:
    @pytest.fixture(autouse=True)
    def _needs_jax(self) -> None:
        pytest.importorskip("jax", reason="JAX is not installed")

    @pytest.mark.parametrize("fmt", ["bf16", "model1_fp8"])
    def test_jit_and_scan(self, fmt: str) -> None:
        """Under jit and scan the result is that of eager calls, to the bit."""
        import jax
        import jax.numpy as jnp

        from mla_jax.reference import decode_reference

        call = make_inputs(ArgSpec(format=fmt, d_qk=WIDTH[fmt], batch=2, length=70, sink="finite")).to_jax()
        call.pop("num_splits")
        options = {name: call.pop(name) for name in ("causal", "page_size", "cache_format") if name in call}
        steps = jnp.array([[0, 1], [70, 64], [3, 65], [-2, 1000]], jnp.int32)
        eager = [decode_reference(**call | {"cache_seqlens": lengths}, **options) for lengths in steps]

        def step(call: dict[str, Any], lengths: Any) -> tuple[Any, Any]:
            return call, decode_reference(**call | {"cache_seqlens": lengths}, **options)

        out, lse = jax.jit(lambda call, steps: jax.lax.scan(step, call, steps)[1])(call, steps)
        jitted = jax.jit(lambda call: decode_reference(**call, **options))
        for i, (eager_out, eager_lse) in enumerate(eager):
            jit_out, jit_lse = jitted(call | {"cache_seqlens": steps[i]})
            for got in (out[i], jit_out):
                np.testing.assert_array_equal(to_numpy(got).view(np.uint16), to_numpy(eager_out).view(np.uint16))
            for got in (lse[i], jit_lse):
                np.testing.assert_array_equal(got, eager_lse)
        assert jitted._cache_size() == 1

    def test_new_values_compile_nothing(self) -> None:
        """Scales, lengths and tables of an eager call."""
        from mla_jax import reference

        call = dense_call(np.random.default_rng(11), [30, 9], s_q=1, h_q=7)
        run_numpy("jax", call | {"softmax_scale": 0.1})
        compiled = reference._decode._cache_size()
        for scale in (0.2, 1, np.float32(0.3), None):
            call["cache_seqlens"] = call["cache_seqlens"] - 3
            call["block_table"] = call["block_table"][::-1].copy()
            call["softmax_scale"] = scale
            assert_close(*run_numpy("jax", call), judge(call))
        assert reference._decode._cache_size() == compiled

    def test_vmap(self) -> None:
        import jax

        from mla_jax.reference import decode_reference

        call = {name: convert("jax", x) for name, x in dense_call(np.random.default_rng(12), [30, 9, 0, 16]).items()}
        cache = call.pop("kv_cache")
        plain = decode_reference(kv_cache=cache, **call)
        split = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in call.items()}
        out, lse = jax.vmap(lambda call: decode_reference(kv_cache=cache, **call))(split)
        assert_close(out.reshape(plain[0].shape), lse.reshape(plain[1].shape), judge(call | {"kv_cache": cache}))

    def test_no_copy_of_the_cache(self) -> None:
        """The compiled program holds nothing as large as the cache besides its operand."""
        import jax
        import jax.numpy as jnp

        from mla_jax.reference import decode_reference

        for cache in (
            jax.ShapeDtypeStruct((2000, 64 * 584 + 64), jnp.int8),
            jax.ShapeDtypeStruct((2000, 64, 1, 656), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((1000, 64, 1, 512), jnp.bfloat16),
            jax.ShapeDtypeStruct((1000, 64, 1, 512), jnp.float16),
        ):
            args = [
                jax.ShapeDtypeStruct(
                    (1, 1, 2, 576 if cache.shape[-1] == 656 else 512),
                    jnp.bfloat16 if cache.dtype.itemsize == 1 else cache.dtype,
                ),
                cache,
                jax.ShapeDtypeStruct((1, 8), jnp.int32),
                jax.ShapeDtypeStruct((1,), jnp.int32),
            ]
            options = {"page_size": 64} if len(cache.shape) == 2 else {}
            memory = jax.jit(lambda *args, options=options: decode_reference(*args, **options)).lower(*args).compile()
            assert memory.memory_analysis().temp_size_in_bytes < cache.size * cache.dtype.itemsize // 4

    def test_fp64(self) -> None:
        import jax
        import jax.numpy as jnp

        inputs = make_inputs(ArgSpec(format="v32_fp8", scales="arbitrary", batch=2, length=70, sink="finite"))
        with pytest.raises(ValueError, match="jax_enable_x64"):
            run("jax", inputs.to_jax(), dtype=jnp.float64)
        jax.config.update("jax_enable_x64", True)
        try:
            out, lse = run("jax", inputs.to_jax(), dtype=jnp.float64)
        finally:
            jax.config.update("jax_enable_x64", False)
        assert out.dtype == lse.dtype == np.float64
        assert_close(out, lse, judge(inputs.as_call()))

    def test_errors_while_tracing(self) -> None:
        import jax

        from mla_jax.reference import decode_reference

        call = {name: convert("jax", x) for name, x in dense_call(np.random.default_rng(13), [5]).items()}
        call["cache_seqlens"] = call["cache_seqlens"][:, None]
        with pytest.raises(ValueError, match="cache_seqlens: expected int32"):
            jax.eval_shape(lambda call: decode_reference(**call), call)


class TestJudge:
    """The judge itself, on calls whose answer is known, and its bounds."""

    def test_by_hand(self) -> None:
        cache = np.zeros((1, 4, 1, 2), BF16)
        cache[0, :, 0] = [[0, 1], [np.log(3), 5], [np.nan, np.nan], [0, 0]]
        call = {"q": np.ones((1, 1, 1, 2), BF16), "kv_cache": cache, "indices": np.array([[[0, -1, 3, 4]]], np.int32)}
        call |= {"softmax_scale": 1.0, "head_dim_v": 2}
        got = judge(call)
        p = np.e / (np.e + 1)
        np.testing.assert_allclose(got.out[0, 0, 0], [0, p], rtol=1e-12)
        np.testing.assert_allclose(got.lse[0, 0, 0], np.log(np.e + 1), rtol=1e-12)
        got = judge(call | {"attn_sink": np.array([np.log(np.e + 1)], np.float32)})
        np.testing.assert_allclose(got.out[0, 0, 0], [0, p / 2], rtol=1e-6)
        np.testing.assert_allclose(got.lse[0, 0, 0], np.log(np.e + 1), rtol=1e-12)

    def test_bounds_are_kept(self) -> None:
        call = dense_call(np.random.default_rng(14), [60, 0])
        expected = judge(call)
        out, lse = expected.out.astype(BF16), expected.lse.astype(np.float32)
        assert_close(out, lse, expected)

        def changed(x: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
            x = x.copy()
            x[at] = value
            return x

        spread = expected.spread[0, 0, 0, 0]
        for wrong_out, wrong_lse, message in (
            (changed(out, (0, 0, 0, 0), expected.out[0, 0, 0, 0] + 0.02 * spread), lse, "out, finite part"),
            (changed(out, (1, 0, 0, 0), 1e-30), lse, "without a key"),
            (changed(out, (0, 0, 0, 3), np.nan), lse, "NaN"),
            (out, changed(lse, (1, 0, 0), 3.0), "inf"),
            (out, changed(lse, (1, 0, 0), -np.inf), "inf"),
            (out, changed(lse, (0, 1, 0), lse[0, 1, 0] * 1.01), "lse, finite part"),
            ((expected.out * 1.005).astype(np.float32), lse, "cosine difference"),
        ):
            with pytest.raises(AssertionError, match=message):
                assert_close(wrong_out, wrong_lse, expected, dtype="bfloat16")
