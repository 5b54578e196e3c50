"""The partitions of the sparse kernel that fetch: two warpgroups, which gather fp8 rows by index and dequantise them.

Each has one half of the keys of every block.  A block is loaded into registers (but for V3.2's RoPE part), as a whole as soon
as the one before it has left them, or by halves; its rows are fetched into the second-level cache before.  Of 64 registers of
a thread 36 or 38 hold it; what is loaded and then spilled would be waited for at once.
"""

# Without `from __future__ import annotations`: an aggregate looks at the annotations of its fields.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..decode_row import e8m0_to_float32
from . import sizes
from .dequantise import e4m3_to_bf16
from .gluon_names import aggregate, commit_copies, copy_async, reinterpret, wait_copies
from .parts import BLOCK, HALF, ROPE, pairs_of
from .producer import fetch_queries

SHARE = gl.constexpr(sizes.BLOCK // sizes.GATHERERS)  # keys of a block that one warpgroup gathers

# Lanes: four read 64 bytes of a row, so each thread has one row: its slot, its scales, its address.  Eight, which write at
# once, have two rows, whose swizzles differ in the lowest bit: so they write to all banks.
_ROWS_OF_LANES, _ROWS_OF_WARPS = [[1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]


def _layout(registers, lanes, columns):
    return gl.constexpr(gl.DistributedLinearLayout(registers, [*lanes, *_ROWS_OF_LANES], _ROWS_OF_WARPS, [], [32, columns]))


WORDS_64 = _layout([[0, 1], [0, 2], [0, 16], [0, 32]], [[0, 4], [0, 8]], 64)
WORDS_32 = _layout([[0, 1], [0, 2], [0, 16]], [[0, 4], [0, 8]], 32)
WORDS_16 = _layout([[0, 1], [0, 2]], [[0, 4], [0, 8]], 16)
# The scales of a row, in each of its lanes.
SCALES_4 = _layout([[0, 1], [0, 2]], [[0, 0], [0, 0]], 4)
SCALES_2 = _layout([[0, 1]], [[0, 0], [0, 0]], 2)
# Lines of 128 bytes of a row, two in each of its lanes.
LINES = _layout([[0, 4]], [[0, 1], [0, 2]], 8)
ROWS_64 = gl.constexpr(gl.SliceLayout(1, WORDS_64.value))
WORD_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))


