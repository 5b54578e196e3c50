"""Writing what the kernels made of an item: its rows, or a piece of them for the combine kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..softmax import LN2, row_coordinates, sink_factor
from .parts import HALF, TILE


@gluon.jit
def write(
    work, item, acc, l, m, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
    S_Q: gl.constexpr, H_Q: gl.constexpr, ROWS: gl.constexpr, SPARSE: gl.constexpr, HAS_SINK: gl.constexpr,
    OUT_STRIDE_B: gl.constexpr, OUT_STRIDE_S: gl.constexpr, OUT_STRIDE_H: gl.constexpr, HALF_INDEX: gl.constexpr,
):  # fmt: skip
    """Writes one half of the columns of an item, and with half 0 its log-sum-exp."""
    OUT_LAYOUT: gl.constexpr = acc.type.layout
    row = work.tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT_LAYOUT))
    row_ok = row < ROWS
    mask = gl.expand_dims(row_ok, 1)
    col = gl.expand_dims(HALF_INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT_LAYOUT)), 0)
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    lse = (m + gl.log2(l)) * LN2
    factor = 1.0 / l
    slot = work.slot(item)
    if slot >= 0:
        part = slot.to(gl.int64) * ROWS + row
        gl.store(partial_out_ptr + gl.expand_dims(part * (2 * HALF), 1) + col, acc * gl.expand_dims(factor, 1), mask=mask)
        if HALF_INDEX == 0:
            gl.store(partial_lse_ptr + part, gl.where(empty, float("-inf"), lse), mask=row_ok)
    else:
        request, query, head = row_coordinates(item, row, S_Q, H_Q, SPARSE)
        if HAS_SINK:
            sink = gl.load(sink_ptr + head, mask=row_ok, other=0.0)
            factor = factor * gl.where(empty, 0.0, sink_factor(lse, sink))
        out_row = request.to(gl.int64) * OUT_STRIDE_B + query.to(gl.int64) * OUT_STRIDE_S + head.to(gl.int64) * OUT_STRIDE_H
        value = (acc * gl.expand_dims(factor, 1)).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + gl.expand_dims(out_row, 1) + col, value, mask=mask)
        if HALF_INDEX == 0:
            lse_row = (request.to(gl.int64) * H_Q + head) * S_Q + query
            gl.store(lse_ptr + lse_row, gl.where(empty, float("inf"), lse), mask=row_ok)
