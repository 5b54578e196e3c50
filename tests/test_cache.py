"""Quantised caches: what the helpers of both front ends write, byte for byte, and what they read back."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.inputs import jax_array
from tests.judge import to_numpy

FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("torch", "jax")
]
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
NAN_CODE = 0x7F
D_QK = {"v32_fp8": 576, "model1_fp8": 512}
SCALES = [("v32_fp8", None), ("v32_fp8", True), ("v32_fp8", False), ("model1_fp8", None)]
SCALES_IDS = ["v32_fp8", "v32_fp8-pow2", "v32_fp8-unrounded", "model1_fp8"]


def convert(framework: str, x: np.ndarray) -> Any:
    if framework == "jax":
        return jax_array(x)
    import torch

    if x.dtype in (BF16, E4M3):
        bits = x.view(np.int16 if x.dtype == BF16 else np.uint8)
        return torch.from_numpy(bits).view(torch.bfloat16 if x.dtype == BF16 else torch.float8_e4m3fn)
    return torch.from_numpy(x)


def helpers(framework: str) -> Any:
    if framework == "torch":
        import mla_torch.cache as module
    else:
        import mla_jax.cache as module
    return module


def page_bytes(fmt: str, page_size: int) -> int:
    return page_size * 656 if fmt == "v32_fp8" else -(-page_size * 584 // 576) * 576


def quantize(framework: str, x: np.ndarray, fmt: str, power_of_two: bool | None = None) -> np.ndarray:
    """Bytes [pages, page_bytes]."""
    cache = helpers(framework).quantize_cache(convert(framework, x), fmt, power_of_two_scales=power_of_two)
    if framework == "torch" and fmt == "model1_fp8":
        cache = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
    return to_numpy(cache).reshape(len(x), -1)


def dequantize(framework: str, raw: np.ndarray, fmt: str, page_size: int, dtype: str = "float32") -> np.ndarray:
    """From bytes [pages, page_bytes]."""
    if fmt == "v32_fp8":
        raw = raw.reshape(len(raw), page_size, 1, 656)
    if framework == "torch":
        import torch as dtypes
    else:
        import jax.numpy as dtypes
    options = {"page_size": page_size, "dtype": getattr(dtypes, dtype)}
    return to_numpy(helpers(framework).dequantize_cache(convert(framework, raw), fmt, **options))


def expected_bytes(x: np.ndarray, fmt: str, power_of_two: bool | None) -> np.ndarray:
    """The definition in numpy and exact fractions, a tile at a time: bytes [pages, page_bytes]."""
    pages, page_size = x.shape[:2]
    tile, d_nope = (128, 512) if fmt == "v32_fp8" else (64, 448)
    raw = np.zeros((pages, page_bytes(fmt, page_size)), np.uint8)
    for page in range(pages):
        for slot in range(page_size):
            row = x[page, slot, 0]
            codes, scales = [], []
            for part in row[:d_nope].astype(np.float32).reshape(-1, tile):
                finite = np.isfinite(part)
                amax = np.abs(part[finite]).max(initial=np.float32(0))
                if power_of_two is False:
                    scale = max(amax / np.float32(448), np.float32(2.0**-100))
                else:
                    exponent = -13
                    while Fraction(2) ** exponent < Fraction(float(amax)) / 448:
                        exponent += 1
                    scale = np.float32(2.0**exponent)
                with np.errstate(invalid="ignore"):
                    code = (part / scale).astype(E4M3).view(np.uint8)
                codes.append(np.where(finite, code, NAN_CODE))
                scales.append(scale)
            rope = row[d_nope:].astype(BF16)
            rope = np.where(np.isnan(rope), np.array(np.nan, BF16), rope).astype(BF16)
            start = slot * (656 if fmt == "v32_fp8" else 576)
            data = raw[page, start:]
            data[:d_nope] = np.concatenate(codes)
            if fmt == "v32_fp8":
                data[512:528] = np.array(scales, "<f4").view(np.uint8)
                data[528:656] = rope.view(np.uint8)
            else:
                data[448:576] = rope.view(np.uint8)
                at = page_size * 576 + slot * 8
                raw[page, at : at + 7] = [int(np.log2(float(scale))) + 127 for scale in scales]
    return raw


def special_rows(fmt: str) -> np.ndarray:
    """fp32 [1, n, 1, d_qk]: tiles at the edges of the definition."""
    d_qk = D_QK[fmt]
    up, down = (
        (lambda x: np.nextafter(np.float32(x), np.float32(np.inf))),
        (lambda x: np.nextafter(np.float32(x), np.float32(0))),
    )
    amaxes = [0.0, 1e-38, 1e-30, 2.0**-13 * 448, up(2.0**-13 * 448), 1e-4 * 448, 448.0, up(448.0), down(448.0), 449.0, 3.3e38]
    amaxes += [np.finfo(np.float32).max, 1.75, up(1.75), down(1.75), 2.0**100 * 448, up(2.0**100 * 448), 2.0, 1.0]
    rows = np.random.default_rng(0).uniform(-1, 1, (len(amaxes) + 4, d_qk)).astype(np.float32)
    for row, amax in zip(rows, amaxes, strict=False):
        row *= np.float32(amax)
        row[::64] = amax
        row[1::64] = -np.float32(amax)
    rows[-4, ::64] = np.nan
    rows[-3, 5::64] = np.inf
    rows[-3, 6::64] = -np.inf
    rows[-2] = np.nan
    rows[-1] = -np.inf
    return rows[None, :, None]


def random_rows(fmt: str, pages: int, page_size: int, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(page_size)
    x = rng.standard_normal((pages, page_size, 1, D_QK[fmt])) * np.exp2(rng.integers(-12, 12, (pages, page_size, 1, 1)))
    return x.astype(dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("fmt", "power_of_two"), SCALES, ids=SCALES_IDS)
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
def test_quantize_is_byte_exact(framework: str, fmt: str, power_of_two: bool | None, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        x = random_rows(fmt, 2, 9, dtype)
        special = special_rows(fmt).astype(dtype)
    np.testing.assert_array_equal(quantize(framework, x, fmt, power_of_two), expected_bytes(x, fmt, power_of_two))
    np.testing.assert_array_equal(quantize(framework, special, fmt, power_of_two), expected_bytes(special, fmt, power_of_two))


@pytest.mark.parametrize(("fmt", "power_of_two"), SCALES, ids=SCALES_IDS)
def test_front_ends_write_the_same_bytes(fmt: str, power_of_two: bool | None) -> None:
    pytest.importorskip("torch", reason="compares with PyTorch")
    jax = pytest.importorskip("jax", reason="compares with JAX")
    import mla_jax.cache

    x = random_rows(fmt, 40, 64, np.float32)
    expected = quantize("torch", x, fmt, power_of_two)
    np.testing.assert_array_equal(quantize("jax", x, fmt, power_of_two), expected)
    jitted = jax.jit(lambda x: mla_jax.cache.quantize_cache(x, fmt, power_of_two_scales=power_of_two))
    np.testing.assert_array_equal(np.asarray(jitted(x)).reshape(40, -1), expected)
    for dtype in ("bfloat16", "float32"):
        bits = [dequantize(name, expected, fmt, 64, dtype).view(np.uint8) for name in ("torch", "jax")]
        np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("fmt", D_QK)
def test_dequantize_all_codes(framework: str, fmt: str) -> None:
    """All e4m3 codes, all E8M0 codes, and all bf16 patterns in the RoPE part, at one token each."""
    rng = np.random.default_rng(1)
    raw = np.zeros((32, page_bytes(fmt, 16)), np.uint8)
    scale_bits = rng.integers(0, 256, 512, dtype=np.uint8)
    scale_bits[:256] = np.arange(256)
    expected = np.empty((512, D_QK[fmt]))
    rope = np.concatenate([np.arange(2**15), np.arange(2**15)]).astype(np.uint16)[: 512 * 64].reshape(512, 64)
    rope[1::2] |= 0x8000
    tile = 128 if fmt == "v32_fp8" else 64
    d_nope = D_QK[fmt] - 64
    for token in range(512):
        page, slot = token // 16, token % 16
        codes = np.resize(rng.permutation(256).astype(np.uint8), d_nope)
        if fmt == "v32_fp8":
            scales = rng.standard_normal(4).astype(np.float32)
            scales[0] = 0.0
            data = raw[page, slot * 656 : slot * 656 + 656]
            data[512:528] = scales.view(np.uint8)
            data[528:] = rope[token].view(np.uint8)
        else:
            scale_codes = np.full(8, 127, np.uint8)
            scale_codes[token % 7] = scale_bits[token]
            scale_codes[7] = 255  # the padding byte
            raw[page, 16 * 576 + slot * 8 : 16 * 576 + slot * 8 + 8] = scale_codes
            scales = np.array([np.nan if code == 255 else 2.0 ** (int(code) - 127) for code in scale_codes[:7]])
            data = raw[page, slot * 576 : slot * 576 + 576]
            data[448:] = rope[token].view(np.uint8)
        data[:d_nope] = codes
        with np.errstate(invalid="ignore"):
            values = codes.view(E4M3).astype(np.float64) * np.repeat(scales.astype(np.float64), tile)
            expected[token] = np.concatenate([values, rope[token].view(BF16).astype(np.float64)])
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaN patterns
        got = dequantize(framework, raw, fmt, 16).reshape(512, -1).astype(np.float64)
        expected = expected.astype(np.float32).astype(np.float64)
    normal = ~(np.abs(expected) < 2.0**-126) | (expected == 0)  # XLA flushes subnormals
    np.testing.assert_array_equal(got[normal], expected[normal])
    assert np.all(np.abs(got[~normal]) < 2.0**-126)
    if framework == "torch":
        np.testing.assert_array_equal(got, expected)
        wide = dequantize(framework, raw, fmt, 16, "float64").reshape(512, -1)
        large = np.abs(wide) > 3.4e38
        np.testing.assert_array_equal(np.where(large, 0, wide).astype(np.float32), np.where(large, 0, expected))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("fmt", "power_of_two"), SCALES, ids=SCALES_IDS)
def test_round_trip(framework: str, fmt: str, power_of_two: bool | None) -> None:
    x = random_rows(fmt, 3, 5, BF16)
    got = dequantize(framework, quantize(framework, x, fmt, power_of_two), fmt, 5)
    assert got.shape == x.shape
    d_nope = D_QK[fmt] - 64
    tile = 128 if fmt == "v32_fp8" else 64
    x = x.astype(np.float32)
    amax = np.repeat(np.abs(x[..., :d_nope]).reshape(3, 5, 1, -1, tile).max(-1), tile, -1)
    # half a step of e4m3: 2**-4 of the value, or of the smallest normal 2**-6 at the largest scale that the tile may have
    bound = 2.0**-4 * np.abs(x[..., :d_nope]) + 2.0**-10 * np.maximum(2 * amax / 448, 2.0**-13)
    assert np.all(np.abs(got[..., :d_nope] - x[..., :d_nope]) <= bound)
    np.testing.assert_array_equal(got[..., d_nope:], x[..., d_nope:])
    # values on the grid of e4m3 come back as they are
    if power_of_two is not False:
        np.testing.assert_array_equal(dequantize(framework, quantize(framework, got, fmt), fmt, 5), got)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("page_size", [1, 2, 16, 53, 64, 72, 576])
def test_model1_pages(framework: str, page_size: int) -> None:
    x = random_rows("model1_fp8", 2, page_size, np.float16)
    cache = helpers(framework).quantize_cache(convert(framework, x), "model1_fp8")
    stride = page_bytes("model1_fp8", page_size)
    assert stride % 576 == 0
    assert 0 <= stride - page_size * 584 < 576
    if framework == "torch":
        assert cache.shape == (2, page_size, 1, 584)
        assert cache.stride()[0] == stride
        assert cache[:, :, 0].stride() == (stride, 584, 1)
        assert cache.untyped_storage().nbytes() == 2 * stride
        cache = cache.as_strided((2, stride), (stride, 1))
    raw = to_numpy(cache)
    assert raw.shape == (2, stride)
    assert not raw[:, page_size * 584 :].any()
    assert not raw[:, page_size * 576 : page_size * 584].reshape(2, page_size, 8)[:, :, 7].any()
    np.testing.assert_array_equal(
        dequantize(framework, raw, "model1_fp8", page_size),
        dequantize(framework, np.pad(raw, ((0, 0), (0, 100)), constant_values=255), "model1_fp8", page_size),
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("fmt", D_QK)
def test_byte_dtypes_and_unpadded_pages(framework: str, fmt: str) -> None:
    x = random_rows(fmt, 2, 4, BF16)
    raw = quantize(framework, x, fmt)[:, : 4 * (656 if fmt == "v32_fp8" else 584)]
    pages = np.ascontiguousarray(raw).reshape(2, 4, 1, -1)
    module = helpers(framework)
    expected = to_numpy(module.dequantize_cache(convert(framework, pages), fmt))
    assert expected.dtype == BF16
    for dtype in (np.int8, E4M3):
        got = to_numpy(module.dequantize_cache(convert(framework, pages.view(dtype)), fmt))
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("fmt", D_QK)
def test_no_pages(framework: str, fmt: str) -> None:
    module = helpers(framework)
    cache = module.quantize_cache(convert(framework, np.zeros((0, 4, 1, D_QK[fmt]), BF16)), fmt)
    back = module.dequantize_cache(cache, fmt, page_size=4)
    assert tuple(back.shape) == (0, 4, 1, D_QK[fmt])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_errors(framework: str) -> None:
    module = helpers(framework)
    x = convert(framework, np.zeros((2, 4, 1, 576), BF16))
    with pytest.raises(ValueError, match="cache_format: expected a quantised format"):
        module.quantize_cache(x, "bf16")
    with pytest.raises(ValueError, match="cache_format: expected one of"):
        module.quantize_cache(x, "v33")
    with pytest.raises(NotImplementedError, match="cache_format: 'v41_fp8'"):
        module.quantize_cache(x, "v41_fp8")
    with pytest.raises(ValueError, match=r"kv_cache: expected shape \[pages, page_size, 1, 512\]"):
        module.quantize_cache(x, "model1_fp8")
    with pytest.raises(ValueError, match="kv_cache: expected shape"):
        module.quantize_cache(x[:, :, 0], "v32_fp8")
    with pytest.raises(ValueError, match="kv_cache: expected bfloat16, float16 or float32"):
        module.quantize_cache(convert(framework, np.zeros((2, 4, 1, 576), np.int32)), "v32_fp8")
    with pytest.raises(ValueError, match="power_of_two_scales"):
        module.quantize_cache(x[..., :512], "model1_fp8", power_of_two_scales=False)
    with pytest.raises(ValueError, match="kv_cache: expected bytes"):
        module.dequantize_cache(x, "v32_fp8")
    with pytest.raises(ValueError, match="page_size: needed"):
        module.dequantize_cache(convert(framework, np.zeros((2, 2880), np.uint8)), "model1_fp8")


WRONG_SIZES = (0, -1, True, "4", 4.0, (4, None))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("function", "argument", "value"),
    [
        *(("dequantize_cache", "page_size", size) for size in WRONG_SIZES),
        *(("dequantize_cache", "dtype", dtype) for dtype in ("int32", "x", None)),
        *(("quantize_cache", "power_of_two_scales", scales) for scales in ("no", 0, 1)),
        *((name, "cache_format", fmt) for name in ("quantize_cache", "dequantize_cache") for fmt in (["v32_fp8"], None, 3)),
        *((name, "kv_cache", [1]) for name in ("quantize_cache", "dequantize_cache")),
    ],
)
def test_wrong_options_are_named(framework: str, function: str, argument: str, value: Any) -> None:
    dtype, width = (BF16, 576) if function == "quantize_cache" else (np.uint8, 656)
    call = {"kv_cache": convert(framework, np.zeros((2, 4, 1, width), dtype)), "cache_format": "v32_fp8"}
    if framework == "torch" and value == "int32":
        import torch

        value = torch.int32
    with pytest.raises(ValueError, match=f"^{argument}: "):
        getattr(helpers(framework), function)(**call | {argument: value})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_one_framework_has_and_the_other_has_not(framework: str) -> None:
    x = np.zeros((2, 4, 1, 576))
    with pytest.raises(ValueError, match=r"^kv_cache: expected bfloat16, float16 or float32, got float64"):
        helpers(framework).quantize_cache(x if framework == "jax" else convert(framework, x), "v32_fp8")
    if framework == "torch":
        with pytest.raises(ValueError, match=r"^kv_cache: expected a torch.Tensor, got numpy.ndarray"):
            helpers(framework).quantize_cache(x, "v32_fp8")
    else:
        with pytest.raises(ValueError, match=r"^dtype: float64 needs jax_enable_x64"):
            helpers(framework).dequantize_cache(np.zeros((2, 4, 1, 656), np.uint8), "v32_fp8", dtype="float64")


@pytest.mark.parametrize("fmt", D_QK)
def test_strided_caches_in_torch(fmt: str) -> None:
    """Reading an interleaved view and writing from one, in chunks of a page."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import mla_torch.cache as module

    x = torch.from_numpy(random_rows(fmt, 3, 6, np.float32))
    cache = module.quantize_cache(x, fmt)
    expected = module.dequantize_cache(cache, fmt)
    wide = torch.full((6, 6, 2, D_QK[fmt] + 3), torch.nan)
    view = wide[1::2, :, 1:, 1:-2]
    view.copy_(x)
    step, module.CHUNK_VALUES = module.CHUNK_VALUES, 1
    try:
        assert torch.equal(module.quantize_cache(view, fmt), cache)
        big = torch.full((3, 2 * cache.stride(0) + 4), 255, dtype=torch.uint8)
        size = cache[0].numel()
        strided = big[:, 4 : 4 + size].unflatten(1, tuple(cache.shape[1:]))
        strided.copy_(cache)
        assert torch.equal(module.dequantize_cache(strided, fmt), expected)
    finally:
        module.CHUNK_VALUES = step