@aggregate
class Cache:
    """A cache as the kernel sees it; distances in words of four bytes."""

    words: gl.tensor  # pointer to int32
    last_slot: gl.tensor
    PAGE_SIZE: gl.constexpr
    PAGE: gl.constexpr
    TOKEN: gl.constexpr
    SCALES: gl.constexpr  # from the start of a page to the scales of its first token
    SCALE: gl.constexpr  # from the scales of a token to those of the next

    @gluon.constexpr_function
    def __init__(self, words, last_slot, PAGE_SIZE, PAGE, TOKEN, SCALES, SCALE):
        self.words = words
        self.last_slot = last_slot
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.PAGE = gl.constexpr(PAGE)
        self.TOKEN = gl.constexpr(TOKEN)
        self.SCALES = gl.constexpr(SCALES)
        self.SCALE = gl.constexpr(SCALE)

    @gluon.jit
    def places(self, slot):
        """Pointers to the words of rows, and to those that their scales begin with; where there is no slot, those of slot 0."""
        slot = gl.maximum(slot, 0)
        if self.PAGE == self.PAGE_SIZE * self.TOKEN and self.SCALE == self.TOKEN:
            rows = self.words + slot.to(gl.int64) * self.TOKEN
            scales = rows + self.SCALES
        else:
            page = self.words + (slot // self.PAGE_SIZE).to(gl.int64) * self.PAGE
            token = slot % self.PAGE_SIZE
            if self.PAGE_SIZE * (self.TOKEN + self.SCALE) + self.SCALES >= 2**31:
                token = token.to(gl.int64)
            rows = page + token * self.TOKEN
            scales = page + (token * self.SCALE + self.SCALES)
        return rows, scales


@aggregate
class Selection:
    """The keys of an item that are this program's: pairs of blocks of the main cache, then pairs of the extra one."""

    indices: gl.tensor  # pointers to those of the item
    extra_indices: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    extra_lo: gl.tensor
    extra_hi: gl.tensor
    cache: Cache
    extra: Cache
    HAS_EXTRA: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, indices, extra_indices, lo, hi, extra_lo, extra_hi, cache, extra, HAS_EXTRA):
        self.indices = indices
        self.extra_indices = extra_indices
        self.lo = lo
        self.hi = hi
        self.extra_lo = extra_lo
        self.extra_hi = extra_hi
        self.cache = cache
        self.extra = extra
        self.HAS_EXTRA = gl.constexpr(HAS_EXTRA)

    @gluon.jit
    def pairs(self):
        return pairs_of(self.hi - self.lo) + pairs_of(self.extra_hi - self.extra_lo)

    @gluon.jit
    def in_extra(self, pair):
        return pair >= pairs_of(self.hi - self.lo)

    @gluon.jit
    def load_indices(self, pair, WHICH: gl.constexpr, SHARE_INDEX: gl.constexpr):
        """The indices of this share of a block, -1 behind the end."""
        start = self.lo + pair * (2 * BLOCK)
        end = self.hi
        indices = self.indices
        if self.HAS_EXTRA:
            extra_start = self.extra_lo + (pair - pairs_of(self.hi - self.lo)) * (2 * BLOCK)
            extra = self.in_extra(pair)
            start = gl.where(extra, extra_start, start)
            end = gl.where(extra, self.extra_hi, end)
            indices = gl.where(extra, self.extra_indices, indices)
        t = start + (WHICH * BLOCK + SHARE_INDEX * SHARE) + gl.arange(0, SHARE, layout=ROWS_64)
        return gl.load(indices + t, mask=t < end, other=-1)

    @gluon.jit
    def slots(self, pair, index):
        """Slots of a block's keys, -1 where there is none: also for an index that is not of the cache."""
        last = self.cache.last_slot
        if self.HAS_EXTRA:
            last = gl.where(self.in_extra(pair), self.extra.last_slot, last)
        return gl.where((index >= 0) & (index <= last), index, -1)

    @gluon.jit
    def places(self, pair, slot):
        """Pointers to the words of rows, and to those that their scales begin with."""
        rows, scales = self.cache.places(slot)
        if self.HAS_EXTRA:
            if self.in_extra(pair):
                rows, scales = self.extra.places(slot)
            # A choice hides the alignment from the compiler.
            rows, scales = gl.multiple_of(rows, 16), gl.multiple_of(scales, 8)
        return rows, scales


@gluon.jit
def _load_words(rows, slot, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """`COUNT` words of each row from `FIRST` on; zero where there is no key."""
    rows = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT))
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(gl.expand_dims(rows, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(slot >= 0, 1), other=0)


@gluon.jit
def _load_half(rows, slot, SIDE: gl.constexpr, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr):
    """Half of the columns of a block as they are stored.

    The right half of MODEL1 has three tiles of values, here 32 and 16 words, and the RoPE part.
    """
    if SIDE == 1 and E8M0:
        half = (
            _load_words(rows, slot, 64, 32, WORDS_32),
            _load_words(rows, slot, 96, 16, WORDS_16),
            _load_words(rows, slot, ROPE_WORD, ROPE // 2, WORDS_32),
        )
    else:
        half = _load_words(rows, slot, 64 * SIDE, 64, WORDS_64)
    return half


@gluon.jit
def _load_scales(scales, slot, E8M0: gl.constexpr):
    """The words of the scales of a block."""
    if E8M0:
        words = _load_words(scales, slot, 0, 2, SCALES_2)
    else:
        words = _load_words(scales, slot, 0, 4, SCALES_4)
    return words


@gluon.jit
def _tile_scales(codes, LAYOUT: gl.constexpr, COUNT: gl.constexpr, FIRST: gl.constexpr):
    """fp32 [keys, COUNT]: scales of words, 16 of which share a byte of `codes`, from byte `FIRST` on."""
    codes = gl.convert_layout(codes, gl.SliceLayout(1, LAYOUT))
    tile = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT)) // 16
    return e8m0_to_float32((gl.expand_dims(codes, 1) >> gl.expand_dims(8 * tile, 0)) & 0xFF)


@gluon.jit
def _column(words, WHICH: gl.constexpr):
    """One of two columns."""
    first, second = gl.split(words)
    return first if WHICH == 0 else second


@gluon.jit
def _words_of(tile, COLUMNS: gl.constexpr, SHARE_INDEX: gl.constexpr):
    """This share of a tile of 64 keys, as words."""
    return reinterpret(tile, gl.int32, [BLOCK, COLUMNS], WORD_TILE).slice(SHARE_INDEX * SHARE, SHARE, dim=0)


