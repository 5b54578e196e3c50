"""Writing what the kernels made of an item: its rows, or a piece of them for the combine kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..softmax import LN2, row_coordinates, sink_factor
from . import sizes
from .parts import HALF, TILE

# As rows are stored: a warp has one at a time, whole lines of it.  As a product leaves them, a warp would have parts of eight.
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


# As a product leaves them, but that the columns of a thread are neighbours: nothing is exchanged.
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
def _fp16_scale(acc, factor):
    """Powers of two, one a row: `acc` times `factor`, divided by them, is what fp16 holds best; and their inverses.

    They follow the largest finite value of a row; fp16 has its full precision for 27 powers of two below that.
    """
    finite = gl.fma(acc, gl.zeros_like(acc), acc)  # or NaN, which a maximum leaves out
    largest = gl.max(gl.abs(finite), 1) * factor
    exponent = gl.minimum(gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 14 << 23), 253 << 23)
    scale = (exponent - (13 << 23)).to(gl.float32, bitcast=True)
    inverse = ((253 << 23) - exponent + (14 << 23)).to(gl.float32, bitcast=True)
    return scale, inverse


@gluon.jit
def _starts_of_rows(
    item, row, S_Q: gl.constexpr, H_Q: gl.constexpr, SPARSE: gl.constexpr,
    OUT_STRIDE_B: gl.constexpr, OUT_STRIDE_S: gl.constexpr, OUT_STRIDE_H: gl.constexpr,
):  # fmt: skip
    """Where the packed rows of an item begin in `out`, in elements."""
    if SPARSE:
        query = (item % S_Q).to(gl.int64)
        start = (item // S_Q).to(gl.int64) * OUT_STRIDE_B + query * OUT_STRIDE_S + row.to(gl.int64) * OUT_STRIDE_H
    elif S_Q == 1 or OUT_STRIDE_S == H_Q * OUT_STRIDE_H:  # at equal distances
        start = item.to(gl.int64) * OUT_STRIDE_B + row.to(gl.int64) * OUT_STRIDE_H
    else:
        request, query, head = row_coordinates(item, row, S_Q, H_Q, SPARSE)
        start = request.to(gl.int64) * OUT_STRIDE_B + query.to(gl.int64) * OUT_STRIDE_S + head.to(gl.int64) * OUT_STRIDE_H
    return start


@gluon.jit
def write(
    work, item, acc, l, m, staging, q_empty, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
    S_Q: gl.constexpr, H_Q: gl.constexpr, ROWS: gl.constexpr, SPARSE: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_SINK: gl.constexpr, OUT_STRIDE_B: gl.constexpr, OUT_STRIDE_S: gl.constexpr, OUT_STRIDE_H: gl.constexpr,
    HALF_INDEX: gl.constexpr,
):  # fmt: skip
    """Writes one half of the columns of an item, and its log-sum-exp.

    Rows pass through `staging`, half of the queries, which nobody reads any more; then `q_empty` is told.
    A piece is fp16, with the log-sum-exp of each row and half, and what its values are to be multiplied by.  Its columns lie
    in an order in which each thread can store eight that it has, which is faster where a call is short.  Of a row without keys
    all is 0.
    """
    ROWS_OF_O: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    # Plus zero, which the compiler does not know: it would work out the places of all rows before the loop over the items, and
    # keep them in registers it does not have.
    first_row = work.tile * TILE + (item >> 31)
    row = first_row + gl.arange(0, TILE, layout=ROWS_OF_O)
    row_ok = row < ROWS
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    if CAUSAL:  # zero times a key that only later queries see, which may be NaN; otherwise rows are empty together, and 0
        acc = gl.where(gl.expand_dims(empty, 1), 0.0, acc)
    lse = (m + gl.log2(l)) * LN2
    factor = 1.0 / l
    slot = work.slot(item)
    if slot >= 0:
        mbarrier.arrive(q_empty)
        scale, inverse = _fp16_scale(acc, factor)
        of_half = partial_lse_ptr + ((slot.to(gl.int64) * ROWS + row) * 2 + HALF_INDEX) * 2
        gl.store(of_half, gl.where(empty, float("-inf"), lse), mask=row_ok)
        gl.store(of_half + 1, scale, mask=row_ok)
        piece = (acc * gl.expand_dims(factor * inverse, 1)).to(gl.float16)
        piece = piece.reshape([TILE, HALF // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([TILE, HALF])
        piece_row = first_row + gl.arange(0, TILE, layout=gl.SliceLayout(1, PIECE_LAYOUT))
        place = HALF_INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, PIECE_LAYOUT))
        places = gl.expand_dims((slot.to(gl.int64) * ROWS + piece_row) * (2 * HALF), 1) + gl.expand_dims(place, 0)
        gl.store(partial_out_ptr + places, gl.convert_layout(piece, PIECE_LAYOUT), mask=gl.expand_dims(piece_row < ROWS, 1))
    else:
        request, query, head = row_coordinates(item, row, S_Q, H_Q, SPARSE)
        if HAS_SINK:
            sink = gl.load(sink_ptr + head, mask=row_ok, other=0.0)
            factor = factor * gl.where(empty, 0.0, sink_factor(lse, sink))
        if HALF_INDEX == 0:
            lse_row = (request.to(gl.int64) * H_Q + head) * S_Q + query
            gl.store(lse_ptr + lse_row, gl.where(empty, float("inf"), lse), mask=row_ok)
        staging.store((acc * gl.expand_dims(factor, 1)).to(staging.dtype))
        value = staging.load(BY_ROWS)
        fence_async_shared()  # the next queries are fetched by TMA
        mbarrier.arrive(q_empty)
        out_row = first_row + gl.arange(0, TILE, layout=gl.SliceLayout(1, BY_ROWS))
        col = HALF_INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, BY_ROWS))
        start = _starts_of_rows(item, out_row, S_Q, H_Q, SPARSE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H)
        gl.store(out_ptr + gl.expand_dims(start, 1) + gl.expand_dims(col, 0), value, mask=gl.expand_dims(out_row < ROWS, 1))
