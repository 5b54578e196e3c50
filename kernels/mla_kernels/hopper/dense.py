"""Dense paged attention on Hopper: two warpgroups that take turns, and a warp that fetches for them.

Keys come in pairs of blocks of 64.  Each of the two warpgroups multiplies the queries by one block of a pair, and owns one
half of the 512 output columns:

- warpgroup 0 scores block 0, publishes the running maximum and P0, and adds P0.V0 to its half; then it waits for P1 and
  adds P1.V1;
- warpgroup 1 scores block 1, waits for P0 and adds P0.V0 to its half while it makes P1, publishes P1, and adds P1.V1.

So one of them is in its softmax while the other keeps the tensor cores busy.  A block lies in shared memory in two halves
of its columns, each with a barrier that says it is full (bytes arrived) and one that says it is empty (its last product is
done).  The producer waits for `empty`, in the order in which the halves are given back, and fetches the next pair into it.

No cycle of waits exists: within a pair, in the order
  full(0, *) -> P0 -> empty(0, 0), empty(0, 1) -> full(1, *) -> P1 -> empty(1, *)
everything waits only for what stands before it, or for the pair before; and all three partitions see the same number of
pairs in the same items.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..softmax import LOG2E, LOWEST
from . import sizes
from .output import write
from .parts import (
    BLOCK,
    HALF,
    O_LAYOUT,
    PANEL,
    ROPE,
    ROWS_OF_O,
    ROWS_OF_S,
    S_LAYOUT,
    SLACK,
    TILE,
    Buffers,
    Work,
    new_barrier,
)
from .producer import producer
from .schedule import item_length, item_units, stretch, uniform

CONSUMER_REGISTERS = gl.constexpr(sizes.CONSUMER_REGISTERS)
PRODUCER_REGISTERS = gl.constexpr(sizes.PRODUCER_REGISTERS)


@gluon.jit
def _clear_rows(tile, first):
    """Zeroes the rows of a tile from `first` on: what lies behind the last key may be NaN, which P = 0 does not silence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    for panel in gl.static_range(HALF // PANEL):
        part = tile.slice(panel * PANEL, PANEL, dim=1)
        values = part.load(layout)
        part.store(gl.where(gl.expand_dims(row < first, 1), values, gl.zeros_like(values)))


def _scale_unless_one(n):
    """PTX that multiplies n accumulators by the factors of their rows, unless these are 1 in all lanes of the warp."""
    outputs, first, second = range(n), f"${2 * n}", f"${2 * n + 2}"  # pairs of columns belong to two rows in turn
    code = [
        "{ .reg .pred one, other;",
        f"setp.neu.f32 one, {first}, 0f3F800000;",
        f"setp.neu.or.f32 one, {second}, 0f3F800000, one;",
        "vote.sync.any.pred other, one, 0xffffffff;",
        "@!other bra DONE;",
        *(f"mul.f32 ${i}, ${i}, {second if i // 2 % 2 else first};" for i in outputs),
        "DONE: }",
    ]
    constraints = ["=f"] * n + [str(i) for i in outputs] + ["f"] * n
    return " ".join(code), ",".join(constraints)


SCALE_PACK = gl.constexpr(64)  # accumulators of a thread at once: inline assembly takes no more operands
SCALE_CODE, SCALE_CONSTRAINTS = map(gl.constexpr, _scale_unless_one(SCALE_PACK.value))


@gluon.jit
def _rescale(acc, factor):
    """Rows of the output times their factors, which are nearly always 1."""
    factors, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(factor, ROWS_OF_O), 1), acc)
    return gl.inline_asm_elementwise(
        SCALE_CODE, SCALE_CONSTRAINTS, [acc, factors], dtype=gl.float32, is_pure=True, pack=SCALE_PACK
    )


@gluon.jit
def _new_maximum(m, top):
    """The reference of the exponents: it follows the maximum of the scores once that is 2 ** 8 times larger.

    So the output is seldom rescaled, and P stays far below what its 16 bits hold.
    """
    return gl.where(top - m > SLACK, top, m)