class TestJaxCodes:
    @pytest.fixture(autouse=True)
    def _needs_jax(self) -> None:
        pytest.importorskip("jax", reason="JAX is not installed")

    def test_decode_e4m3(self) -> None:
        import jax

        from mla_jax.cache import decode_e4m3

        codes = np.arange(256, dtype=np.uint8)
        for decode in (decode_e4m3, jax.jit(decode_e4m3)):
            got = np.asarray(decode(codes))
            np.testing.assert_array_equal(got, codes.view(E4M3).astype(np.float32))
            np.testing.assert_array_equal(np.signbit(got), codes >= 128)

    def test_encode_e4m3(self) -> None:
        """Around every value, every midpoint between neighbours, and elsewhere."""
        import jax

        from mla_jax.cache import encode_e4m3

        grid = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
        points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, np.float32([2.0**-11, 2.0**-20])])
        near = [np.nextafter(points, np.float32(limit)) for limit in (np.inf, -np.inf)]
        inside = np.random.default_rng(2).uniform(-448, 448, 50000).astype(np.float32)
        small = np.random.default_rng(3).uniform(-(2.0**-5), 2.0**-5, 50000).astype(np.float32)
        x = np.concatenate([points, *near, inside, small, [463.9]]).astype(np.float32)
        x = np.concatenate([x, -x])
        expected = x.astype(E4M3).view(np.uint8)
        for encode in (encode_e4m3, jax.jit(encode_e4m3)):
            np.testing.assert_array_equal(np.asarray(encode(x)), expected)
            np.testing.assert_array_equal(np.asarray(encode(np.float32([np.nan, np.inf, -np.inf]))), [NAN_CODE] * 3)
