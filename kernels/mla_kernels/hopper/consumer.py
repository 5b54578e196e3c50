"""The partitions that multiply: two warpgroups that take turns.

Keys come in pairs of blocks of 64.  Each of the two warpgroups multiplies the queries by one block of a pair, and owns one
half of the 512 output columns:

- warpgroup 0 scores block 0, publishes the running maximum and P0, and adds P0.V0 to its half; then it waits for P1 and
  adds P1.V1;
- warpgroup 1 scores block 1, waits for P0 and adds P0.V0 to its half while it makes P1, publishes P1, and adds P1.V1.

So one of them is in its softmax while the other keeps the tensor cores busy.  A block lies in shared memory in two halves
of its columns, each with a barrier that says it is full (every partition that fetches has filled its share) and one that
says it is empty (its last product is done).  Those that fetch wait for `empty`, each half's before they fill it with keys of
the next pair.

No cycle of waits exists: within a pair, in the order
  full(0, *) -> P0 -> empty(0, 0), empty(0, 1) -> full(1, *) -> P1 -> empty(1, *)
everything waits only for what stands before it, or for the pair before; the queries of an item wait for the end of the item
before; and all partitions see the same number of pairs in the same items.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ..softmax import LOWEST
from .output import write
from .parts import BLOCK, HALF, NARROW_O_LAYOUT, O_LAYOUT, PANEL, ROWS_OF_S, S_LAYOUT, SLACK, TILE, pairs_of


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
    factors, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), 1), acc)
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
def consumer(
    work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
    S_Q: gl.constexpr, H_Q: gl.constexpr, ROWS: gl.constexpr, SPARSE: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_ROPE: gl.constexpr, OUT_STRIDE_B: gl.constexpr, OUT_STRIDE_S: gl.constexpr,
    OUT_STRIDE_H: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """One warpgroup: scores block `OWN` of every pair, and adds P.V of both blocks to half `OWN` of the output."""
    OTHER: gl.constexpr = 1 - OWN
    OUT_LAYOUT: gl.constexpr = NARROW_O_LAYOUT if SPARSE else O_LAYOUT
    ROWS_OF_O: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    P_OF_O: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    DTYPE: gl.constexpr = buffers.q.dtype
    q_full, q_empty, full, empty, p_full, total_full = barriers
    no_scores = gl.zeros([TILE, BLOCK], gl.float32, layout=S_LAYOUT)
    pairs_done = 0
    for item in range(work.first_item, work.last_item + 1):
        item_parity = (item - work.first_item) & 1
        length, lo, hi, extra_lo, extra_hi = work.keys(item)
        m = gl.full([TILE], LOWEST, gl.float32, layout=ROWS_OF_S)
        l = gl.full([TILE], 0.0, gl.float32, layout=ROWS_OF_S)
        acc = gl.zeros([TILE, HALF], gl.float32, layout=OUT_LAYOUT)
        mbarrier.wait(q_full, item_parity)
        q_rope = buffers.q_rope
        if not SPARSE:  # P1 lies over it
            q_rope = buffers.q_rope.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            fence_async_shared()  # here, or the compiler puts one before the products of every block
        whole_blocks_end = gl.minimum(length - (S_Q - 1), hi) if CAUSAL else hi
        for pair in range(pairs_of(hi - lo) + pairs_of(extra_hi - extra_lo)):
            parity = pairs_done & 1
            # Zero, which the compiler does not know: it would keep the descriptors of all tiles in registers it does not have.
            zero = pair >> 30

            # Scores of the own block; its own half comes first.
            mbarrier.wait(full[3 * OWN], parity)
            if SPARSE:  # written by threads; their fence would wait for the loads that they have under way
                fence_async_shared()
            s = warpgroup_mma(
                buffers.q.index(zero + OWN), buffers.k.index(zero + 3 * OWN).permute((1, 0)), no_scores, use_acc=False,
                is_async=True,
            )  # fmt: skip
            if HAS_ROPE and not SPARSE:
                s = warpgroup_mma(q_rope, buffers.rope.index(zero + OWN).permute((1, 0)), s, is_async=True)
            mbarrier.wait(full[1 + OWN], parity)
            if SPARSE:
                fence_async_shared()
            if HAS_ROPE and SPARSE:
                s = warpgroup_mma(q_rope, buffers.rope.index(zero + OWN).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(buffers.q.index(zero + OTHER), buffers.k.index(zero + 1 + OWN).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,)) * scale_log2
            if SPARSE:
                valid = buffers.valid.index(OWN).load(gl.SliceLayout(0, S_LAYOUT))
                s = gl.where(gl.expand_dims(valid, 0) != 0, s, float("-inf"))
            else:
                start = lo + (2 * pair + OWN) * BLOCK
                if start + BLOCK > whole_blocks_end:
                    key = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S_LAYOUT))
                    end = hi + gl.arange(0, TILE, layout=ROWS_OF_S) * 0
                    if CAUSAL:
                        row = work.tile * TILE + gl.arange(0, TILE, layout=ROWS_OF_S)
                        # A constant added to the quotients, which have 16 bits, is added in pairs, and ptxas could lose it.
                        end = gl.minimum(end, (length - (S_Q - 1)) + row // H_Q)
                    s = gl.where(gl.expand_dims(key, 0) < gl.expand_dims(end, 1), s, float("-inf"))
                    if start + BLOCK > hi:
                        _clear_rows(buffers.k.index(zero + 2 * OWN), hi - start)
                        _clear_rows(buffers.k.index(zero + 2 * OWN + 1), hi - start)
                        fence_async_shared()  # here, or the compiler puts one before products that always run
            top = gl.max(s, 1)

            if OWN == 1:  # P0 and its maximum have to be there first
                mbarrier.wait(p_full[0], parity)
                m, l, product = _add_others(acc, m, l, buffers.top.index(0), buffers.p0, buffers.k.index(zero + 1))

            m_new = _new_maximum(m, top)
            buffers.top.index(OWN).store(m_new)
            p = gl.exp2(s - gl.expand_dims(m_new, 1))
            p_rounded = p.to(DTYPE)
            if OWN == 0:
                buffers.p0.store(p_rounded)
            else:
                buffers.p1.store(p_rounded)
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
                m, l, product = _add_others(acc, m, l, buffers.top.index(1), buffers.p1, buffers.k.index(zero + 2))
                acc = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty[2])
            pairs_done += 1

        buffers.total.index(OWN).store(l)
        mbarrier.arrive(total_full[OWN])
        mbarrier.wait(total_full[OTHER], item_parity)
        l = l + buffers.total.index(OTHER).load(ROWS_OF_S)
        if item == work.last_item:
            gdc_launch_dependents()  # the kernel that merges may be made ready
        write(
            work, item, acc, gl.convert_layout(l, ROWS_OF_O), gl.convert_layout(m, ROWS_OF_O),
            buffers.q.index(OWN), q_empty, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
            S_Q, H_Q, ROWS, SPARSE, CAUSAL, HAS_SINK, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, OWN,
        )  # fmt: skip
