"""The schedule of a call as each program of a Gluon kernel makes it for itself: the same line as in `..schedule`.

A separate kernel, however short, would cost a small call more than the attention does.  All is counted in 32 bits: a plan
sees to it that the line is shorter than `LONGEST_LINE`.

There are never more programs than run at once, so with more items the whole schedule gives each as many neighbours.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..problem import INT32_MAX as _INT32_MAX

LONGEST_LINE = 2**30

INT32_MAX = gl.constexpr(_INT32_MAX)


@gluon.jit
def item_length(ptr, max_tokens, mask):
    """Keys of an item, or of a vector of items, clamped to what the table holds."""
    return gl.minimum(gl.maximum(gl.load(ptr, mask=mask, other=0), 0), max_tokens)


@gluon.jit
def item_units(length, UNIT: gl.constexpr):
    """Units on the line of an item; an item without keys has one too, so that its rows are written."""
    return gl.maximum(length // UNIT + (length % UNIT > 0), 1)


@gluon.jit
def _add(a, b):
    return a + b


# Several reductions in one: each by itself would have all warps wait for one another.
@gluon.jit
def _sum_and_maximum(a0, a1, b0, b1):
    return a0 + b0, gl.maximum(a1, b1)


@gluon.jit
def _five_sums_and_four_maxima(a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8):
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4,
        gl.maximum(a5, b5), gl.maximum(a6, b6), gl.maximum(a7, b7), gl.maximum(a8, b8),
    )  # fmt: skip


@gluon.jit
def _costs(lengths_ptr, start, items, max_tokens, UNIT: gl.constexpr, FIXED_COST: gl.constexpr, CHUNK: gl.constexpr):
    """Items from `start` on, which of them exist, and their costs."""
    layout: gl.constexpr = gl.BlockedLayout([CHUNK // 128], [32], [4], [0])
    item = start + gl.arange(0, CHUNK, layout=layout)
    real = item < items
    units = item_units(item_length(lengths_ptr + item, max_tokens, real), UNIT)
    return item, real, gl.where(real, units + FIXED_COST, 0)


@gluon.jit
def uniform(x):
    """x, which is the same in all lanes, in a way that lets the compiler know it."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def stretch(
    program, lengths_ptr, items, programs, max_tokens, splits_ptr, writes_list,
    UNIT: gl.constexpr, FIXED_COST: gl.constexpr, SPLIT_COST: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """A program's first and last item, first and end unit, and scratch slots (-1 where an item is whole).

    With `writes_list`, also writes the number of split items and (item, first slot, pieces) of each to `splits_ptr`.
    """
    total = gl.to_tensor(0)
    longest = gl.to_tensor(0)
    for start in range(0, items, CHUNK):
        item, real, cost = _costs(lengths_ptr, start, items, max_tokens, UNIT, FIXED_COST, CHUNK)
        chunk_total, chunk_longest = gl.reduce((cost, cost), 0, _sum_and_maximum)
        total += chunk_total
        longest = gl.maximum(longest, chunk_longest)
    quota = gl.maximum((total + programs - 1) // programs, 1)
    items_each = (items + programs - 1) // programs

    # Whole: as many items for every program.
    first_item = program * items_each
    last_item = gl.minimum(first_item + items_each, items) - 1
    end_unit = gl.to_tensor(INT32_MAX)
    first_slot = gl.to_tensor(-1)
    last_slot = gl.to_tensor(-1)
    num_split = gl.to_tensor(0)
    first_unit = gl.to_tensor(0)
    if longest * items_each > quota + (FIXED_COST + SPLIT_COST):
        # Balanced: a stretch [lo, hi) of the line, found by comparing it with the ends of all items.
        lo = program * quota
        hi = gl.minimum(lo + quota, total)
        base = total * 0
        first_item = 0 * program
        last_item = 0 * program - 1
        first_rank = 0 * program
        last_rank = 0 * program
        first_start = total * 0
        last_start = total * 0
        last_end = total * 0
        for start in range(0, items, CHUNK):
            item, real, cost = _costs(lengths_ptr, start, items, max_tokens, UNIT, FIXED_COST, CHUNK)
            end = base + gl.associative_scan(cost, 0, _add)
            begin = end - cost
            first_program = (begin + FIXED_COST) // quota
            pieces = gl.where(real, (end - 1) // quota - first_program + 1, 1)
            split = (pieces > 1).to(gl.int32)
            done = end <= lo  # the item ends before the stretch
            begun = (begin + FIXED_COST < hi) & real  # it has units before the end of the stretch
            left = end < hi  # it ends inside the stretch, or before
            is_done = done.to(gl.int32)
            n_done, n_begun, done_splits, left_splits, splits, done_end, begun_begin, begun_end, last = gl.reduce(
                (
                    is_done, begun.to(gl.int32), is_done * split, left.to(gl.int32) * split, split,
                    gl.where(done, end, 0), gl.where(begun, begin, 0), gl.where(begun, end, 0), end,
                ), 0, _five_sums_and_four_maxima,
            )  # fmt: skip
            first_item += n_done
            last_item += n_begun
            first_rank += done_splits
            last_rank += left_splits
            first_start = gl.maximum(first_start, done_end)
            last_start = gl.maximum(last_start, begun_begin)
            last_end = gl.maximum(last_end, begun_end)
            if writes_list:
                rank = num_split + gl.associative_scan(split, 0, _add) - split
                entry = splits_ptr + 1 + rank * 3
                gl.store(entry, item, mask=split > 0)
                gl.store(entry + 1, first_program + rank, mask=split > 0)
                gl.store(entry + 2, pieces, mask=split > 0)
            base = last
            num_split += splits
        first_unit = gl.maximum(lo - first_start - FIXED_COST, 0)
        end_unit = gl.minimum(hi, last_end) - last_start - FIXED_COST
        first_partial = (first_unit > 0) | ((first_item == last_item) & (hi < last_end))
        first_slot = gl.where(first_partial, program + first_rank, -1)
        last_slot = gl.where(hi >= last_end, -1, program + last_rank)
    if writes_list:
        gl.store(splits_ptr, num_split)
    # What loops and addresses follow from is kept in uniform registers, or the products' operands would not be.
    return (
        uniform(first_item), uniform(last_item), uniform(first_unit), uniform(end_unit), uniform(first_slot),
        uniform(last_slot),
    )  # fmt: skip
