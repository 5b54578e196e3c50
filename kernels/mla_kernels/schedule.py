"""The schedule of a call, made on the device from the lengths.

Work comes in *items*: a request (dense), or one query of a request (sparse).  An item is a line of *units*, `UNIT` tokens
each, first those of the main cache, then those of the extra cache.  Every head tile of an item does the same work, so one
schedule serves all tiles.  A *program* owns one contiguous stretch of the line of all items, laid end to end with
`FIXED_COST` empty units before each (what a prologue and an epilogue cost).

Two schedules compete, by their estimated time:

- whole: a program per item, nothing is split and nothing needs merging.  Full batches of similar lengths take this one.
- balanced: `programs` equal stretches.  An item that lies in more than one is *split*: each piece writes a partial result
  into a scratch slot of its own, and the combine kernel merges them.  At most `programs - 1` cuts exist, so at most
  `programs - 1 + min(items, programs - 1)` slots, whatever the lengths.

Layout of the schedule, int32: `WORK_FIELDS` numbers per program (`max(programs, items)` of them), then the number of
split items, then (item, first slot, number of pieces) for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

# First item, last item, first unit, end unit, scratch slots of the first and the last item (-1 where it is not split; that
# of the first holds where they are one).
WORK_FIELDS = tl.constexpr(6)


def num_slots(programs: int, items: int) -> int:
    """Scratch slots that a balanced schedule can need."""
    return max(programs - 1 + min(items, programs - 1), 1)


def schedule_size(programs: int, listed: int, items: int) -> int:
    """Number of int32 in the schedule of which `listed` programs read what they do."""
    return WORK_FIELDS.value * listed + 1 + 3 * max(min(items, programs - 1), 1)


@triton.jit
def item_lengths(
    item,
    mask,
    lengths_ptr,
    extra_lengths_ptr,
    max_tokens,
    extra_tokens,
    QUERIES: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTH: tl.constexpr,
):
    """Keys of an item (or of a vector of items) in the main and in the extra cache, clamped to what the tables hold."""
    request = item // QUERIES
    length = item * 0 + max_tokens
    if HAS_LENGTH:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + request, mask=mask, other=0), 0), max_tokens)
    extra_length = item * 0
    if HAS_EXTRA:
        extra_length += extra_tokens
        if HAS_EXTRA_LENGTH:
            given = tl.load(extra_lengths_ptr + request, mask=mask, other=0)
            extra_length = tl.minimum(tl.maximum(given, 0), extra_tokens)
    return length, extra_length


@triton.jit
def item_units(length, extra_length, UNIT: tl.constexpr):
    """Units on the line of an item; an item without keys has one too, so that its rows are written."""
    return tl.maximum((length + UNIT - 1) // UNIT + (extra_length + UNIT - 1) // UNIT, 1)


@triton.jit
def _chunk_of_items(
    start,
    items,
    lengths_ptr,
    extra_lengths_ptr,
    max_tokens,
    extra_tokens,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Items from `start` on, which of them exist, and their units."""
    item = start + tl.arange(0, CHUNK)
    real = item < items
    length, extra_length = item_lengths(
        item, real, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
        QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH,
    )  # fmt: skip
    return item, real, item_units(length, extra_length, UNIT)