@gluon.jit
def _store_half(tile, half, scales, SIDE: gl.constexpr, E8M0: gl.constexpr, SHARE_INDEX: gl.constexpr):
    """Dequantises half of the columns of a block into their tile in shared memory."""
    words = _words_of(tile, HALF // 2, SHARE_INDEX)
    if not E8M0:
        even, odd = gl.split(gl.reshape(scales, [SHARE, 2, 2]))
        low = gl.convert_layout(_column(even, SIDE).to(gl.float32, bitcast=True), ROWS_64)
        high = gl.convert_layout(_column(odd, SIDE).to(gl.float32, bitcast=True), ROWS_64)
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, WORDS_64)), 0)
        scale = gl.where(column < 32, gl.expand_dims(low, 1), gl.expand_dims(high, 1))
        words.store(e4m3_to_bf16(half, scale))
    elif SIDE == 0:
        words.store(e4m3_to_bf16(half, _tile_scales(_column(scales, 0), WORDS_64, 64, 0)))
    else:
        first, last, rope = half
        codes = _column(scales, 1)
        words.slice(0, 64, dim=1).store(e4m3_to_bf16(first, _tile_scales(codes, WORDS_32, 32, 0)))
        words.slice(64, 32, dim=1).store(e4m3_to_bf16(last, _tile_scales(codes, WORDS_16, 16, 2)))
        words.slice(96, 32, dim=1).store(rope)


