"""Loading a block of latent rows and decoding it to the compute dtype: the one place that knows how bytes become values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_float32(code, NATIVE: tl.constexpr):
    """uint8 e4m3 codes as fp32, NaN included.  The bit-level way serves devices (and the interpreter) without the type."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.uint16)
    # e4m3 in the exponent and mantissa fields of fp16 is the value times 2**-8, subnormals included.
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def e8m0_to_float32(code):
    """uint32 E8M0 codes as fp32: 2 ** (code - 127), and 255 is NaN."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def widen(x, dtype: tl.constexpr):
    """16- or 32-bit floating-point values in a dtype that holds them all."""
    if dtype == tl.float32 and x.dtype == tl.bfloat16:
        # In integers, because the interpreter loses subnormals.
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def load_rows(
    base,  # pointers to rows [N], or one pointer to the first of rows at equal distances (EQUIDISTANT)
    scale_base,  # the same for their scales, of the cache's dtype
    last,  # the place of the last row that may be read (EQUIDISTANT); the rows behind it are that row again
    valid,  # bool [N]: nothing is read where it is false, and the row is zero
    COMPUTE: tl.constexpr,
    EQUIDISTANT: tl.constexpr,
    ROW_DISTANCE: tl.constexpr,
    SCALE_DISTANCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALE_TILE: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALE_E8M0: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """A block of rows: the first `D_V` values [N, BLOCK_C] (they are the values, too) and the rest [N, BLOCK_R].

    With `BLOCK_R == 0` there is no rest, and the second result is the first.  Otherwise a quantised row's rest is its RoPE
    part, and columns of the first result behind `D_V` are undefined.
    """
    # With one base the offsets of a tile are added up in 32 bits before they meet it, which costs half of the instructions.
    n = tl.minimum(tl.arange(0, BLOCK_N), last)
    row = n * ROW_DISTANCE if EQUIDISTANT else n * 0
    if not EQUIDISTANT:
        base = base[:, None]
        scale_base = scale_base[:, None]
    row = row[:, None]
    if SCALE_TILE == 0:
        col = tl.arange(0, BLOCK_C)[None, :]
        mask = valid[:, None]
        if D_V != BLOCK_C:
            mask = mask & (col < D_V)
        c = widen(tl.load(base + (row + col), mask=mask, other=0.0), COMPUTE)
        r = c
        if BLOCK_R > 0:
            rest = D_V + tl.arange(0, BLOCK_R)[None, :]
            mask = valid[:, None]
            if D_QK - D_V != BLOCK_R:
                mask = mask & (rest < D_QK)
            r = widen(tl.load(base + (row + rest), mask=mask, other=0.0), COMPUTE)
    else:
        # Tiles that share a scale are an axis of their own: [N, tiles, SCALE_TILE].
        TILES: tl.constexpr = BLOCK_C // SCALE_TILE
        tile = tl.arange(0, TILES)
        valid_tile = valid[:, None]
        if NUM_SCALES != TILES:
            valid_tile = valid_tile & (tile < NUM_SCALES)[None, :]
        offset = tile[:, None] * SCALE_TILE + tl.arange(0, SCALE_TILE)[None, :]
        tile_base = base if EQUIDISTANT else base[:, :, None]
        code = tl.load(tile_base + (row[:, :, None] + offset[None, :, :]), mask=valid_tile[:, :, None], other=0)
        # Scales by words: a copy into shared memory moves four bytes at the least.
        scale_row = (n * SCALE_DISTANCE if EQUIDISTANT else n * 0)[:, None] // 4
        if SCALE_E8M0:
            word_ptr = scale_base.to(tl.pointer_type(tl.uint32), bitcast=True)
            word = tl.load(word_ptr + (scale_row + tl.arange(0, TILES // 4)[None, :]), mask=valid[:, None], other=0)
            scale_code = (word[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 0xFF
            scale = e8m0_to_float32(tl.reshape(scale_code, [BLOCK_N, TILES]))
        else:
            fp32_ptr = scale_base.to(tl.pointer_type(tl.float32), bitcast=True)
            scale = tl.load(fp32_ptr + (scale_row + tile[None, :]), mask=valid_tile, other=0.0)
        rope_ptr = (base + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        rope_col = tl.arange(0, D_QK - NUM_SCALES * SCALE_TILE)[None, :]
        rope = widen(tl.load(rope_ptr + (row // 2 + rope_col), mask=valid[:, None], other=0.0), COMPUTE)
        value = (e4m3_to_float32(code, NATIVE_FP8) * scale[:, :, None]).to(COMPUTE)
        if NUM_SCALES != TILES and BLOCK_R == 0:  # the RoPE part is the last tile of the value vector
            value = tl.where((tile < NUM_SCALES)[None, :, None], value, rope[:, None, :])
        c = tl.reshape(value, [BLOCK_N, BLOCK_C])
        r = c
        if BLOCK_R > 0:
            r = rope
    return c, r
