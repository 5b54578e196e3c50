"""Making, reading and unmaking quantised KV caches.

`decode_rows` is the one place in the JAX front end that turns stored bytes into numbers; the reference decodes through
it.  Codes are taken apart and put together bit by bit: conversions of XLA's backends may round twice, flush subnormals
or lose a NaN, integer arithmetic does not.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mla_kernels.cache_problem import DEQUANTISED_DTYPES, check_dequantize, check_quantize
from mla_kernels.formats import CacheFormat
from mla_kernels.problem import CacheSpec

from .specs import array_spec, float_dtype

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
MIN_SCALE_EXPONENT = -13  # ceil(log2(1e-4))
MIN_SCALE = 2.0**-100  # of an unrounded scale: a zero tile divides by it


def decode_e4m3(code: jax.Array) -> jax.Array:
    """uint8 codes -> fp32 values, exact for all 256 codes (0x7F and 0xFF are NaN)."""
    bits = code.astype(jnp.uint32)
    magnitude = bits & 0x7F
    normal = lax.bitcast_convert_type((magnitude << 20) + jnp.uint32(120 << 23), jnp.float32)
    subnormal = magnitude.astype(jnp.float32) * 2.0**-9
    value = jnp.where(magnitude < 8, subnormal, jnp.where(magnitude == E4M3_NAN, jnp.nan, normal))
    return jnp.where(bits >= 0x80, -value, value)


def encode_e4m3(x: jax.Array) -> jax.Array:
    """fp32 values of magnitude below 464 -> uint8 codes, rounded to nearest even; what is not finite becomes NaN, 0x7F."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    subnormal = jnp.round(lax.bitcast_convert_type(magnitude, jnp.float32) * 2.0**9)
    code = jnp.where(magnitude < (121 << 23), subnormal.astype(jnp.uint32), rounded - (120 << 3))
    code = code | ((bits >> 24) & 0x80)
    return jnp.where(jnp.isfinite(x), code, E4M3_NAN).astype(jnp.uint8)


def decode_rows(kv_cache: jax.Array, spec: CacheSpec, page: jax.Array, slot: jax.Array, dtype: Any) -> jax.Array:
    """The latent rows of the given tokens as numbers.

    Reads those rows and nothing else of the cache.

    Args:
      kv_cache: as `spec` describes it.
      page: int32 [n], each in `0 .. spec.num_pages - 1`.
      slot: int32 [n], each in `0 .. spec.page_size - 1`.
      dtype: of the result; values and scales are widened to it before they are multiplied.

    Returns:
      [n, h_kv, d_qk].
    """
    fmt = spec.format
    # XLA's CPU backend has no gather of narrow floats: it would widen the whole cache first.  Seen as unsigned integers it
    # is left where it is if that fuses with the gathers.  In a loop over keys XLA would take it out of the loop, and so copy
    # the cache, if the barrier did not tie it to the keys.
    stored = kv_cache.dtype
    bits = jnp.dtype(f"uint{8 * stored.itemsize}")
    if stored != bits:
        kv_cache, page, slot = lax.optimization_barrier((kv_cache, page, slot))
        kv_cache = lax.bitcast_convert_type(kv_cache, bits)
    if not fmt.quantised:
        return lax.bitcast_convert_type(kv_cache[page, slot], stored).astype(dtype)
    if fmt.scale_in_page:
        pages = kv_cache.reshape(spec.num_pages, math.prod(kv_cache.shape[1:]))
        data = _byte_runs(pages, page, slot * fmt.row_bytes, fmt.row_bytes)
        scales = _byte_runs(pages, page, slot * fmt.scale_bytes + spec.page_size * fmt.row_bytes, fmt.num_scales)
    else:
        data = kv_cache[page, slot, 0]
        scales = data[:, fmt.scale_offset : fmt.scale_offset + fmt.scale_bytes]
    values = decode_e4m3(data[:, : fmt.d_nope]).astype(dtype).reshape(-1, fmt.num_scales, fmt.scale_tile)
    if fmt.scale_dtype == "float32":
        scale = lax.bitcast_convert_type(scales.reshape(-1, fmt.num_scales, 4), jnp.float32).astype(dtype)
        values = values * scale[:, :, None]
    else:
        # 2**-127 (code 0) is subnormal in fp32, and XLA flushes those: it is applied as 2**-126 and a half.
        code = scales.astype(jnp.uint32)
        scale = lax.bitcast_convert_type(jnp.maximum(code, 1) << 23, jnp.float32)
        scale = jnp.where(code == 255, jnp.nan, scale).astype(dtype)
        values = values * jnp.where(code == 0, 0.5, 1.0).astype(dtype)[:, :, None] * scale[:, :, None]
    rope = data[:, fmt.rope_offset : fmt.rope_offset + 2 * fmt.d_rope].reshape(-1, fmt.d_rope, 2)
    rope = lax.bitcast_convert_type(rope, jnp.bfloat16).astype(dtype)
    return jnp.concatenate([values.reshape(-1, fmt.d_nope), rope], 1)[:, None]


def _byte_runs(pages: jax.Array, page: jax.Array, offset: jax.Array, size: int) -> jax.Array:
    """`size` bytes of a page from each offset: [n, size]."""
    return jax.vmap(lambda p, o: lax.dynamic_slice(pages, (p, o), (1, size))[0])(page, offset)


