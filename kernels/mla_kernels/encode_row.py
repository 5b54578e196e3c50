"""Encoding latent values into what a cache stores: the twin of `decode_row`, bit for bit what the quantising helpers write."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_row import widen

E4M3_NAN = tl.constexpr(0x7F)
INFINITY_BITS = tl.constexpr(0x7F800000)  # of fp32; magnitudes above it are NaN
MIN_SCALE_EXPONENT = tl.constexpr(-13)  # ceil(log2(1e-4))
MIN_SCALE = tl.constexpr(2.0**-100)  # of an unrounded scale: a zero tile divides by it


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as int32, which order as the magnitudes do, for fp32 `x`."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quiet_nan(x):
    """fp32 `x` with every NaN the positive quiet one, whose bits devices and the interpreter would else choose."""
    return tl.where(magnitude_bits(x) > INFINITY_BITS, float("nan"), x)


COMPILED = tl.constexpr(isinstance(quiet_nan, triton.JITFunction))  # not interpreted


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """`x` rounded to nearest even; a NaN becomes the positive quiet one.  Values of `dtype` stay as they are, NaN included."""
    if x.dtype == dtype:
        return x
    else:
        wide = widen(x, tl.float32)
        is_nan = magnitude_bits(wide) > INFINITY_BITS
        if dtype == tl.float32:
            return quiet_nan(wide)
        elif dtype == tl.float16:
            code = wide.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
            return tl.where(is_nan, 0x7E00, code).to(tl.uint16).to(tl.float16, bitcast=True)
        elif COMPILED:  # a comparison, where the bits of a magnitude take two instructions
            code = wide.to(tl.bfloat16).to(tl.uint16, bitcast=True)
            return tl.where(wide != wide, 0x7FC0, code).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            # In integers: the interpreter's conversion truncates.
            bits = wide.to(tl.uint32, bitcast=True)
            code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(is_nan, 0x7FC0, code).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def float32_to_e4m3(x, NATIVE: tl.constexpr):
    """Finite fp32 values of magnitude below 464 as uint8 e4m3 codes, rounded to nearest even; NaN becomes 0x7F."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        magnitude = magnitude_bits(x)
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 codes count units of 2**-9, the distance of fp32 values next to 2**14: the addition rounds to it.
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - (141 << 23)
        code = tl.where(magnitude < (121 << 23), subnormal, normal)
        code = code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return tl.where(magnitude > INFINITY_BITS, E4M3_NAN, code).to(tl.uint8)


@triton.jit
def quantise_tiles(x, POWER_OF_TWO: tl.constexpr, NATIVE: tl.constexpr):
    """Tiles that share a scale, fp32 [N, TILES, SCALE_TILE], as e4m3 codes (uint8) and fp32 scales [N, TILES].

    The scale is that of the finite values: `2 ** ceil(log2(max(amax / 448, 1e-4)))`, or `max(amax / 448, 2**-100)`.
    """
    # An infinity becomes a NaN.  A maximum passes over NaN, and conversions store it as it must be: nothing is tested apart.
    x = x * 0.0 + x
    amax = tl.max(tl.abs(x), 2)
    amax = tl.where(amax > 0.0, amax, 0.0)  # NaN where all of a tile is
    if POWER_OF_TWO:
        # amax = 1.m * 2**e and 448 = 1.75 * 2**8: the quotient's log2, rounded up, without a rounding on the way.
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - (127 + 8) + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
        exponent = tl.maximum(exponent, MIN_SCALE_EXPONENT)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        quotient = x * inverse[:, :, None]  # exact
    else:
        scale = tl.maximum(tl.div_rn(amax, 448.0), MIN_SCALE)
        quotient = tl.div_rn(x, scale[:, :, None])
    return float32_to_e4m3(quotient, NATIVE), scale
