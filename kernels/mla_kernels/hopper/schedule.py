"""The schedule of a call as each program of a Gluon kernel makes it for itself: the same line as in `..schedule`.

A separate kernel, however short, would cost a small call more than the attention does.  All is counted in 32 bits: a plan
sees to it that the line is shorter than `LONGEST_LINE`.

There are never more programs than run at once, so with more items the whole schedule gives each as many neighbours.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..problem import INT32_MAX as _INT32_MAX
from ..schedule import item_lengths, item_units
from .parts import Work

LONGEST_LINE = 2**30

INT32_MAX = gl.constexpr(_INT32_MAX)

# Items that a schedule looks at at once: few, by each warp for itself, as warps would have to wait for one another; or many.
FEW = gl.constexpr(32)
MANY = gl.constexpr(512)


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
def _costs(
    start, items, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, fixed_cost,
    QUERIES: gl.constexpr, HAS_LENGTH: gl.constexpr, HAS_EXTRA: gl.constexpr, HAS_EXTRA_LENGTH: gl.constexpr,
    UNIT: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Items from `start` on, which of them exist, and their costs."""
    layout: gl.constexpr = gl.BlockedLayout([CHUNK // 128 if CHUNK > 128 else 1], [32], [4], [0])
    item = start + gl.arange(0, CHUNK, layout=layout)
    real = item < items
    length, extra_length = item_lengths(
        item, real, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
        QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH,
    )  # fmt: skip
    return item, real, gl.where(real, item_units(length, extra_length, UNIT) + fixed_cost, 0)


@gluon.jit
def uniform(x):
    """x, which is the same in all lanes, in a way that lets the compiler know it."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def stretch(
    program, items, programs, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, splits_ptr, writes_list, fixed_cost,
    QUERIES: gl.constexpr, HAS_LENGTH: gl.constexpr, HAS_EXTRA: gl.constexpr, HAS_EXTRA_LENGTH: gl.constexpr,
    UNIT: gl.constexpr, SPLIT_COST: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """A program's first and last item, first and end unit, and scratch slots (-1 where an item is whole).

    With `writes_list`, also writes the number of split items and (item, first slot, pieces) of each to `splits_ptr`.
    """
    total = gl.to_tensor(0)
    longest = gl.to_tensor(0)
    for start in range(0, items, CHUNK):
        item, real, cost = _costs(
            start, items, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, fixed_cost,
            QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT, CHUNK,
        )  # fmt: skip
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
    if longest * items_each > quota + (fixed_cost + SPLIT_COST):
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
            item, real, cost = _costs(
                start, items, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, fixed_cost,
                QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT, CHUNK,
            )  # fmt: skip
            end = base + gl.associative_scan(cost, 0, _add)
            begin = end - cost
            first_program = (begin + fixed_cost) // quota
            pieces = gl.where(real, (end - 1) // quota - first_program + 1, 1)
            split = (pieces > 1).to(gl.int32)
            done = end <= lo  # the item ends before the stretch
            begun = (begin + fixed_cost < hi) & real  # it has units before the end of the stretch
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
        first_unit = gl.maximum(lo - first_start - fixed_cost, 0)
        end_unit = gl.minimum(hi, last_end) - last_start - fixed_cost
        first_partial = (first_unit > 0) | ((first_item == last_item) & (hi < last_end))
        first_slot = gl.where(first_partial, program + first_rank, -1)
        last_slot = gl.where(hi >= last_end, -1, program + last_rank)
    if writes_list:
        gl.store(splits_ptr, num_split)
    return first_item, last_item, first_unit, end_unit, first_slot, last_slot


@gluon.jit
def made_stretch(
    program, items, programs, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, splits_ptr, writes_list, fixed_cost,
    QUERIES: gl.constexpr, HAS_LENGTH: gl.constexpr, HAS_EXTRA: gl.constexpr, HAS_EXTRA_LENGTH: gl.constexpr,
    UNIT: gl.constexpr, SPLIT_COST: gl.constexpr,
):  # fmt: skip
    """`stretch`, looking at few or many items at once."""
    if items <= FEW:
        first_item, last_item, first_unit, end_unit, first_slot, last_slot = stretch(
            program, items, programs, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, splits_ptr, writes_list,
            fixed_cost, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT, SPLIT_COST, FEW,
        )  # fmt: skip
    else:
        first_item, last_item, first_unit, end_unit, first_slot, last_slot = stretch(
            program, items, programs, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, splits_ptr, writes_list,
            fixed_cost, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT, SPLIT_COST, MANY,
        )  # fmt: skip
    return first_item, last_item, first_unit, end_unit, first_slot, last_slot


@gluon.jit
def fixed_stretch(
    program, num_splits, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
    QUERIES: gl.constexpr, HAS_LENGTH: gl.constexpr, HAS_EXTRA: gl.constexpr, HAS_EXTRA_LENGTH: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """The same of a program that has one of `num_splits` equal ranges of an item."""
    item = program // num_splits
    length, extra_length = item_lengths(
        item, item >= 0, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
        QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH,
    )  # fmt: skip
    units = item_units(length, extra_length, UNIT)
    # By single keys, the ends of the ranges can lie beyond 32 bits before they are cut to the item.
    wide = units.to(gl.int64) if UNIT == 1 else units
    per_split = (wide + (num_splits - 1)) // num_splits
    first_unit = gl.minimum(program % num_splits * per_split, wide)
    end_unit = gl.minimum(first_unit + per_split, wide)
    slot = gl.where(num_splits > 1, program, -1)
    return item, item, first_unit.to(gl.int32), end_unit.to(gl.int32), slot, slot


@gluon.jit
def even_stretch(
    program, items, programs, pieces, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
    QUERIES: gl.constexpr, HAS_EXTRA: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """The same where all items have as many keys: an item has so many pieces, or a program has so many whole items."""
    first_item, last_item, first_unit, end_unit, first_slot, last_slot = fixed_stretch(
        program, pieces, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, QUERIES, False, HAS_EXTRA, False, UNIT
    )
    if pieces == 1:
        items_each = (items + programs - 1) // programs
        first_item = program * items_each
        last_item = first_item + items_each - 1
    return first_item, gl.minimum(last_item, items - 1), first_unit, end_unit, first_slot, last_slot


@gluon.jit
def new_work(
    program, tile, items, programs, num_splits, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, splits_ptr,
    QUERIES: gl.constexpr, HAS_LENGTH: gl.constexpr, HAS_EXTRA: gl.constexpr, HAS_EXTRA_LENGTH: gl.constexpr,
    FIXED_SPLITS: gl.constexpr, UNIT: gl.constexpr, FIXED_COST: gl.constexpr, SPLIT_COST: gl.constexpr,
):  # fmt: skip
    """The work of a program.

    Without `FIXED_SPLITS`, `num_splits` is the number of pieces of every item if that is known, which it can be where there
    are no lengths; or 0: then the program makes the schedule, and the first one also writes the list of split items.
    """
    if FIXED_SPLITS:
        first_item, last_item, first_unit, end_unit, first_slot, last_slot = fixed_stretch(
            program, num_splits, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
            QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT,
        )  # fmt: skip
    else:
        # With a program or more for every item all of them start and end about as many.
        fixed_cost = gl.where(items <= programs, 0, FIXED_COST)
        first = gl.program_id(0) == 0
        if num_splits > 0 and not (HAS_LENGTH or HAS_EXTRA_LENGTH):
            first_item, last_item, first_unit, end_unit, first_slot, last_slot = even_stretch(
                program, items, programs, num_splits, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
                QUERIES, HAS_EXTRA, UNIT,
            )  # fmt: skip
        else:
            first_item, last_item, first_unit, end_unit, first_slot, last_slot = made_stretch(
                program, items, programs, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, splits_ptr, first,
                fixed_cost, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT, SPLIT_COST,
            )  # fmt: skip
        # What loops and addresses follow from is kept in uniform registers, or the products' operands would not be.
        first_item, last_item, first_unit = uniform(first_item), uniform(last_item), uniform(first_unit)
        end_unit, first_slot, last_slot = uniform(end_unit), uniform(first_slot), uniform(last_slot)
    return Work(
        lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens, tile, first_item, last_item, first_unit, end_unit, first_slot,
        last_slot, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT,
    )  # fmt: skip