@gluon.jit
def _copy_rope(keys, tile, pair, slot, ROPE_WORD: gl.constexpr, SHARE_INDEX: gl.constexpr):
    """Begins to copy the RoPE part of a block into its tile; zero where there is no key."""
    slot = gl.convert_layout(slot, gl.SliceLayout(1, WORDS_32))
    rows, _ = keys.places(pair, slot)
    column = ROPE_WORD + gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, WORDS_32))
    words = _words_of(tile, ROPE // 2, SHARE_INDEX)
    copy_async(words, gl.expand_dims(rows, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(slot >= 0, 1))
    commit_copies()


PREFETCH = gl.constexpr("{ .reg .pred wanted; setp.ne.b32 wanted, $2, 0; mov.b32 $0, 0; @wanted prefetch.global.L2 [$1]; }")


@gluon.jit
def _prefetch(keys, pair, slot, E8M0: gl.constexpr):
    """Begins to fetch the rows of a block into the second-level cache: each lane of a row a line of it, or of its scales."""
    rows, scales = keys.places(pair, slot)
    line = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, LINES)), 0)
    rows = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, LINES)), 1)
    scales = gl.expand_dims(gl.convert_layout(scales, gl.SliceLayout(1, LINES)), 1)
    wanted = gl.expand_dims(gl.convert_layout(slot, gl.SliceLayout(1, LINES)) >= 0, 1)
    words = rows + 32 * line  # V3.2: six lines; MODEL1: five
    if E8M0:
        words = gl.where(line == 5, scales, words)
    words, wanted = gl.broadcast(words, wanted & (line < 6))
    gl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [words.to(gl.int64), wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fill_block(
    keys, buffers, full, empty, block, parity, pair, slots, index, zero,
    WHICH: gl.constexpr, HAS_ROPE: gl.constexpr, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr, BY_HALVES: gl.constexpr,
    SHARE_INDEX: gl.constexpr,
):  # fmt: skip
    """Writes a block to shared memory, the half of its columns that is given back first before the other; loads the next.

    A RoPE part of its own comes with the second half: over that of block 1 lies P1 until its second half is empty.  Given and
    returned: what is loaded of a block, its slots (with `BY_HALVES` also those of the next one), and the indices after them.
    """
    FIRST: gl.constexpr = 3 * WHICH
    SECOND: gl.constexpr = 1 + WHICH
    first, second, scales = block
    slot = slots[0]
    next_pair = pair + WHICH
    mbarrier.wait(empty[FIRST], parity)
    buffers.valid.index(WHICH).slice(SHARE_INDEX * SHARE, SHARE).store((slot >= 0).to(gl.int32))
    _store_half(buffers.k.index(zero + FIRST), first, scales, WHICH, E8M0, SHARE_INDEX)
    mbarrier.arrive(full[FIRST])
    if BY_HALVES:
        next_slots = slots[1], keys.slots(pair + 1, index)
        rows, scale_places = keys.places(next_pair, next_slots[0])
        next_first = _load_half(rows, next_slots[0], 1 - WHICH, E8M0, ROPE_WORD)
        next_scales = _load_scales(scale_places, next_slots[0], E8M0)
        _prefetch(keys, pair + 1, next_slots[1], E8M0)
    else:
        next_slots = (keys.slots(next_pair, index),)  # type: ignore[assignment]  # one of these is compiled
        _prefetch(keys, next_pair, next_slots[0], E8M0)
    mbarrier.wait(empty[SECOND], parity)
    if HAS_ROPE:
        _copy_rope(keys, buffers.rope.index(zero + WHICH), pair, slot, ROPE_WORD, SHARE_INDEX)
    _store_half(buffers.k.index(zero + SECOND), second, scales, 1 - WHICH, E8M0, SHARE_INDEX)
    if HAS_ROPE:
        wait_copies(0)
    mbarrier.arrive(full[SECOND])
    rows, scale_places = keys.places(next_pair, next_slots[0])
    if not BY_HALVES:
        next_first = _load_half(rows, next_slots[0], 1 - WHICH, E8M0, ROPE_WORD)
        next_scales = _load_scales(scale_places, next_slots[0], E8M0)
    next_second = _load_half(rows, next_slots[0], WHICH, E8M0, ROPE_WORD)
    # Together with what is waited for next, and no sooner: they would be spilled, and so be waited for at once.
    if BY_HALVES:
        index = keys.load_indices(next_pair + 1, 1 - WHICH, SHARE_INDEX)
    else:
        index = keys.load_indices(pair + 1, WHICH, SHARE_INDEX)
    return (next_first, next_second, next_scales), next_slots, index


@gluon.jit
def _with(index, other):
    """`index`, in a way that waits for `other` as well: the compiler would load the one only when the other is there."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 larger; max.s32 larger, $1, $2; min.s32 $0, $1, larger; }", "=r,r,r", [index, other], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def gather(
    work, buffers, barriers, q_desc, cache, extra, indices_ptr, extra_indices_ptr, stride_b, stride_s, extra_stride_b,
    extra_stride_s, ROWS: gl.constexpr, HAS_ROPE: gl.constexpr, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr,
    BY_HALVES: gl.constexpr, SHARE_INDEX: gl.constexpr,
):  # fmt: skip
    """Gathers and dequantises one share of the keys of every block; the first one also fetches the queries of every item.

    With `BY_HALVES`, half of the next block is loaded as soon as there are registers for it, which the compiler has to find.
    """
    q_full, q_empty, full, empty, _p_full, _total_full = barriers
    pairs_done = 0
    for item in range(work.first_item, work.last_item + 1):
        _length, lo, hi, extra_lo, extra_hi = work.keys(item)
        request = gl.cast(item // work.QUERIES, gl.int64)
        query = gl.cast(item % work.QUERIES, gl.int64)
        keys = Selection(
            indices_ptr + (request * stride_b + query * stride_s),
            extra_indices_ptr + (request * extra_stride_b + query * extra_stride_s),
            lo, hi, extra_lo, extra_hi, cache, extra, work.HAS_EXTRA,
        )  # fmt: skip
        pairs = keys.pairs()
        first_index, index = keys.load_indices(0, 0, SHARE_INDEX), keys.load_indices(0, 1, SHARE_INDEX)
        slot = keys.slots(0, _with(first_index, index))
        rows, scales = keys.places(0, slot)
        block = (
            _load_half(rows, slot, 0, E8M0, ROPE_WORD), _load_half(rows, slot, 1, E8M0, ROPE_WORD),
            _load_scales(scales, slot, E8M0),
        )  # fmt: skip
        if BY_HALVES:
            slots = slot, keys.slots(0, index)
            _prefetch(keys, 0, slots[1], E8M0)
            index = keys.load_indices(1, 0, SHARE_INDEX)
        else:
            slots = (slot,)  # type: ignore[assignment]
        if SHARE_INDEX == 0:
            fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
        for pair in range(pairs):
            parity = (pairs_done & 1) ^ 1
            # Zero, which the compiler does not know: it would keep the addresses of all tiles in registers it does not have.
            zero = pair >> 30
            for which in gl.static_range(2):
                block, slots, index = _fill_block(
                    keys, buffers, full, empty, block, parity, pair, slots, index, zero,
                    which, HAS_ROPE, E8M0, ROPE_WORD, BY_HALVES, SHARE_INDEX,
                )  # fmt: skip
            pairs_done += 1
