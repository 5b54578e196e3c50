"""Dense paged attention on Hopper: two warpgroups that multiply, and a warp that fetches for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..softmax import LOG2E
from . import sizes
from .consumer import consumer
from .parts import new_barriers, new_buffers
from .producer import producer
from .schedule import new_work

CONSUMER_REGISTERS = gl.constexpr(sizes.CONSUMER_REGISTERS)
PRODUCER_REGISTERS = gl.constexpr(sizes.PRODUCER_REGISTERS)


@gluon.jit(do_not_specialize=["table_stride", "max_tokens", "items", "programs", "num_splits"])
def dense_kernel(
    q_desc,
    k_desc,
    table_ptr,
    lengths_ptr,
    scale_ptr,
    sink_ptr,
    table_stride,
    max_tokens,
    items,
    programs,
    num_splits,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    schedule_ptr,
    # the call
    S_Q: gl.constexpr,
    H_Q: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    OUT_STRIDE_B: gl.constexpr,
    OUT_STRIDE_S: gl.constexpr,
    OUT_STRIDE_H: gl.constexpr,
    # the cache: rows of the matrix that `k_desc` describes, from page to page
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    # the plan
    FIXED_SPLITS: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED_COST: gl.constexpr,
    SPLIT_COST: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    """Grid (programs * row tiles,), tiles fastest; `q_desc` describes q as [b * s_q * h_q, d_qk].

    Where the programs make a schedule, the first one also writes the list of split items for the combine kernel.
    """
    ROWS: gl.constexpr = S_Q * H_Q
    program = gl.program_id(0) // ROW_TILES
    tile = gl.program_id(0) % ROW_TILES
    work = new_work(
        program, tile, items, programs, num_splits, lengths_ptr, lengths_ptr, max_tokens, max_tokens, schedule_ptr,
        1, True, False, False, FIXED_SPLITS, UNIT, FIXED_COST, SPLIT_COST,
    )  # fmt: skip
    scale_log2 = gl.load(scale_ptr) * LOG2E
    DTYPE: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = q_desc.layout
    buffers = new_buffers(DTYPE, LAYOUT, False)
    barriers = new_barriers(1)
    gl.warp_specialize(
        [
            (consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                        S_Q, H_Q, ROWS, False, CAUSAL, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, 0)),
            (consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                        S_Q, H_Q, ROWS, False, CAUSAL, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, 1)),
            (producer, (work, buffers, barriers, q_desc, k_desc, table_ptr, table_stride, ROWS, HAS_ROPE, PAGE_SIZE,
                        PAGE_ROWS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # the first partition gets what is left, as the second
    )  # fmt: skip