@gluon.jit
def _add_others(acc, m, l, top, p, values):
    """Takes over the reference that the other warpgroup left in `top`, and begins to add its P.V: reference, sum, product."""
    m_other = top.load(ROWS_OF_S)
    alpha = gl.exp2(m - m_other)
    return m_other, l * alpha, warpgroup_mma(p, values, _rescale(acc, alpha), is_async=True)


@gluon.jit
def _consumer(
    work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
    S_Q: gl.constexpr, H_Q: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_ROPE: gl.constexpr, OUT_STRIDE_B: gl.constexpr, OUT_STRIDE_S: gl.constexpr, OUT_STRIDE_H: gl.constexpr,
    OWN: gl.constexpr,
):  # fmt: skip
    """One warpgroup: scores block `OWN` of every pair, and adds P.V of both blocks to half `OWN` of the output."""
    OTHER: gl.constexpr = 1 - OWN
    P_OF_O: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    DTYPE: gl.constexpr = buffers.q.dtype
    q_full, q_empty, full, empty, p_full, total_full = barriers
    no_scores = gl.zeros([TILE, BLOCK], gl.float32, layout=S_LAYOUT)
    pairs_done = 0
    for item in range(work.first_item, work.last_item + 1):
        item_parity = (item - work.first_item) & 1
        length, lo, hi = work.keys(item)
        m = gl.full([TILE], LOWEST, gl.float32, layout=ROWS_OF_S)
        l = gl.full([TILE], 0.0, gl.float32, layout=ROWS_OF_S)
        acc = gl.zeros([TILE, HALF], gl.float32, layout=O_LAYOUT)
        mbarrier.wait(q_full, item_parity)
        q_rope = buffers.q_rope.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        fence_async_shared()  # here, or the compiler puts one before the products of every block
        whole_blocks_end = gl.minimum(length - (S_Q - 1), hi) if CAUSAL else hi
        for pair in range((hi - lo + 2 * BLOCK - 1) // (2 * BLOCK)):
            parity = pairs_done & 1
            # Zero, which the compiler does not know: it would keep the descriptors of all tiles in registers it does not have.
            zero = pair >> 30

            # Scores of the own block; its own half comes first.
            mbarrier.wait(full[3 * OWN], parity)
            s = warpgroup_mma(
                buffers.q.index(zero + OWN), buffers.k.index(zero + 3 * OWN).permute((1, 0)), no_scores, use_acc=False,
                is_async=True,
            )  # fmt: skip
            if HAS_ROPE:
                s = warpgroup_mma(q_rope, buffers.rope.index(zero + OWN).permute((1, 0)), s, is_async=True)
            mbarrier.wait(full[1 + OWN], parity)
            s = warpgroup_mma(buffers.q.index(zero + OTHER), buffers.k.index(zero + 1 + OWN).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,)) * scale_log2
            start = lo + (2 * pair + OWN) * BLOCK
            if start + BLOCK > whole_blocks_end:
                key = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S_LAYOUT))
                end = hi + gl.arange(0, TILE, layout=ROWS_OF_S) * 0
                if CAUSAL:
                    row = work.tile * TILE + gl.arange(0, TILE, layout=ROWS_OF_S)
                    end = gl.minimum(end, length - S_Q + row // H_Q + 1)
                s = gl.where(gl.expand_dims(key, 0) < gl.expand_dims(end, 1), s, float("-inf"))
                if start + BLOCK > hi:
                    _clear_rows(buffers.k.index(zero + 2 * OWN), hi - start)
                    _clear_rows(buffers.k.index(zero + 2 * OWN + 1), hi - start)
                    fence_async_shared()  # here, or the compiler puts one before products that always run
            top = gl.max(s, 1)

            if OWN == 1:  # P0 and its maximum have to be there first
                mbarrier.wait(p_full[0], parity)
                m, l, product = _add_others(acc, m, l, buffers.top.index(0), buffers.p, buffers.k.index(zero + 1))

            m_new = _new_maximum(m, top)
            buffers.top.index(OWN).store(m_new)
            p = gl.exp2(s - gl.expand_dims(m_new, 1))
            p_rounded = p.to(DTYPE)
            if OWN == 0:
                buffers.p.store(p_rounded)
            else:
                buffers.q_rope.store(p_rounded)
            fence_async_shared()
            mbarrier.arrive(p_full[OWN])
            alpha = gl.exp2(m - m_new)
            l = l * alpha + gl.sum(p, 1)
            m = m_new
            if OWN == 1:
                acc = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty[1])

            product = warpgroup_mma(
                gl.convert_layout(p_rounded, P_OF_O), buffers.k.index(zero + 3 * OWN), _rescale(acc, alpha), is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(empty[3 * OWN])

            if OWN == 0:
                mbarrier.wait(p_full[1], parity)
                m, l, product = _add_others(acc, m, l, buffers.top.index(1), buffers.q_rope, buffers.k.index(zero + 2))
                acc = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty[2])
            pairs_done += 1

        buffers.total.index(OWN).store(l)
        mbarrier.arrive(total_full[OWN])
        mbarrier.wait(total_full[OTHER], item_parity)
        l = l + buffers.total.index(OTHER).load(ROWS_OF_S)
        mbarrier.arrive(q_empty)
        write(
            work, item, acc, gl.convert_layout(l, ROWS_OF_O), gl.convert_layout(m, ROWS_OF_O), out_ptr, lse_ptr,
            partial_out_ptr, partial_lse_ptr, sink_ptr, S_Q, H_Q, ROWS, HAS_SINK, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H,
            OWN,
        )  # fmt: skip


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
    ITEM_CHUNK: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    """Grid (programs * row tiles,), tiles fastest; `q_desc` describes q as [b * s_q * h_q, d_qk].

    Besides the results, the first program writes the list of split items for the combine kernel.
    """
    ROWS: gl.constexpr = S_Q * H_Q
    DTYPE: gl.constexpr = q_desc.dtype
    program = gl.program_id(0) // ROW_TILES
    # A range that the compiler knows would make it divide rows in pairs of 16 bits, and ptxas 13 adds wrongly to such pairs.
    tile = uniform(gl.program_id(0) % ROW_TILES)
    if FIXED_SPLITS:
        first_item = program // num_splits
        last_item = first_item
        units = item_units(item_length(lengths_ptr + first_item, max_tokens, True), UNIT)
        per_split = (units + num_splits - 1) // num_splits
        first_unit = gl.minimum(program % num_splits * per_split, units)
        end_unit = gl.minimum(first_unit + per_split, units)
        first_slot = gl.where(num_splits > 1, program, -1)
        last_slot = first_slot
    else:
        first_item, last_item, first_unit, end_unit, first_slot, last_slot = stretch(
            program, lengths_ptr, items, programs, max_tokens, schedule_ptr, gl.program_id(0) == 0,
            UNIT, FIXED_COST, SPLIT_COST, ITEM_CHUNK,
        )  # fmt: skip
    work = Work(lengths_ptr, max_tokens, tile, first_item, last_item, first_unit, end_unit, first_slot, last_slot, UNIT)
    scale_log2 = gl.load(scale_ptr) * LOG2E

    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_rope = gl.allocate_shared_memory(DTYPE, [TILE, ROPE], q_desc.layout)
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [2, TILE, HALF], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [4, BLOCK, HALF], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [2, BLOCK, ROPE], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [TILE, BLOCK], q_desc.layout),
        q_rope,
        gl.allocate_shared_memory(gl.float32, [2, TILE], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2, TILE], VECTOR),
    )
    barriers = (
        new_barrier(1),
        new_barrier(2),
        (new_barrier(1), new_barrier(1), new_barrier(1), new_barrier(1)),
        (new_barrier(1), new_barrier(1), new_barrier(1), new_barrier(1)),
        (new_barrier(1), new_barrier(1)),
        (new_barrier(1), new_barrier(1)),
    )
    gl.warp_specialize(
        [
            (_consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                         S_Q, H_Q, ROWS, CAUSAL, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, 0)),
            (_consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                         S_Q, H_Q, ROWS, CAUSAL, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, 1)),
            (producer, (work, buffers, barriers, q_desc, k_desc, table_ptr, table_stride, ROWS, HAS_ROPE, PAGE_SIZE,
                         PAGE_ROWS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # the first partition gets what is left, as the second
    )  # fmt: skip
