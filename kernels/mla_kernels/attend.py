"""The portable split-KV attention kernel: any cache format, dense or sparse, in plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_row import load_rows
from .schedule import WORK_FIELDS, item_lengths, item_units
from .softmax import LN2, LOG2E, LOWEST, row_coordinates, sink_factor


@triton.jit
def _attend_keys(
    acc,
    m,
    l,
    q_c,
    q_r,
    scale_log2,
    row_end,  # int32 [BLOCK_H]: a row sees the keys before it (causal calls only)
    cache_ptr,
    table_ptr,  # row of the block table, or of the indices
    lo,
    hi,
    last_slot,
    kv_head,
    COMPUTE: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALE_TILE: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_E8M0: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Folds the keys [lo, hi) of one scope into the running (acc, m, l); m and the scores are in units of log2."""
    for start in tl.range(lo, hi, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        ok = t < hi
        if SPARSE:
            index = tl.load(table_ptr + t, mask=ok, other=-1)
            ok = (index >= 0) & (index <= last_slot)
            index = tl.where(ok, index, 0)
            page = (index // PAGE_SIZE).to(tl.int64)
            slot = index % PAGE_SIZE
        elif ONE_PAGE:  # a block of keys never crosses a page
            page = tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64) + tl.zeros([BLOCK_N], tl.int64)
            slot = start % PAGE_SIZE + tl.arange(0, BLOCK_N)
        else:
            page = tl.load(table_ptr + t // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
            slot = t % PAGE_SIZE
        c, r = load_rows(
            cache_ptr, page, slot, ok, kv_head, COMPUTE, D_QK, D_V, BLOCK_C, BLOCK_R, PAGE_STRIDE, TOKEN_STRIDE, HEAD_STRIDE,
            SCALE_TILE, NUM_SCALES, SCALE_BASE, SCALE_STRIDE, SCALE_E8M0, ROPE_OFFSET, NATIVE_FP8,
        )  # fmt: skip
        s = tl.dot(q_c, tl.trans(c))  # [BLOCK_H, BLOCK_N]
        if BLOCK_R > 0:
            s = tl.dot(q_r, tl.trans(r), s)
        keep = ok[None, :]
        if CAUSAL:
            keep = keep & (t[None, :] < row_end[:, None])
        s = tl.where(keep, s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), c, acc * alpha[:, None])
        m = m_new
    return acc, m, l


@triton.jit(
    do_not_specialize=[
        "table_stride_b", "table_stride_s", "extra_table_stride_b", "extra_table_stride_s", "last_slot", "extra_last_slot",
        "max_tokens", "extra_tokens", "num_splits",
    ]
)  # fmt: skip
def attend_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    extra_cache_ptr,
    extra_table_ptr,
    extra_lengths_ptr,
    scale_ptr,
    sink_ptr,
    schedule_ptr,
    table_stride_b,
    table_stride_s,
    extra_table_stride_b,
    extra_table_stride_s,
    last_slot,
    extra_last_slot,
    max_tokens,
    extra_tokens,
    num_splits,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    # the call
    S_Q: tl.constexpr,
    H_Q: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTH: tl.constexpr,
    Q_STRIDE_B: tl.constexpr,
    Q_STRIDE_S: tl.constexpr,
    Q_STRIDE_H: tl.constexpr,
    OUT_STRIDE_B: tl.constexpr,
    OUT_STRIDE_S: tl.constexpr,
    OUT_STRIDE_H: tl.constexpr,
    # the caches
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_STRIDE: tl.constexpr,
    EXTRA_TOKEN_STRIDE: tl.constexpr,
    EXTRA_SCALE_BASE: tl.constexpr,
    EXTRA_SCALE_STRIDE: tl.constexpr,
    SCALE_TILE: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALE_E8M0: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    # the plan
    INTERPRETED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    ROW_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (programs * tiles,): every program of the schedule times the head tiles of an item, tiles fastest."""
    COMPUTE: tl.constexpr = tl.float32 if INTERPRETED else q_ptr.dtype.element_ty
    TILES: tl.constexpr = KV_HEADS * ROW_TILES
    QUERIES: tl.constexpr = S_Q if SPARSE else 1  # items per request
    program = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    kv_head = tile // ROW_TILES
    row = (tile % ROW_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
    row_ok = row < ROWS
    col_c = tl.arange(0, BLOCK_C)
    scale_log2 = tl.load(scale_ptr) * LOG2E

    if FIXED_SPLITS:
        first_item = program // num_splits
        last_item = first_item
        first_unit = program % num_splits
        end_unit = first_unit + 1
        first_slot = program
        last_slot_of_item = program
    else:
        work = schedule_ptr + program * WORK_FIELDS
        first_item = tl.load(work)
        last_item = tl.load(work + 1)
        first_unit = tl.load(work + 2)
        end_unit = tl.load(work + 3)
        first_slot = tl.load(work + 4)
        last_slot_of_item = tl.load(work + 5)

    for item in range(first_item, last_item + 1):
        length, extra_length = item_lengths(
            item, None, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
            QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH,
        )  # fmt: skip
        units = item_units(length, extra_length, UNIT)
        if FIXED_SPLITS:
            per_split = (units + num_splits - 1) // num_splits
            lo_unit = tl.minimum(first_unit * per_split, units)
            hi_unit = tl.minimum(end_unit * per_split, units)
            partial = num_splits > 1
        else:
            lo_unit = tl.where(item == first_item, first_unit, 0)
            hi_unit = tl.where(item == last_item, end_unit, units)
            partial = (lo_unit > 0) | (hi_unit < units)
        slot = tl.where(item == first_item, first_slot, last_slot_of_item)

        request, query, head = row_coordinates(item, row, S_Q, GROUP, SPARSE)
        head = kv_head * GROUP + head
        request = request.to(tl.int64)
        q_row = q_ptr + request * Q_STRIDE_B + query.to(tl.int64) * Q_STRIDE_S + head.to(tl.int64) * Q_STRIDE_H
        mask = row_ok[:, None]
        if D_V != BLOCK_C:
            mask = mask & (col_c < D_V)[None, :]
        q_c = tl.load(q_row[:, None] + col_c[None, :], mask=mask, other=0.0).to(COMPUTE)
        q_r = q_c
        if BLOCK_R > 0:
            col_r = D_V + tl.arange(0, BLOCK_R)
            mask = row_ok[:, None]
            if D_QK - D_V != BLOCK_R:
                mask = mask & (col_r < D_QK)[None, :]
            q_r = tl.load(q_row[:, None] + col_r[None, :], mask=mask, other=0.0).to(COMPUTE)
        row_end = length - S_Q + query + 1

        m = tl.full([BLOCK_H], LOWEST, tl.float32)
        l = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        table_row = table_ptr + request * table_stride_b
        if SPARSE:
            table_row += (item % S_Q).to(tl.int64) * table_stride_s
        acc, m, l = _attend_keys(
            acc, m, l, q_c, q_r, scale_log2, row_end, cache_ptr, table_row,
            tl.minimum(lo_unit * UNIT, length), tl.minimum(hi_unit * UNIT, length), last_slot, kv_head,
            COMPUTE, SPARSE, CAUSAL, BLOCK_N, PAGE_SIZE, ONE_PAGE, D_QK, D_V, BLOCK_C, BLOCK_R,
            PAGE_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE_TILE, NUM_SCALES, SCALE_BASE, SCALE_STRIDE, SCALE_E8M0,
            ROPE_OFFSET, NATIVE_FP8,
        )  # fmt: skip
        if HAS_EXTRA:
            main_units = (length + UNIT - 1) // UNIT
            extra_row = extra_table_ptr + request * extra_table_stride_b + (item % S_Q).to(tl.int64) * extra_table_stride_s
            acc, m, l = _attend_keys(
                acc, m, l, q_c, q_r, scale_log2, row_end, extra_cache_ptr, extra_row,
                tl.minimum(tl.maximum(lo_unit - main_units, 0) * UNIT, extra_length),
                tl.minimum(tl.maximum(hi_unit - main_units, 0) * UNIT, extra_length), extra_last_slot, kv_head,
                COMPUTE, SPARSE, CAUSAL, BLOCK_N, EXTRA_PAGE_SIZE, ONE_PAGE, D_QK, D_V, BLOCK_C, BLOCK_R,
                EXTRA_PAGE_STRIDE, EXTRA_TOKEN_STRIDE, HEAD_STRIDE, SCALE_TILE, NUM_SCALES, EXTRA_SCALE_BASE,
                EXTRA_SCALE_STRIDE, SCALE_E8M0, ROPE_OFFSET, NATIVE_FP8,
            )  # fmt: skip

        empty = l == 0.0
        acc = acc * tl.where(empty, 0.0, 1.0 / l)[:, None]
        lse = (m + tl.log2(l)) * LN2
        out_mask = row_ok[:, None]
        if D_V != BLOCK_C:
            out_mask = out_mask & (col_c < D_V)[None, :]
        if partial:
            part = slot.to(tl.int64) * (KV_HEADS * ROWS) + kv_head * ROWS + row
            tl.store(partial_out_ptr + part[:, None] * D_V + col_c[None, :], acc, mask=out_mask)
            tl.store(partial_lse_ptr + part, tl.where(empty, float("-inf"), lse), mask=row_ok)
        else:
            if HAS_SINK:
                sink = tl.load(sink_ptr + head, mask=row_ok, other=0.0)
                acc = acc * tl.where(empty, 0.0, sink_factor(lse, sink))[:, None]
            out_row = request * OUT_STRIDE_B + query.to(tl.int64) * OUT_STRIDE_S + head.to(tl.int64) * OUT_STRIDE_H
            tl.store(out_ptr + out_row[:, None] + col_c[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
            lse_row = (request * H_Q + head) * S_Q + query
            tl.store(lse_ptr + lse_row, tl.where(empty, float("inf"), lse), mask=row_ok)
