"""The portable split-KV attention kernel: any cache format, dense or sparse, in plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_row import load_rows
from .schedule import WORK_FIELDS, item_lengths, item_units
from .softmax import LN2, LOG2E, LOWEST, row_coordinates, sink_factor

INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _token_offsets(
    page,  # int32 [N], or one
    token,  # int32 [N], or one: its place within the page
    kv_head,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
):
    """Where the rows of tokens begin, and their scales, in elements of the cache: int64."""
    page_offset = tl.cast(page, tl.int64) * PAGE_STRIDE
    token = tl.cast(token, tl.int64)
    return page_offset + (token * TOKEN_STRIDE + kv_head * HEAD_STRIDE), page_offset + (token * SCALE_STRIDE + SCALE_BASE)


@triton.jit
def _index_offsets(
    index,  # int32 [N]: flat slots
    ok,  # bool [N]: which of them are valid
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
):
    index = tl.where(ok, index, 0)
    return _token_offsets(index // PAGE_SIZE, index % PAGE_SIZE, 0, PAGE_STRIDE, TOKEN_STRIDE, 0, SCALE_BASE, SCALE_STRIDE)


@triton.jit
def _scores(q_c, q_r, c, r, has_keys, APART: tl.constexpr, BLOCK_R: tl.constexpr):
    """Products of queries and keys [BLOCK_H, BLOCK_N].

    `APART` puts them into a branch that is always taken.  Where Triton sees that another product reads the result of one, it
    gives the rows of that one to all warps; with 64 rows both warpgroups then multiply the same keys.  It does not look
    beyond the end of a branch.  The other branch, which nothing takes, has a product too: if what it has could be made
    again at no cost, Triton would move the exchange of P between the warpgroups in here, as scores.
    """
    if APART:
        if has_keys:
            s = tl.dot(q_c, tl.trans(c))
            s_r = s
            if BLOCK_R > 0:
                s_r = tl.dot(q_r, tl.trans(r))
        else:
            s = tl.dot(q_r, tl.trans(r))
            s_r = s
        if BLOCK_R > 0:
            s += s_r
    else:
        s = tl.dot(q_c, tl.trans(c))
        if BLOCK_R > 0:
            s = tl.dot(q_r, tl.trans(r), s)
    return s


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
    ROW_ALIGN: tl.constexpr,
    # the plan
    INTERPRETED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    LATE_SUM: tl.constexpr,
    QK_APART: tl.constexpr,
    HOIST_QUERIES: tl.constexpr,
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
    col_c = tl.arange(0, BLOCK_C)
    scale_log2 = tl.load(scale_ptr) * LOG2E

    work = schedule_ptr + program * WORK_FIELDS
    if FIXED_SPLITS:
        first_item = program // num_splits
        last_item = first_item
    else:
        first_item = tl.load(work)
        last_item = tl.load(work + 1)

    # Nothing is hoisted out of the loops, and the schedule is read again where it is needed: a tile of 64 rows takes all
    # registers, and what is kept across the inner loop is spilled.  But for mma.sync Triton moves the queries to shared memory
    # just before their product, and 3.9 leaves that in the inner loop unless it may hoist.
    for item in tl.range(first_item, last_item + 1, disable_licm=True):
        length, extra_length = item_lengths(
            item, item >= 0, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
            QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH,
        )  # fmt: skip
        units = item_units(length, extra_length, UNIT)
        if FIXED_SPLITS:
            # The ends of the ranges can lie beyond 32 bits, before they are cut to the item.
            per_split = (units.to(tl.int64) + (num_splits - 1)) // num_splits
            lo_unit = tl.minimum(program % num_splits * per_split, units).to(tl.int32)
            hi_unit = tl.minimum(lo_unit + per_split, units).to(tl.int32)
        else:
            lo_unit = tl.load(work + 2, mask=item == tl.load(work), other=0)
            hi_unit = tl.load(work + 3, mask=item == tl.load(work + 1), other=INT32_MAX)
            hi_unit = tl.minimum(hi_unit, units)

        row = (tile % ROW_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        row_ok = row < ROWS
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
        # The constant goes to the length: added to the query, pairs of which have 16 bits, ptxas could lose it.
        row_end = (length - (S_Q - 1)) + query

        m = tl.full([BLOCK_H], LOWEST, tl.float32)
        l = tl.zeros([BLOCK_H, BLOCK_N] if LATE_SUM else [BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        table_row = table_ptr + request * table_stride_b
        if SPARSE:
            table_row += tl.cast(item % S_Q, tl.int64) * table_stride_s
        lo = tl.minimum(lo_unit * UNIT, length)
        hi = tl.minimum(hi_unit * UNIT, length)
        main_blocks = (hi - lo + BLOCK_N - 1) // BLOCK_N
        blocks = main_blocks
        if HAS_EXTRA:
            extra_row = extra_table_ptr + request * extra_table_stride_b + tl.cast(item % S_Q, tl.int64) * extra_table_stride_s
            main_units = (length + UNIT - 1) // UNIT
            extra_lo = tl.minimum(tl.maximum(lo_unit - main_units, 0) * UNIT, extra_length)
            extra_hi = tl.minimum(tl.maximum(hi_unit - main_units, 0) * UNIT, extra_length)
            blocks += (extra_hi - extra_lo + BLOCK_N - 1) // BLOCK_N

        for block in tl.range(0, blocks, disable_licm=not HOIST_QUERIES):
            # Where the keys of this block lie is all that dense, sparse and extra keys differ in.
            start = lo + block * BLOCK_N
            end = hi
            if HAS_EXTRA:
                in_extra = block >= main_blocks
                start = tl.where(in_extra, extra_lo + (block - main_blocks) * BLOCK_N, start)
                end = tl.where(in_extra, extra_hi, hi)
            block_cache = cache_ptr
            t = start + tl.arange(0, BLOCK_N)
            ok = t < end
            if not SPARSE:
                # Instead of a mask, which every vector of a row would have to carry: behind the end stands the last key again.
                valid = tl.full([BLOCK_N], True, tl.int1)
                if ONE_PAGE:  # a block of keys never crosses a page
                    page = tl.load(table_row + start // PAGE_SIZE)
                    token = start % PAGE_SIZE
                else:
                    page = tl.load(table_row + tl.minimum(t, end - 1) // PAGE_SIZE)
                    token = tl.minimum(t, end - 1) % PAGE_SIZE
                row_offset, scale_offset = _token_offsets(
                    page, token, kv_head, PAGE_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE_BASE, SCALE_STRIDE
                )
            elif not HAS_EXTRA:
                index = tl.load(table_row + t, mask=ok, other=-1)
                ok = (index >= 0) & (index <= last_slot)
                valid = ok
                row_offset, scale_offset = _index_offsets(
                    index, ok, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, SCALE_BASE, SCALE_STRIDE
                )
            else:
                index = tl.load(tl.where(in_extra, extra_row, table_row) + t, mask=ok, other=-1)
                ok = (index >= 0) & (index <= tl.where(in_extra, extra_last_slot, last_slot))
                valid = ok
                row_offset, scale_offset = _index_offsets(
                    index, ok, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, SCALE_BASE, SCALE_STRIDE
                )
                extra_offset, extra_scale_offset = _index_offsets(
                    index, ok, EXTRA_PAGE_SIZE, EXTRA_PAGE_STRIDE, EXTRA_TOKEN_STRIDE, EXTRA_SCALE_BASE, EXTRA_SCALE_STRIDE
                )
                block_cache = tl.where(in_extra, extra_cache_ptr, cache_ptr)
                # A choice hides from some compilers what both are multiples of.
                row_offset = tl.multiple_of(tl.where(in_extra, extra_offset, row_offset), ROW_ALIGN)
                scale_offset = tl.where(in_extra, extra_scale_offset, scale_offset)
            base = block_cache + row_offset
            scale_base = block_cache + scale_offset
            c, r = load_rows(
                base, scale_base, end - 1 - start, valid, COMPUTE, ONE_PAGE, TOKEN_STRIDE, SCALE_STRIDE, BLOCK_N, D_QK, D_V,
                BLOCK_C, BLOCK_R, SCALE_TILE, NUM_SCALES, SCALE_E8M0, ROPE_OFFSET, NATIVE_FP8,
            )  # fmt: skip
            s = _scores(q_c, q_r, c, r, start < end, QK_APART, BLOCK_R)
            keep = ok[None, :]
            if CAUSAL:
                keep = keep & (t[None, :] < row_end[:, None])
            s = tl.where(keep, s * scale_log2, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s - m_new[:, None])
            if LATE_SUM:
                l = l * alpha[:, None] + p
            else:
                l = l * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(COMPUTE), c, acc * alpha[:, None])
            m = m_new

        if LATE_SUM:
            l = tl.sum(l, 1)
        empty = l == 0.0
        l = tl.where(empty, 1.0, l)
        if CAUSAL:  # zero times a key that only later queries see, which may be NaN; otherwise an empty row has acc == 0
            acc = tl.where(empty[:, None], 0.0, acc)
        acc = acc / l[:, None]
        lse = (m + tl.log2(l)) * LN2
        out_mask = row_ok[:, None]
        if D_V != BLOCK_C:
            out_mask = out_mask & (col_c < D_V)[None, :]
        if FIXED_SPLITS:
            slot = tl.where(num_splits > 1, program, -1)
        else:
            first_item = tl.load(work)
            at_an_end = (item == first_item) | (item == tl.load(work + 1))
            slot = tl.load(work + tl.where(item == first_item, 4, 5), mask=at_an_end, other=-1)
        if slot >= 0:
            part = slot.to(tl.int64) * (KV_HEADS * ROWS) + kv_head * ROWS + row
            tl.store(partial_out_ptr + part[:, None] * D_V + col_c[None, :], acc, mask=out_mask)
            tl.store(partial_lse_ptr + part, tl.where(empty, float("-inf"), lse), mask=row_ok)
        else:
            if HAS_SINK:
                # Plus zero, which the compiler does not know: it would keep the places of sinks in registers over both loops.
                sink = tl.load(sink_ptr + (head + (item >> 31)), mask=row_ok, other=0.0)
                acc = acc * tl.where(empty, 0.0, sink_factor(lse, sink))[:, None]
            out_row = request * OUT_STRIDE_B + query.to(tl.int64) * OUT_STRIDE_S + head.to(tl.int64) * OUT_STRIDE_H
            tl.store(out_ptr + out_row[:, None] + col_c[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
            lse_row = (request * H_Q + head) * S_Q + query
            tl.store(lse_ptr + lse_row, tl.where(empty, float("inf"), lse), mask=row_ok)