@triton.jit(do_not_specialize=["items", "programs", "max_tokens", "extra_tokens"])
def schedule_kernel(
    lengths_ptr,
    extra_lengths_ptr,
    items,
    programs,
    max_tokens,
    extra_tokens,
    schedule_ptr,
    QUERIES: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTH: tl.constexpr,
    UNIT: tl.constexpr,
    FIXED_COST: tl.constexpr,
    SPLIT_COST: tl.constexpr,
    ITEM_CHUNK: tl.constexpr,
    PAIR_CHUNK: tl.constexpr,
    PROGRAM_BLOCK: tl.constexpr,
):
    """One program makes the schedule: grid (1,)."""
    total = tl.zeros([], tl.int64)
    longest = tl.zeros([], tl.int32)
    for start in range(0, items, ITEM_CHUNK):
        item, real, units = _chunk_of_items(
            start, items, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
            ITEM_CHUNK, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT,
        )  # fmt: skip
        cost = tl.where(real, units + FIXED_COST, 0)
        total += tl.sum(cost.to(tl.int64), 0)
        longest = tl.maximum(longest, tl.max(cost, 0))

    quota = tl.maximum((total + programs - 1) // programs, 1)
    mean = total // items
    rounds = (items + programs - 1) // programs
    whole_time = tl.maximum(tl.maximum(mean * rounds, longest), quota + (longest - mean) // 2)
    if items <= programs:
        whole_time = longest.to(tl.int64)
    whole = whole_time <= quota + FIXED_COST + SPLIT_COST
    slots = tl.maximum(programs, items)

    if whole:
        for start in range(0, slots, ITEM_CHUNK):
            item, real, units = _chunk_of_items(
                start, items, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
                ITEM_CHUNK, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT,
            )  # fmt: skip
            work = schedule_ptr + item * WORK_FIELDS
            tl.store(work, item, mask=item < slots)
            tl.store(work + 1, tl.where(real, item, item - 1), mask=item < slots)
            tl.store(work + 2, item * 0, mask=item < slots)
            tl.store(work + 3, units, mask=item < slots)
            tl.store(work + 4, item * 0 - 1, mask=item < slots)
            tl.store(work + 5, item * 0 - 1, mask=item < slots)
        tl.store(schedule_ptr + slots * WORK_FIELDS, 0)
    else:
        # A program's stretch [lo, hi) is found by comparing it with the ends of all items, a block of items at a time.
        program = tl.arange(0, PROGRAM_BLOCK)
        lo = program * quota
        hi = tl.minimum(lo + quota, total)
        first_item = program * 0
        last_item = program * 0 - 1
        first_rank = program * 0
        last_rank = program * 0
        first_start = lo * 0
        last_start = lo * 0
        last_end = lo * 0
        base = tl.zeros([], tl.int64)
        num_split = tl.zeros([], tl.int32)
        splits_ptr = schedule_ptr + slots * WORK_FIELDS + 1
        for start in range(0, items, PAIR_CHUNK):
            item, real, units = _chunk_of_items(
                start, items, lengths_ptr, extra_lengths_ptr, max_tokens, extra_tokens,
                PAIR_CHUNK, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT,
            )  # fmt: skip
            cost = tl.where(real, units + FIXED_COST, 0).to(tl.int64)
            end = base + tl.cumsum(cost, 0)
            begin = end - cost
            first_program = (begin + FIXED_COST) // quota
            pieces = tl.where(real, (end - 1) // quota - first_program + 1, 1).to(tl.int32)
            split = (pieces > 1).to(tl.int32)
            rank = num_split + tl.cumsum(split, 0) - split
            entry = splits_ptr + rank * 3
            tl.store(entry, item, mask=split > 0)
            tl.store(entry + 1, first_program.to(tl.int32) + rank, mask=split > 0)
            tl.store(entry + 2, pieces, mask=split > 0)

            done = end[:, None] <= lo[None, :]  # the item ends before the program's stretch
            begun = ((begin + FIXED_COST)[:, None] < hi[None, :]) & real[:, None]  # it has units before the stretch's end
            left = end[:, None] < hi[None, :]  # it ends inside the stretch, or before
            first_item += tl.sum(done.to(tl.int32), 0)
            last_item += tl.sum(begun.to(tl.int32), 0)
            first_rank += tl.sum(tl.where(done, split[:, None], 0), 0)
            last_rank += tl.sum(tl.where(left, split[:, None], 0), 0)
            first_start = tl.maximum(first_start, tl.max(tl.where(done, end[:, None], 0), 0))
            last_start = tl.maximum(last_start, tl.max(tl.where(begun, begin[:, None], 0), 0))
            last_end = tl.maximum(last_end, tl.max(tl.where(begun, end[:, None], 0), 0))
            base += tl.sum(cost, 0)
            num_split += tl.sum(split, 0)
        tl.store(splits_ptr - 1, num_split)
        work = schedule_ptr + program * WORK_FIELDS
        real = program < programs
        first_unit = tl.maximum(lo - first_start - FIXED_COST, 0)
        to_the_end = hi >= last_end
        first_partial = (first_unit > 0) | ((first_item == last_item) & (hi < last_end))
        tl.store(work, first_item, mask=real)
        tl.store(work + 1, last_item, mask=real)
        tl.store(work + 2, first_unit.to(tl.int32), mask=real)
        tl.store(work + 3, (tl.minimum(hi, last_end) - last_start - FIXED_COST).to(tl.int32), mask=real)
        tl.store(work + 4, tl.where(first_partial, program + first_rank, -1), mask=real)
        tl.store(work + 5, tl.where(to_the_end, -1, program + last_rank), mask=real)
        for start in range(0, slots - programs, ITEM_CHUNK):
            idle = programs + start + tl.arange(0, ITEM_CHUNK)
            tl.store(schedule_ptr + idle * WORK_FIELDS, idle * 0, mask=idle < slots)
            tl.store(schedule_ptr + idle * WORK_FIELDS + 1, idle * 0 - 1, mask=idle < slots)
