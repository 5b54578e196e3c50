"""Kernels that write, read and copy what a paged cache holds, for every cache format."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_row import load_rows, widen
from .encode_row import quantise_tiles, quiet_nan, round_to


@triton.jit
def _find_slots(
    slots_ptr,
    row,  # int64 [N]: places in the list of slots
    n,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
):
    """Where the rows of slots and their scales start, int64 [N], and which of them are slots of the cache, bool [N]."""
    slot = tl.load(slots_ptr + row, mask=row < n, other=-1)
    page = slot // PAGE_SIZE
    valid = (slot >= 0) & (page < num_pages)
    page = tl.where(valid, page, 0).to(tl.int64)
    token = tl.where(valid, slot % PAGE_SIZE, 0).to(tl.int64)
    page_start = page * PAGE_STRIDE
    return page_start + token * TOKEN_STRIDE, page_start + (token * SCALE_STRIDE + SCALE_BASE), valid


@triton.jit
def _move_columns(source, target, exists, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the first `WIDTH` values of rows [N] that are valid, rounded to what `target` holds; loads all that exist."""
    col = tl.arange(0, BLOCK)[None, :]
    exists, valid = exists[:, None], valid[:, None]
    if WIDTH != BLOCK:
        exists, valid = exists & (col < WIDTH), valid & (col < WIDTH)
    x = tl.load(source[:, None] + col, mask=exists, other=0.0)
    tl.store(target[:, None] + col, round_to(x, target.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["n", "num_pages"])
def append_kernel(
    before_ptr,  # the cache, too: what is updated in place is an input and an output
    latent_ptr,
    rope_ptr,
    slots_ptr,
    n,
    num_pages,
    cache_ptr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_TILE: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALE_E8M0: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (blocks of tokens,): stores tokens at their slots.  Nothing is written for a token without one.

    All tokens are loaded: the loads would else wait for those of the slots.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < n
    start, scale_start, valid = _find_slots(
        slots_ptr, row, n, num_pages, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, SCALE_BASE, SCALE_STRIDE
    )
    latent = latent_ptr + row * LATENT_STRIDE
    rope = rope_ptr + row * ROPE_STRIDE
    target = cache_ptr + start
    if SCALE_TILE == 0:
        _move_columns(latent, target, exists, valid, D_LATENT, BLOCK_C)
        if BLOCK_R > 0:
            _move_columns(rope, target + D_LATENT, exists, valid, D_ROPE, BLOCK_R)
    else:
        TILES: tl.constexpr = BLOCK_C // SCALE_TILE
        tile = tl.arange(0, TILES)
        exists_tile, valid_tile = exists[:, None], valid[:, None]
        if NUM_SCALES != TILES:
            stored = (tile < NUM_SCALES)[None, :]
            exists_tile, valid_tile = exists_tile & stored, valid_tile & stored
        offset = (tile[:, None] * SCALE_TILE + tl.arange(0, SCALE_TILE)[None, :])[None, :, :]
        x = tl.load(latent[:, None, None] + offset, mask=exists_tile[:, :, None], other=0.0)
        code, scale = quantise_tiles(widen(x, tl.float32), POWER_OF_TWO, NATIVE_FP8)
        tl.store(target[:, None, None] + offset, code, mask=valid_tile[:, :, None])
        scale_target = (cache_ptr + scale_start)[:, None]
        if SCALE_E8M0:
            exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
            tl.store(scale_target + tile[None, :], exponent, mask=valid_tile)
        else:
            scale_target = scale_target.to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(scale_target + tile[None, :], scale, mask=valid_tile)
        col = tl.arange(0, BLOCK_R)[None, :]
        r = tl.load(rope[:, None] + col, mask=exists[:, None], other=0.0)
        rope_target = (target + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(rope_target[:, None] + col, round_to(widen(r, tl.float32), tl.bfloat16), mask=valid[:, None])


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """fp32 `x` as `dtype`, with every NaN the positive quiet one."""
    if dtype == tl.float32:
        return quiet_nan(x)
    else:
        return round_to(x, dtype)


@triton.jit(do_not_specialize=["n", "num_pages"])
def read_kernel(
    cache_ptr,
    slots_ptr,
    n,
    num_pages,
    rows_ptr,
    D_QK: tl.constexpr,
    D_MAIN: tl.constexpr,  # the columns of BLOCK_C, the others are those of BLOCK_R
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_TILE: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALE_E8M0: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (blocks of slots,): rows of `D_QK` values, of zeros for what is no slot of the cache."""
    DTYPE: tl.constexpr = rows_ptr.dtype.element_ty
    SAME: tl.constexpr = SCALE_TILE == 0 and cache_ptr.dtype.element_ty == DTYPE
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, scale_start, valid = _find_slots(
        slots_ptr, row, n, num_pages, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, SCALE_BASE, SCALE_STRIDE
    )
    c, r = load_rows(
        cache_ptr + start, cache_ptr + scale_start, BLOCK_N - 1, valid, DTYPE if SAME else tl.float32, False, 0, 0,
        BLOCK_N, D_QK, D_MAIN, BLOCK_C, BLOCK_R, SCALE_TILE, NUM_SCALES, SCALE_E8M0, ROPE_OFFSET, NATIVE_FP8,
    )  # fmt: skip
    target = (rows_ptr + row * D_QK)[:, None]
    mask = (row < n)[:, None]
    col = tl.arange(0, BLOCK_C)[None, :]
    tl.store(target + col, c if SAME else _rounded(c, DTYPE), mask=mask & (col < D_MAIN))
    if BLOCK_R > 0:
        col = D_MAIN + tl.arange(0, BLOCK_R)[None, :]
        tl.store(target + col, r if SAME else _rounded(r, DTYPE), mask=mask & (col < D_QK))


@triton.jit(do_not_specialize=["num_pages"])
def copy_pages_kernel(
    before_ptr,
    sources_ptr,
    targets_ptr,
    num_pages,
    cache_ptr,
    PAGE_STRIDE: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    RUN: tl.constexpr,
    CHUNKS: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (pairs * RUNS * CHUNKS,): each page is `RUNS` runs of `RUN` elements, each run `CHUNKS` blocks."""
    pair = tl.program_id(0) // (RUNS * CHUNKS)
    part = tl.program_id(0) % (RUNS * CHUNKS)
    source = tl.load(sources_ptr + pair).to(tl.int64)
    target = tl.load(targets_ptr + pair).to(tl.int64)
    start = (part // CHUNKS).to(tl.int64) * RUN_STRIDE
    col = (part % CHUNKS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if (source >= 0) & (source < num_pages) & (target >= 0) & (target < num_pages):
        x = tl.load(before_ptr + (source * PAGE_STRIDE + start) + col, mask=col < RUN)
        tl.store(cache_ptr + (target * PAGE_STRIDE + start) + col, x, mask=col < RUN)
