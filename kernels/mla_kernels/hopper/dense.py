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

# Without `from __future__ import annotations`: an aggregate looks at the annotations of its fields.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..softmax import LN2 as _LN2
from ..softmax import LOG2E as _LOG2E
from .gluon_names import aggregate, tma_load
from .schedule import item_length, item_units, stretch

LN2 = gl.constexpr(_LN2.value)
LOG2E = gl.constexpr(_LOG2E.value)
LOWEST = gl.constexpr(-1.0e30)  # a running maximum below every score, and finite also after it was subtracted from one

TILE = gl.constexpr(64)  # rows of a tile: what one wgmma takes
BLOCK = gl.constexpr(64)  # keys of a block
HALF = gl.constexpr(256)  # columns of a half of V
ROPE = gl.constexpr(64)  # columns of the key beyond V
PANEL = gl.constexpr(64)  # columns that TMA fetches at once: 128 bytes, the swizzle

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROWS_OF_S = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
ROWS_OF_O = gl.constexpr(gl.SliceLayout(1, O_LAYOUT.value))


@aggregate
class Work:
    """What one program does: a stretch of the line of all items."""

    lengths: gl.tensor
    max_tokens: gl.tensor
    tile: gl.tensor
    first_item: gl.tensor
    last_item: gl.tensor
    first_unit: gl.tensor  # of the first item
    end_unit: gl.tensor  # of the last item
    first_slot: gl.tensor  # of the scratch, for the first item; -1 if it is whole
    last_slot: gl.tensor
    UNIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, lengths, max_tokens, tile, first_item, last_item, first_unit, end_unit, first_slot, last_slot, UNIT):
        self.lengths = lengths
        self.max_tokens = max_tokens
        self.tile = tile
        self.first_item = first_item
        self.last_item = last_item
        self.first_unit = first_unit
        self.end_unit = end_unit
        self.first_slot = first_slot
        self.last_slot = last_slot
        self.UNIT = gl.constexpr(UNIT)

    @gluon.jit
    def keys(self, item):
        """Length of an item, and the keys [lo, hi) of it that are this program's."""
        length = item_length(self.lengths + item, self.max_tokens, True)
        lo = gl.where(item == self.first_item, self.first_unit, 0)
        hi = gl.where(item == self.last_item, self.end_unit, item_units(length, self.UNIT))
        # In tokens, the end of an item can lie beyond 32 bits.
        lo = gl.minimum(lo, length // self.UNIT + 1) * self.UNIT
        hi = gl.minimum(hi, length // self.UNIT + 1) * self.UNIT
        return length, gl.minimum(lo, length), gl.minimum(hi, length)

    @gluon.jit
    def slot(self, item):
        """Where the partial result of an item goes, -1 if it is whole."""
        return gl.where(item == self.first_item, self.first_slot, gl.where(item == self.last_item, self.last_slot, -1))


@aggregate
class Buffers:
    """Tiles in shared memory."""

    q: gl.shared_memory_descriptor  # [2, 64, 256]: halves of the columns
    k: gl.shared_memory_descriptor  # [4, 64, 256]: halves of the columns of block 0, then of block 1
    rope: gl.shared_memory_descriptor  # [2, 64, 64]: by block
    p: gl.shared_memory_descriptor  # [64, 64]: P0
    q_rope: gl.shared_memory_descriptor  # [64, 64]: until the warpgroups hold it in registers; then P1
    top: gl.shared_memory_descriptor  # fp32 [2, 64]: running maxima after block 0 and block 1
    total: gl.shared_memory_descriptor  # fp32 [2, 64]: sums of the warpgroups

    @gluon.constexpr_function
    def __init__(self, q, k, rope, p, q_rope, top, total):
        self.q = q
        self.k = k
        self.rope = rope
        self.p = p
        self.q_rope = q_rope
        self.top = top
        self.total = total


@gluon.jit
def _new_barrier(COUNT: gl.constexpr):
    # An allocation of its own: the compiler synchronises the threads between operations on two parts of one.
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def _fetch(desc, row, tile, barrier, FIRST: gl.constexpr, PANELS: gl.constexpr, BOX: gl.constexpr, offset: gl.constexpr):
    """Fetches `BOX` rows of a matrix, columns `FIRST` on in panels, into a tile from its row `offset` on."""
    for panel in gl.static_range(PANELS):
        part = tile
        if PANELS > 1:
            part = part.slice(panel * PANEL, PANEL, dim=1)
        if BOX < BLOCK:
            part = part.slice(offset, BOX, dim=0)
        tma_load(desc, [row, FIRST + panel * PANEL], barrier, part)


@gluon.jit
def _fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS: gl.constexpr, HAS_ROPE: gl.constexpr):
    row = item * ROWS + work.tile * TILE
    mbarrier.wait(q_empty, ((item - work.first_item) & 1) ^ 1)
    mbarrier.expect(q_full, TILE * (2 * HALF + (ROPE if HAS_ROPE else 0)) * 2)
    for half in gl.static_range(2):
        _fetch(q_desc, row, buffers.q.index(half), q_full, half * HALF, HALF // PANEL, TILE, 0)
    if HAS_ROPE:
        _fetch(q_desc, row, buffers.q_rope, q_full, 2 * HALF, 1, TILE, 0)


@gluon.jit
def _row(table_row, token, last, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr):
    """Row of a token in the matrix that the cache is; behind the last keys stand the last keys again."""
    token = gl.minimum(token, last)
    return gl.load(table_row + token // PAGE_SIZE) * PAGE_ROWS + token % PAGE_SIZE


@gluon.jit
def _rows(table_row, start, last, BOX: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr):
    """Where the boxes of a block begin."""
    if BOX == 64:
        rows = (_row(table_row, start, last, PAGE_SIZE, PAGE_ROWS),)
    elif BOX == 32:
        rows = (
            _row(table_row, start, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 32, last, PAGE_SIZE, PAGE_ROWS),
        )
    else:
        rows = (
            _row(table_row, start, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 16, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 32, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 48, last, PAGE_SIZE, PAGE_ROWS),
        )
    return rows


@gluon.jit
def _fetch_keys(
    buffers, full, empty, k_desc, rows, parity, WITH_ROPE: gl.constexpr, BOX: gl.constexpr, WHICH: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """Fetches one half of the columns of a block, and with the half that is needed first the RoPE part."""
    TILE_INDEX: gl.constexpr = 2 * WHICH + SIDE
    barrier = full[TILE_INDEX]
    mbarrier.wait(empty[TILE_INDEX], parity)
    mbarrier.expect(barrier, BLOCK * (HALF + (ROPE if WITH_ROPE else 0)) * 2)
    for box in gl.static_range(BLOCK // BOX):
        _fetch(k_desc, rows[box], buffers.k.index(TILE_INDEX), barrier, SIDE * HALF, HALF // PANEL, BOX, box * BOX)
        if WITH_ROPE:
            _fetch(k_desc, rows[box], buffers.rope.index(WHICH), barrier, 2 * HALF, 1, BOX, box * BOX)


@gluon.jit
def _producer(
    work, buffers, barriers, q_desc, k_desc, table_ptr, table_stride,
    ROWS: gl.constexpr, HAS_ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr,
):  # fmt: skip
    """Fetches the queries of every item and the keys of every pair."""
    q_full, q_empty, full, empty, p_full, total_full = barriers
    BOX: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK else BLOCK
    pairs_done = 0
    for item in range(work.first_item, work.last_item + 1):
        length, lo, hi = work.keys(item)
        table_row = table_ptr + item.to(gl.int64) * table_stride
        last = gl.maximum(hi - 1, 0) // BOX * BOX
        if lo >= hi:
            _fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
        for start in range(lo, hi, 2 * BLOCK):
            parity = (pairs_done & 1) ^ 1
            rows = _rows(table_row, start, last, BOX, PAGE_SIZE, PAGE_ROWS)
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, HAS_ROPE, BOX, 0, 0)
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, False, BOX, 0, 1)
            rows = _rows(table_row, start + BLOCK, last, BOX, PAGE_SIZE, PAGE_ROWS)
            if start == lo:  # what the first products of block 0 wait for comes first
                _fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
            # The right half is given back first.
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, HAS_ROPE, BOX, 1, 1)
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, False, BOX, 1, 0)
            pairs_done += 1


@gluon.jit
def _clear_rows(tile, first):
    """Zeroes the rows of a tile from `first` on: what lies behind the last key may be NaN, which P = 0 does not silence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    for panel in gl.static_range(HALF // PANEL):
        part = tile.slice(panel * PANEL, PANEL, dim=1)
        values = part.load(layout)
        part.store(gl.where(gl.expand_dims(row < first, 1), values, gl.zeros_like(values)))


@gluon.jit
def _write(
    work, item, acc, l, m, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
    S_Q: gl.constexpr, H_Q: gl.constexpr, ROWS: gl.constexpr, HAS_SINK: gl.constexpr,
    OUT_STRIDE_B: gl.constexpr, OUT_STRIDE_S: gl.constexpr, OUT_STRIDE_H: gl.constexpr, HALF_INDEX: gl.constexpr,
):  # fmt: skip
    """Writes one half of the columns of an item, and with half 0 its log-sum-exp."""
    row = work.tile * TILE + gl.arange(0, TILE, layout=ROWS_OF_O)
    row_ok = row < ROWS
    mask = gl.expand_dims(row_ok, 1)
    col = gl.expand_dims(HALF_INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, O_LAYOUT)), 0)
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
        query = row // H_Q
        head = row % H_Q
        if HAS_SINK:
            sink = gl.load(sink_ptr + head, mask=row_ok, other=0.0)
            factor = factor * gl.where(empty, 0.0, 1.0 / (1.0 + gl.exp2((sink - lse) * LOG2E)))
        out_row = item.to(gl.int64) * OUT_STRIDE_B + query.to(gl.int64) * OUT_STRIDE_S + head.to(gl.int64) * OUT_STRIDE_H
        value = (acc * gl.expand_dims(factor, 1)).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + gl.expand_dims(out_row, 1) + col, value, mask=mask)
        if HALF_INDEX == 0:
            lse_row = (item.to(gl.int64) * H_Q + head) * S_Q + query
            gl.store(lse_ptr + lse_row, gl.where(empty, float("inf"), lse), mask=row_ok)


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


SCALE_PACK = gl.constexpr(64)
SCALE_CODE, SCALE_CONSTRAINTS = map(gl.constexpr, _scale_unless_one(64))


@gluon.jit
def _rescale(acc, factor, LAZY: gl.constexpr):
    factor = gl.expand_dims(gl.convert_layout(factor, ROWS_OF_O), 1)
    if LAZY:
        factors, _ = gl.broadcast(factor, acc)
        acc = gl.inline_asm_elementwise(
            SCALE_CODE, SCALE_CONSTRAINTS, [acc, factors], dtype=gl.float32, is_pure=True, pack=SCALE_PACK
        )
    else:
        acc = acc * factor
    return acc


@gluon.jit
def _new_maximum(m, top, LAZY: gl.constexpr):
    if LAZY:
        m = gl.where(top > m + 8.0, top, m)
    else:
        m = gl.maximum(m, top)
    return m


@gluon.jit
def _consumer(
    work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
    S_Q: gl.constexpr, H_Q: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_ROPE: gl.constexpr, OUT_STRIDE_B: gl.constexpr, OUT_STRIDE_S: gl.constexpr, OUT_STRIDE_H: gl.constexpr,
    LAZY: gl.constexpr, OWN: gl.constexpr,
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
            s = warpgroup_mma(
                buffers.q.index(zero + OTHER), buffers.k.index(zero + 1 + OWN).permute((1, 0)), s, is_async=True
            )
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
                m_other = buffers.top.index(0).load(ROWS_OF_S)
                alpha = gl.exp2(m - m_other)
                l = l * alpha
                m = m_other
                product = warpgroup_mma(buffers.p, buffers.k.index(zero + 1), _rescale(acc, alpha, LAZY), is_async=True)

            m_new = _new_maximum(m, top, LAZY)
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
                gl.convert_layout(p_rounded, P_OF_O), buffers.k.index(zero + 3 * OWN), _rescale(acc, alpha, LAZY), is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(empty[3 * OWN])

            if OWN == 0:
                mbarrier.wait(p_full[1], parity)
                m_other = buffers.top.index(1).load(ROWS_OF_S)
                alpha = gl.exp2(m - m_other)
                l = l * alpha
                m = m_other
                product = warpgroup_mma(buffers.q_rope, buffers.k.index(zero + 2), _rescale(acc, alpha, LAZY), is_async=True)
                acc = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty[2])
            pairs_done += 1

        buffers.total.index(OWN).store(l)
        mbarrier.arrive(total_full[OWN])
        mbarrier.wait(total_full[OTHER], item_parity)
        l = l + buffers.total.index(OTHER).load(ROWS_OF_S)
        mbarrier.arrive(q_empty)
        _write(
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
    LAZY: gl.constexpr,
):
    """Grid (programs * row tiles,), tiles fastest; `q_desc` describes q as [b * s_q * h_q, d_qk].

    Besides the results, the first program writes the list of split items for the combine kernel.
    """
    ROWS: gl.constexpr = S_Q * H_Q
    DTYPE: gl.constexpr = q_desc.dtype
    program = gl.program_id(0) // ROW_TILES
    tile = gl.program_id(0) % ROW_TILES
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
    work = Work(
        lengths_ptr, max_tokens, tile, first_item, last_item, first_unit, end_unit, first_slot, last_slot, UNIT
    )
    scale_log2 = gl.load(scale_ptr) * LOG2E

    # Registers of a thread: addresses of several boxes to a block take the producer more than it has.
    MORE: gl.constexpr = 16 if PAGE_SIZE < BLOCK else 0
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
        _new_barrier(1),
        _new_barrier(2),
        (_new_barrier(1), _new_barrier(1), _new_barrier(1), _new_barrier(1)),
        (_new_barrier(1), _new_barrier(1), _new_barrier(1), _new_barrier(1)),
        (_new_barrier(1), _new_barrier(1)),
        (_new_barrier(1), _new_barrier(1)),
    )
    gl.warp_specialize(
        [
            (_consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                         S_Q, H_Q, ROWS, CAUSAL, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, LAZY, 0)),
            (_consumer, (work, buffers, barriers, scale_log2, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sink_ptr,
                         S_Q, H_Q, ROWS, CAUSAL, HAS_SINK, HAS_ROPE, OUT_STRIDE_B, OUT_STRIDE_S, OUT_STRIDE_H, LAZY, 1)),
            (_producer, (work, buffers, barriers, q_desc, k_desc, table_ptr, table_stride, ROWS, HAS_ROPE, PAGE_SIZE,
                         PAGE_ROWS)),
        ],
        [4, 1],
        [240 - MORE // 2, 24 + MORE],  # the first partition gets what is left, as much as the second
    )  # fmt: skip
