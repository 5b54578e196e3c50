"""Sparse attention over fp8 caches on Hopper: two warpgroups that multiply, and two that gather and dequantise for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..softmax import LOG2E
from . import sizes
from .consumer import consumer
from .gather import Cache, gather
from .parts import new_barriers, new_buffers
from .schedule import new_work, uniform

CONSUMER_REGISTERS = gl.constexpr(sizes.GATHER_CONSUMER_REGISTERS)
PRODUCER_REGISTERS = gl.constexpr(sizes.GATHER_REGISTERS)
GATHERERS = gl.constexpr(sizes.GATHERERS)


@gluon.jit(
    do_not_specialize=[
        "table_stride_b", "table_stride_s", "extra_table_stride_b", "extra_table_stride_s", "last_slot", "extra_last_slot",
        "max_tokens", "extra_tokens", "items", "programs", "num_splits",
    ]
)  # fmt: skip
def sparse_kernel(
    q_desc,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    extra_cache_ptr,
    extra_table_ptr,
    extra_lengths_ptr,
    scale_ptr,
    sink_ptr,
    table_stride_b,
    table_stride_s,
    extra_table_stride_b,
    extra_table_stride_s,
    last_slot,
    extra_last_slot,
    max_tokens,
    extra_tokens,
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
    HAS_LENGTH: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
    HAS_EXTRA_LENGTH: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    OUT_STRIDE_B: gl.constexpr,
    OUT_STRIDE_S: gl.constexpr,
    OUT_STRIDE_H: gl.constexpr,
    # the caches, in bytes
    PAGE_SIZE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr,
    SCALE_BASE: gl.constexpr,
    SCALE_STRIDE: gl.constexpr,
    EXTRA_PAGE_SIZE: gl.constexpr,
    EXTRA_PAGE_STRIDE: gl.constexpr,
    EXTRA_TOKEN_STRIDE: gl.constexpr,
    EXTRA_SCALE_BASE: gl.constexpr,
    EXTRA_SCALE_STRIDE: gl.constexpr,
    SCALE_E8M0: gl.constexpr,
    ROPE_OFFSET: gl.constexpr,
    # the plan
    FIXED_SPLITS: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED_COST: gl.constexpr,
    SPLIT_COST: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    """Grid (programs * row tiles,), tiles fastest; `q_desc` describes q as [b * s_q * h_q, d_qk].

    An item is one query of a request.  Where the programs make a schedule, the first one also writes the list of split items
    for the combine kernel.
    """
    program = gl.program_id(0) // ROW_TILES
    tile = uniform(gl.program_id(0) % ROW_TILES)
    work = new_work(
        program, tile, items, programs, num_splits, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, schedule_ptr,
        S_Q, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, FIXED_SPLITS, UNIT, FIXED_COST, SPLIT_COST,
    )  # fmt: skip
    cache = Cache(
        cache_ptr.to(gl.pointer_type(gl.int32), bitcast=True), last_slot,
        PAGE_SIZE, PAGE_STRIDE // 4, TOKEN_STRIDE // 4, SCALE_BASE // 4, SCALE_STRIDE // 4,
    )  # fmt: skip
    extra = Cache(
        extra_cache_ptr.to(gl.pointer_type(gl.int32), bitcast=True), extra_last_slot,
        EXTRA_PAGE_SIZE, EXTRA_PAGE_STRIDE // 4, EXTRA_TOKEN_STRIDE // 4, EXTRA_SCALE_BASE // 4, EXTRA_SCALE_STRIDE // 4,
    )  # fmt: skip
    # It pays where two row tiles of a query fetch the same rows; MODEL1 has no registers for it.
    BY_HALVES: gl.constexpr = ROW_TILES > 1 and not SCALE_E8M0
    scale_log2 = gl.load(scale_ptr) * LOG2E
    DTYPE: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = q_desc.layout
    buffers = new_buffers(DTYPE, LAYOUT, HAS_ROPE)
    barriers = new_barriers(GATHERERS)
    gl.warp_specialize(
        [
            (consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                        S_Q, H_Q, H_Q, True, False, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, 0)),
            (consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                        S_Q, H_Q, H_Q, True, False, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, 1)),
            (gather, (work, buffers, barriers, q_desc, cache, extra, table_ptr, extra_table_ptr, table_stride_b, table_stride_s,
                      extra_table_stride_b, extra_table_stride_s, H_Q, HAS_ROPE, SCALE_E8M0, ROPE_OFFSET // 4, BY_HALVES, 0)),
            (gather, (work, buffers, barriers, q_desc, cache, extra, table_ptr, extra_table_ptr, table_stride_b, table_stride_s,
                      extra_table_stride_b, extra_table_stride_s, H_Q, HAS_ROPE, SCALE_E8M0, ROPE_OFFSET // 4, BY_HALVES, 1)),
        ],
        [4, 4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],  # the first partition gets what is left, as the second
    )  # fmt: skip