def quantize_cache(kv_cache: jax.Array, cache_format: str, *, power_of_two_scales: bool | None = None) -> jax.Array:
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
      uint8 [pages, page_size, 1, 656] for `v32_fp8`; [pages, page_bytes] for `model1_fp8`, each page padded with zeros
      to a multiple of 576 bytes (pass `page_size=` with it).

    Raises:
      ValueError: a wrong type, shape, dtype or combination; the message names the argument.
      NotImplementedError: a format that is reserved but not built.
    """
    fmt, power_of_two = check_quantize(array_spec("kv_cache", kv_cache), cache_format, power_of_two_scales)
    return _quantize(kv_cache, fmt, power_of_two)


@partial(jax.jit, static_argnums=(1, 2))
def _quantize(kv_cache: jax.Array, fmt: CacheFormat, power_of_two: bool) -> jax.Array:
    pages, size = kv_cache.shape[:2]
    x = kv_cache[:, :, 0]
    codes, scales, rope = encode_rows(x[..., : fmt.d_nope], x[..., fmt.d_nope :], fmt, power_of_two)
    if not fmt.scale_in_page:
        return jnp.concatenate([codes, scales, rope], -1)[:, :, None]
    exponents = jnp.pad(scales, ((0, 0), (0, 0), (0, fmt.scale_bytes - fmt.num_scales)))
    data = jnp.concatenate([codes, rope], -1).reshape(pages, size * fmt.row_bytes)
    page = jnp.concatenate([data, exponents.reshape(pages, size * fmt.scale_bytes)], -1)
    return jnp.pad(page, ((0, 0), (0, fmt.page_bytes(size) - size * fmt.token_bytes)))


def encode_rows(
    latent: jax.Array, rope: jax.Array, fmt: CacheFormat, power_of_two: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The bytes of rows [..., d_nope] and [..., d_rope] in a quantised format.

    Returns:
      uint8 codes [..., d_nope], scales [..., bytes without padding] and RoPE parts [..., 2 * d_rope].
    """
    rows = latent.shape[:-1]
    codes, scale = _quantize_tiles(latent.astype(jnp.float32).reshape(*rows, fmt.num_scales, fmt.scale_tile), power_of_two)
    if fmt.scale_dtype == "float32":
        scales = lax.bitcast_convert_type(scale, jnp.uint8).reshape(*rows, fmt.scale_bytes)
    else:
        scales = (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
    rope = rope.astype(jnp.bfloat16)
    rope = lax.bitcast_convert_type(jnp.where(jnp.isnan(rope), jnp.nan, rope), jnp.uint8).reshape(*rows, 2 * fmt.d_rope)
    return codes.reshape(*rows, fmt.d_nope), scales, rope


def _quantize_tiles(x: jax.Array, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """fp32 [..., tiles, tile] -> e4m3 codes as uint8 of the same shape, fp32 scales [..., tiles]."""
    amax = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0).max(-1)
    if power_of_two:
        # amax = 1.m * 2**e and 448 = 1.75 * 2**8: the quotient's log2, rounded up, without a rounding on the way.
        bits = lax.bitcast_convert_type(amax, jnp.int32)
        exponent = (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000)
        exponent = jnp.maximum(exponent, MIN_SCALE_EXPONENT)
        scale = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
        return encode_e4m3(x / scale[..., None]), scale
    scale = jnp.maximum(_divide(amax, jnp.float32(E4M3_MAX)), MIN_SCALE)
    return encode_e4m3(_divide(x, scale[..., None])), scale


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y for a y that is broadcast, which XLA would turn into a product with the rounded reciprocal of y."""
    return x / lax.optimization_barrier(jnp.broadcast_to(y, x.shape))


def dequantize_cache(
    kv_cache: jax.Array, cache_format: str, *, page_size: int | None = None, dtype: Any = jnp.bfloat16
) -> jax.Array:
    """The numbers that a quantised cache holds.

    Args:
      kv_cache: bytes (uint8, int8 or float8_e4m3fn), [pages, page_size, 1, bytes of a token] or, for `model1_fp8`,
        [pages, page_bytes].
      cache_format: `"v32_fp8"` or `"model1_fp8"`.
      page_size: tokens per page; needed for [pages, page_bytes].
      dtype: of the result: bf16, fp16, fp32, or fp64 where JAX has it enabled.  Value times scale is computed in fp32 (fp64 if
        that is `dtype`) and rounded once.

    Returns:
      [pages, page_size, 1, d_qk].

    Raises:
      ValueError: a wrong type, shape, dtype or combination; the message names the argument.
      NotImplementedError: a format that is reserved but not built.
    """
    spec = check_dequantize(array_spec("kv_cache", kv_cache), cache_format, page_size)
    return _dequantize(kv_cache, spec, float_dtype("dtype", dtype, DEQUANTISED_DTYPES))


@partial(jax.jit, static_argnums=(1, 2))
def _dequantize(kv_cache: jax.Array, spec: CacheSpec, dtype: Any) -> jax.Array:
    d_qk = spec.format.d_qk
    assert d_qk is not None
    if spec.num_slots == 0:
        return jnp.zeros((spec.num_pages, spec.page_size, 1, d_qk), dtype)
    page, slot = jnp.divmod(jnp.arange(spec.num_slots, dtype=jnp.int32), spec.page_size)
    rows = decode_rows(kv_cache, spec, page, slot, jnp.float64 if dtype == jnp.float64 else jnp.float32)
    return rows.astype(dtype).reshape(spec.num_pages, spec.page_size, 1, d_qk)
