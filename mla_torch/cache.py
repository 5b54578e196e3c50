"""Making, reading and unmaking quantised KV caches.

`decode_rows` is the one place in the PyTorch front end that turns stored bytes into numbers; the reference decodes
through it.
"""

from __future__ import annotations

import torch

from mla_kernels.cache_problem import DEQUANTISED_DTYPES, check_dequantize, check_quantize
from mla_kernels.formats import CacheFormat
from mla_kernels.problem import CacheSpec, TensorSpec

from .tensors import check_tensors, float_dtype, full_spec

E4M3_MAX = 448.0
MIN_SCALE_EXPONENT = -13  # ceil(log2(1e-4))
MIN_SCALE = 2.0**-100  # of an unrounded scale: a zero tile divides by it
CHUNK_VALUES = 2**24  # values that are quantised or decoded at a time, to bound the fp32 temporaries


def decode_rows(
    kv_cache: torch.Tensor, spec: CacheSpec, page: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The latent rows of the given tokens as numbers.

    Reads those rows and nothing else of the cache, whatever its strides.

    Args:
      kv_cache: as `spec` describes it.
      page: int64 [n], each in `0 .. spec.num_pages - 1`.
      slot: int64 [n], each in `0 .. spec.page_size - 1`.
      dtype: of the result; values and scales are widened to it before they are multiplied.

    Returns:
      [n, h_kv, d_qk].
    """
    fmt = spec.format
    if not fmt.quantised:
        return kv_cache[page, slot].to(dtype)
    data, scales = (part[page, slot] for part in page_parts(kv_cache, spec))
    values = data[:, : fmt.d_nope].contiguous().view(torch.float8_e4m3fn).float().to(dtype)
    scale = _decode_scales(scales, fmt, dtype)
    values = (values.unflatten(1, (fmt.num_scales, fmt.scale_tile)) * scale[:, :, None]).flatten(1)
    rope = data[:, fmt.rope_offset : fmt.rope_offset + 2 * fmt.d_rope].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat([values, rope], 1)[:, None]


def _decode_scales(raw: torch.Tensor, fmt: CacheFormat, dtype: torch.dtype) -> torch.Tensor:
    """[n, scale_bytes] bytes -> [n, num_scales]."""
    if fmt.scale_dtype == "float32":
        return raw.contiguous().view(torch.float32).to(dtype)
    code = raw[:, : fmt.num_scales].to(torch.int64)
    # 2 ** (code - 127) from the bits of an fp64: an exp2 need not be exact, and 2**-127 is subnormal in fp32.
    power = ((code + (1023 - 127)) << 52).view(torch.float64)
    return torch.where(code == 255, torch.nan, power).to(dtype)


def quantize_cache(kv_cache: torch.Tensor, cache_format: str, *, power_of_two_scales: bool | None = None) -> torch.Tensor:
    """Quantises a paged latent cache.

    Each tile of values shares a scale `s = 2 ** ceil(log2(max(amax / 448, 1e-4)))`, computed exactly, and each value is
    stored as `e4m3(x / s)`, rounded to nearest even; the RoPE part is stored as bf16.  `amax` is over the finite values
    of the tile: a NaN or an infinity (e4m3 has none) is stored as NaN and leaves its neighbours alone; in the RoPE part
    an infinity stays one.

    Args:
      kv_cache: bf16, fp16 or fp32 [pages, page_size, 1, d_qk], with d_qk 576 for `v32_fp8` and 512 for `model1_fp8`.
      cache_format: `"v32_fp8"` or `"model1_fp8"`.
      power_of_two_scales: False (only `v32_fp8`) stores unrounded scales `max(amax / 448, 2**-100)`.  None means True.

    Returns:
      uint8 [pages, page_size, 1, 656] for `v32_fp8`; for `model1_fp8` [pages, page_size, 1, 584], a view of pages that
      are padded with zeros to a multiple of 576 bytes (its page stride).

    Raises:
      ValueError: a wrong type, shape, dtype or combination; the message names the argument.
      NotImplementedError: a format that is reserved but not built.
    """
    fmt, power_of_two = check_quantize(_spec("quantize_cache", kv_cache), cache_format, power_of_two_scales)
    pages, size = kv_cache.shape[:2]
    storage = torch.zeros((pages, fmt.page_bytes(size)), dtype=torch.uint8, device=kv_cache.device)
    data = storage[:, : size * fmt.row_bytes].unflatten(1, (size, fmt.row_bytes))
    if fmt.scale_in_page:
        scales = storage[:, size * fmt.row_bytes : size * fmt.token_bytes].unflatten(1, (size, fmt.scale_bytes))
    else:
        scales = data[:, :, fmt.scale_offset : fmt.scale_offset + fmt.scale_bytes]
    step = max(1, CHUNK_VALUES // (size * kv_cache.shape[3]))
    for first in range(0, pages, step):
        part = slice(first, first + step)
        x = kv_cache[part, :, 0]
        codes, scale, rope = encode_rows(x[..., : fmt.d_nope], x[..., fmt.d_nope :], fmt, power_of_two)
        data[part, :, : fmt.d_nope] = codes
        data[part, :, fmt.rope_offset : fmt.rope_offset + 2 * fmt.d_rope] = rope
        scales[part, :, : scale.shape[-1]] = scale
    # Not `unflatten`, which gives a single page another stride.
    token = fmt.token_bytes
    return storage.as_strided((pages, size, 1, token), (fmt.page_bytes(size), token, token, 1))


def encode_rows(
    latent: torch.Tensor, rope: torch.Tensor, fmt: CacheFormat, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of rows [..., d_nope] and [..., d_rope] in a quantised format.

    Returns:
      uint8 codes [..., d_nope], scales [..., bytes without padding] and RoPE parts [..., 2 * d_rope].
    """
    codes, scale = _quantize_tiles(latent.float().unflatten(-1, (-1, fmt.scale_tile)), power_of_two)
    if fmt.scale_dtype == "float32":
        scales = scale.view(torch.uint8)
    else:
        scales = (scale.view(torch.int32) >> 23).to(torch.uint8)
    rope = rope.to(torch.bfloat16)
    rope = torch.where(rope.isnan(), torch.nan, rope)
    return codes.flatten(-2), scales, rope.contiguous().view(torch.uint8)


def page_parts(kv_cache: torch.Tensor, spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a quantised cache as bytes: rows [pages, page_size, row_bytes] and scales [pages, page_size, scale_bytes]."""
    fmt = spec.format
    raw = kv_cache.view(torch.uint8)
    if not fmt.scale_in_page:
        data = raw[:, :, 0]
        return data, data[..., fmt.scale_offset : fmt.scale_offset + fmt.scale_bytes]
    # The token dimension of the 4-D view has no meaning of its own here: a page is laid out as a whole.
    pages, size, start = spec.num_pages, spec.page_size, raw.storage_offset()
    data = raw.as_strided((pages, size, fmt.row_bytes), (spec.page_stride, fmt.row_bytes, 1), start)
    start += size * fmt.row_bytes
    return data, raw.as_strided((pages, size, fmt.scale_bytes), (spec.page_stride, fmt.scale_bytes, 1), start)


def _quantize_tiles(x: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., tiles, tile] -> e4m3 codes as uint8 of the same shape, fp32 scales [..., tiles]."""
    finite = x.isfinite()
    amax = torch.where(finite, x.abs(), 0.0).amax(-1)
    if power_of_two:
        # amax = 1.m * 2**e and 448 = 1.75 * 2**8: the quotient's log2, rounded up, without a rounding on the way.
        bits = amax.view(torch.int32)
        exponent = (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000).int()
        exponent = exponent.clamp(min=MIN_SCALE_EXPONENT)
        scale = ((exponent + 127) << 23).view(torch.float32)
    else:
        # By a tensor: CUDA divides by a Python number through its rounded reciprocal.
        scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=MIN_SCALE)
    codes = (x / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(finite, codes, 0x7F), scale


def dequantize_cache(
    kv_cache: torch.Tensor, cache_format: str, *, page_size: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The numbers that a quantised cache holds.

    Args:
      kv_cache: bytes (uint8, int8 or float8_e4m3fn), [pages, page_size, 1, bytes of a token] with any page stride, or,
        for `model1_fp8`, [pages, page_bytes].
      cache_format: `"v32_fp8"` or `"model1_fp8"`.
      page_size: tokens per page; needed for [pages, page_bytes].
      dtype: of the result: bf16, fp16, fp32 or fp64.  Value times scale is computed in fp32 (fp64 if that is `dtype`) and
        rounded once.

    Returns:
      [pages, page_size, 1, d_qk].

    Raises:
      ValueError: a wrong type, shape, dtype or combination; the message names the argument.
      NotImplementedError: a format that is reserved but not built.
    """
    spec = check_dequantize(_spec("dequantize_cache", kv_cache), cache_format, page_size)
    d_qk = spec.format.d_qk
    assert d_qk is not None
    dtype = float_dtype(dtype, DEQUANTISED_DTYPES)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.empty((spec.num_slots, 1, d_qk), dtype=dtype, device=kv_cache.device)
    step = max(1, CHUNK_VALUES // d_qk)
    for first in range(0, spec.num_slots, step):
        token = torch.arange(first, min(first + step, spec.num_slots), device=kv_cache.device)
        rows[first : first + step] = decode_rows(kv_cache, spec, token // spec.page_size, token % spec.page_size, wide)
    return rows.unflatten(0, (spec.num_pages, spec.page_size))


def _spec(function: str, kv_cache: torch.Tensor) -> TensorSpec:
    (spec,) = check_tensors(function, {"kv_cache": kv_cache}, ("kv_cache",))
    assert spec is not None
    return full_spec(spec)
