"""Writing what the kernels made of an item: its rows, or a piece of them for the combine kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..softmax import LN2, row_coordinates, sink_factor
from . import sizes
from .parts import HALF, TILE

# As the result of a product lies in registers, but that the columns of a thread are neighbours: nothing is exchanged.
PIECE_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [sizes.TILE, sizes.D_V // 2],
    )
)


@gluon.jit
def _write_piece(
    part, row_ok, acc, factor, lse, partial_out_ptr, partial_lse_ptr, slot, tile, ROWS: gl.constexpr, HALF_INDEX: gl.constexpr
):  # fmt: skip
    """Writes half of the columns of a piece, `acc` times `factor`: fp16, which times a power of two for each row give it.

    The columns that a thread has lie side by side, so that it stores eight at once.
    """
    # The largest exponent of a row, of finite values; fp16 has the precision for 27 powers of two below it.
    bits = acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    largest = gl.max(gl.where(bits < 0x7F800000, bits, 0), 1).to(gl.float32, bitcast=True) * factor
    exponent = gl.minimum(gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 14 << 23), 253 << 23)
    scale = (exponent - (13 << 23)).to(gl.float32, bitcast=True)
    inverse = ((253 << 23) - exponent + (14 << 23)).to(gl.float32, bitcast=True)
    value = (acc * gl.expand_dims(factor * inverse, 1)).to(gl.float16)
    value = value.reshape([TILE, HALF // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([TILE, HALF])
    value = gl.convert_layout(value, PIECE_LAYOUT)
    row = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, PIECE_LAYOUT))
    line = (slot.to(gl.int64) * ROWS + row) * (2 * HALF) + HALF_INDEX * HALF
    place = gl.arange(0, HALF, layout=gl.SliceLayout(0, PIECE_LAYOUT))
    gl.store(partial_out_ptr + gl.expand_dims(line, 1) + gl.expand_dims(place, 0), value, mask=gl.expand_dims(row < ROWS, 1))
    of_half = partial_lse_ptr + (part * 2 + HALF_INDEX) * 2
    gl.store(of_half, lse, mask=row_ok)
    gl.store(of_half + 1, scale, mask=row_ok)


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
        _write_piece(
            part, row_ok, acc, factor, gl.where(empty, float("-inf"), lse), partial_out_ptr, partial_lse_ptr, slot, work.tile,
            ROWS, HALF_INDEX,
        )  # fmt: skip
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
