"""Merging the partial results of split items."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .softmax import LN2, LOG2E, row_coordinates, sink_factor


class Shape(NamedTuple):
    """What a task takes at once with `COMPACT`: pieces of an item, lines of each, which are halves of rows, and columns."""

    pieces: int
    lines: int
    columns: int


SHAPES = (Shape(4, 4, 256), Shape(16, 2, 128), Shape(64, 1, 64))
_PIECES, _LINES, _COLUMNS = (tl.constexpr(numbers) for numbers in zip(*SHAPES, strict=True))


def shape_for(pieces: int) -> Shape:
    """The shape that takes so many pieces of an item at once, or the most."""
    return next((shape for shape in SHAPES if pieces <= shape.pieces), SHAPES[-1])


@triton.jit
def _merge(
    schedule_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    sink_ptr,
    splits_offset,
    count,
    num_splits,
    out_ptr,
    lse_ptr,
    S_Q: tl.constexpr,
    H_Q: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D_V: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    OUT_STRIDE_B: tl.constexpr,
    OUT_STRIDE_S: tl.constexpr,
    OUT_STRIDE_H: tl.constexpr,
    COMPACT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The tasks of one program, each of them `BLOCK_D` columns of some lines of an item: rows, or with `COMPACT` halves.

    A task loads `PARTS` pieces at once.
    """
    ALL_ROWS: tl.constexpr = KV_HEADS * ROWS
    LINE: tl.constexpr = D_V // 2 if COMPACT else D_V
    LINES: tl.constexpr = ALL_ROWS * 2 if COMPACT else ALL_ROWS
    COLUMN_BLOCKS: tl.constexpr = (LINE + BLOCK_D - 1) // BLOCK_D
    TASKS: tl.constexpr = (LINES + BLOCK_LINES - 1) // BLOCK_LINES * COLUMN_BLOCKS
    for task in range(tl.program_id(0), count * TASKS, tl.num_programs(0)):
        entry = task // TASKS
        line = task % TASKS // COLUMN_BLOCKS * BLOCK_LINES + tl.arange(0, BLOCK_LINES)
        col = (task % COLUMN_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
        item = entry
        first_slot = entry * num_splits
        pieces = num_splits
        if num_splits == 0:
            split = schedule_ptr + splits_offset + 1 + entry * 3
            item = tl.load(split)
            first_slot = tl.load(split + 1)
            pieces = tl.load(split + 2)
        # In one pass, so that nothing is waited for twice.
        piece = tl.arange(0, PARTS)
        line_ok = line < LINES
        inside = line_ok[:, None] & (col < LINE)[None, :]
        top = tl.full([BLOCK_LINES], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_LINES], tl.float32)
        acc = tl.zeros([BLOCK_LINES, BLOCK_D], tl.float32)
        for start in range(0, pieces, PARTS):
            part = (first_slot + start + piece).to(tl.int64)[:, None] * LINES + line[None, :]
            mask = (start + piece < pieces)[:, None] & line_ok[None, :]
            scale = 1.0
            if COMPACT:
                lse = tl.load(partial_lse_ptr + part * 2, mask=mask, other=float("-inf"))
                scale = tl.load(partial_lse_ptr + part * 2 + 1, mask=mask, other=0.0)
            else:
                lse = tl.load(partial_lse_ptr + part, mask=mask, other=float("-inf"))
            value = tl.load(
                partial_out_ptr + part[:, :, None] * LINE + col[None, None, :],
                mask=mask[:, :, None] & inside[None, :, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            if not COMPACT:  # what a portable kernel leaves where there was no key may be NaN
                value = tl.where((lse != float("-inf"))[:, :, None], value, 0.0)
            top_new = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(top_new == float("-inf"), 0.0, top_new)
            weight = tl.exp2((lse - base[None, :]) * LOG2E)
            alpha = tl.exp2((top - base) * LOG2E)
            total = total * alpha + tl.sum(weight, 0)
            acc = acc * alpha[:, None] + tl.sum(value * (weight * scale)[:, :, None], 0)
            top = top_new

        empty = total == 0.0
        total = tl.where(empty, 1.0, total)  # an empty row has acc == 0
        acc = acc / total[:, None]
        lse = top + tl.log2(total) * LN2
        packed_row = line // 2 if COMPACT else line
        request, query, head = row_coordinates(item, packed_row % ROWS, S_Q, GROUP, SPARSE)
        head = packed_row // ROWS * GROUP + head
        request = request.to(tl.int64)
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=line_ok, other=0.0)
            acc = acc * tl.where(empty, 0.0, sink_factor(lse, sink))[:, None]
        out_row = request * OUT_STRIDE_B + query.to(tl.int64) * OUT_STRIDE_S + head.to(tl.int64) * OUT_STRIDE_H
        out_col = col[None, :]
        if COMPACT:  # the order in which a tensor core's result lies in registers
            column = (col & ~30) | ((col & 6) << 2) | ((col & 24) >> 2)
            out_col = (line % 2 * LINE)[:, None] + tl.max_contiguous(tl.multiple_of(column, 2), 2)[None, :]
        tl.store(out_ptr + out_row[:, None] + out_col, acc.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(lse_ptr + (request * H_Q + head) * S_Q + query, tl.where(empty, float("inf"), lse), mask=line_ok)


@triton.jit(do_not_specialize=["splits_offset", "items", "num_splits", "columns"])
def combine_kernel(
    schedule_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    sink_ptr,
    out_before_ptr,
    lse_before_ptr,
    splits_offset,
    items,
    num_splits,
    columns,
    out_ptr,
    lse_ptr,
    S_Q: tl.constexpr,
    H_Q: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D_V: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    OUT_STRIDE_B: tl.constexpr,
    OUT_STRIDE_S: tl.constexpr,
    OUT_STRIDE_H: tl.constexpr,
    COMPACT: tl.constexpr,
    WIDEST: tl.constexpr,
    NARROWER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Merges pieces into `out` and `lse`, in place: rows of items that were not split are left as they are.

    A piece is its own softmax: an output and the natural log-sum-exp of its scores, -inf where it had no key.  Every piece has
    been written, those without keys too.  Outputs are fp32; with `COMPACT` fp16, halves of a row that have scales of their
    own, each of which follows the log-sum-exp: fp32 [pieces, rows, 2, 2].
    With `num_splits` each item is in so many pieces; where that is 0, the schedule lists those that are split.
    Grid (any,): the programs share out (split item, lines, columns) among themselves, `columns` to a task: those of one of
    `SHAPES` with `COMPACT`, otherwise `WIDEST`, or that halved up to `NARROWER` times.  One binary serves them all, because
    which is best depends on the batch.
    With `OVERLAPS`, they may be started before the kernel that writes the pieces has ended.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    count = items
    if num_splits == 0:
        count = tl.load(schedule_ptr + splits_offset)
    for choice in tl.static_range(NARROWER + 1):
        if columns == (_COLUMNS[choice] if COMPACT else WIDEST >> choice):
            BLOCK_D: tl.constexpr = _COLUMNS[choice] if COMPACT else WIDEST >> choice
            # Otherwise what threads can hold.
            PARTS: tl.constexpr = _PIECES[choice] if COMPACT else 2048 // BLOCK_D if BLOCK_D < 512 else 4
            _merge(
                schedule_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr, splits_offset, count, num_splits, out_ptr, lse_ptr,
                S_Q, H_Q, GROUP, ROWS, KV_HEADS, D_V, SPARSE, HAS_SINK, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, COMPACT,
                PARTS, _LINES[choice] if COMPACT else 1, BLOCK_D,
            )  # fmt: skip
