"""The partition of the sparse kernel that fetches: four warps, which gather fp8 rows by index and dequantise them.

A block is loaded into registers as a whole, as soon as the one before it has left them: the more loads are under way at
once, the less each costs.  Rows are fetched into the second-level cache a pair of blocks earlier.
"""

# Without `from __future__ import annotations`: an aggregate looks at the annotations of its fields.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .dequantise import e4m3_to_bf16, e8m0_to_float32
from .gluon_names import aggregate, commit_copies, copy_async, reinterpret, wait_copies
from .parts import BLOCK, HALF, ROPE, pairs_of
from .producer import fetch_queries

# Lanes: eight, which are served at once, read 128 bytes of a row.
_ROWS_OF_WARPS = [[4, 0], [8, 0]]
WORDS_64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [16, 0], [32, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], _ROWS_OF_WARPS, [], [64, 64]
    )
)
WORDS_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], _ROWS_OF_WARPS, [], [64, 32]
    )
)
WORDS_16 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]], [[0, 4], [0, 8], [16, 0], [1, 0], [2, 0]], _ROWS_OF_WARPS, [], [64, 16]
    )
)
# The scales of a row, in each of its lanes.
_LANES_OF_ROWS = [[0, 0], [0, 0], [0, 0], [1, 0], [2, 0]]
SCALES_4 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [16, 0], [32, 0]], _LANES_OF_ROWS, _ROWS_OF_WARPS, [], [64, 4])
)
SCALES_2 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [16, 0], [32, 0]], _LANES_OF_ROWS, _ROWS_OF_WARPS, [], [64, 2]))
ROWS_64 = gl.constexpr(gl.SliceLayout(1, WORDS_64.value))
ROWS_32 = gl.constexpr(gl.SliceLayout(1, WORDS_32.value))
ROWS_16 = gl.constexpr(gl.SliceLayout(1, WORDS_16.value))
PAIR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a key in each thread
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
    def offsets(self, slot, DISTANCE: gl.constexpr):
        """Of rows at slots, 64 bits; those without a slot get that of slot 0."""
        slot = gl.maximum(slot, 0)
        if self.PAGE == self.PAGE_SIZE * DISTANCE:
            offset = slot.to(gl.int64) * DISTANCE
        else:
            offset = (slot // self.PAGE_SIZE).to(gl.int64) * self.PAGE + (slot % self.PAGE_SIZE) * DISTANCE
        return offset


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
    def load_indices(self, pair, WHICH: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
        """`COUNT` indices, from those of a block on; -1 behind the end."""
        start = self.lo + pair * (2 * BLOCK)
        end = self.hi
        indices = self.indices
        if self.HAS_EXTRA:
            extra_start = self.extra_lo + (pair - pairs_of(self.hi - self.lo)) * (2 * BLOCK)
            extra = self.in_extra(pair)
            start = gl.where(extra, extra_start, start)
            end = gl.where(extra, self.extra_hi, end)
            indices = gl.where(extra, self.extra_indices, indices)
        t = start + WHICH * BLOCK + gl.arange(0, COUNT, layout=LAYOUT)
        return gl.load(indices + t, mask=t < end, other=-1)

    @gluon.jit
    def slots(self, pair, index):
        """Slots of a block's keys, -1 where there is none: also for an index that is not of the cache."""
        last = self.cache.last_slot
        if self.HAS_EXTRA:
            last = gl.where(self.in_extra(pair), self.extra.last_slot, last)
        return gl.where((index >= 0) & (index <= last), index, -1)

    @gluon.jit
    def rows(self, pair, slot):
        """Pointers to the words of rows."""
        rows = self.cache.words + self.cache.offsets(slot, self.cache.TOKEN)
        if self.HAS_EXTRA:
            extra_rows = self.extra.words + self.extra.offsets(slot, self.extra.TOKEN)
            rows = gl.where(self.in_extra(pair), extra_rows, rows)
        # A choice, and an offset from a page, hide the alignment from some compilers.
        return gl.multiple_of(rows, 16)

    @gluon.jit
    def scales(self, pair, slot, rows):
        """Pointers to the words that their scales begin with."""
        if self.cache.SCALE == self.cache.TOKEN:  # in the row
            return rows + self.cache.SCALES
        rows = self.cache.words + (self.cache.offsets(slot, self.cache.SCALE) + self.cache.SCALES)
        if self.HAS_EXTRA:
            extra_rows = self.extra.words + (self.extra.offsets(slot, self.extra.SCALE) + self.extra.SCALES)
            rows = gl.where(self.in_extra(pair), extra_rows, rows)
        return rows


@gluon.jit
def _load_words(rows, slot, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """`COUNT` words of each row from `FIRST` on; zero where there is no key."""
    column = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(gl.expand_dims(rows, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(slot >= 0, 1), other=0)


@gluon.jit
def _load_scales(scales, slot, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """`COUNT` words for each row."""
    return _load_words(
        gl.convert_layout(scales, gl.SliceLayout(1, LAYOUT), assert_trivial=True),
        gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 0, COUNT, LAYOUT,
    )  # fmt: skip


@gluon.jit
def _load_block(keys, pair, slot, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr):
    """The halves of the columns of a block as they are stored: values, and the words of their scales.

    The right half of MODEL1 has three tiles of values, here 32 and 16 words, and the RoPE part.
    """
    rows = keys.rows(pair, slot)
    scales = keys.scales(pair, slot, rows)
    left = _load_words(rows, slot, 0, 64, WORDS_64)
    if E8M0:
        rows_32 = gl.convert_layout(rows, ROWS_32, assert_trivial=True)
        slot_32 = gl.convert_layout(slot, ROWS_32, assert_trivial=True)
        block = (
            left,
            (
                _load_words(rows_32, slot_32, 64, 32, WORDS_32),
                _load_words(gl.convert_layout(rows, ROWS_16), gl.convert_layout(slot, ROWS_16), 96, 16, WORDS_16),
                _load_words(rows_32, slot_32, ROPE_WORD, 32, WORDS_32),
            ),
            _load_scales(scales, slot, 2, SCALES_2),
        )
    else:
        right = _load_words(rows, slot, 64, 64, WORDS_64)
        block = (left, right, _load_scales(scales, slot, 4, SCALES_4))
    return block


@gluon.jit
def _tile_scales(codes, LAYOUT: gl.constexpr, COUNT: gl.constexpr, FIRST: gl.constexpr):
    """fp32 [64, COUNT]: scales of words, 16 of which share a byte of `codes`, from byte `FIRST` on."""
    tile = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT)) // 16
    return e8m0_to_float32((gl.expand_dims(codes, 1) >> gl.expand_dims(8 * tile, 0)) & 0xFF)


@gluon.jit
def _column(words, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """One of two columns."""
    first, second = gl.split(words)
    return gl.convert_layout(first if WHICH == 0 else second, LAYOUT, assert_trivial=True)


@gluon.jit
def _store_half(tile, block, SIDE: gl.constexpr, E8M0: gl.constexpr):
    """Dequantises half of a block into its tile in shared memory."""
    all_words = reinterpret(tile, gl.int32, [BLOCK, HALF // 2], WORD_TILE)
    if not E8M0:
        even, odd = gl.split(gl.reshape(block[2], [BLOCK, 2, 2]))
        low = gl.expand_dims(_column(even, SIDE, ROWS_64).to(gl.float32, bitcast=True), 1)
        high = gl.expand_dims(_column(odd, SIDE, ROWS_64).to(gl.float32, bitcast=True), 1)
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, WORDS_64)), 0)
        all_words.store(e4m3_to_bf16(block[SIDE], gl.where(column < 32, low, high)))
    elif SIDE == 0:
        codes = _column(block[2], 0, ROWS_64)
        all_words.store(e4m3_to_bf16(block[0], _tile_scales(codes, WORDS_64, 64, 0)))
    else:
        words, last_words, rope = block[1]
        codes = _column(block[2], 1, ROWS_32)
        last_codes = gl.convert_layout(codes, ROWS_16)
        all_words.slice(0, 64, dim=1).store(e4m3_to_bf16(words, _tile_scales(codes, WORDS_32, 32, 0)))
        all_words.slice(64, 32, dim=1).store(e4m3_to_bf16(last_words, _tile_scales(last_codes, WORDS_16, 16, 2)))
        all_words.slice(96, 32, dim=1).store(rope)


@gluon.jit
def _copy_rope(keys, tile, pair, slot, ROPE_WORD: gl.constexpr):
    """Begins to copy the RoPE part of a block into its tile."""
    slot = gl.convert_layout(slot, ROWS_32, assert_trivial=True)
    rows = keys.rows(pair, slot)
    column = ROPE_WORD + gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, WORDS_32))
    words = reinterpret(tile, gl.int32, [BLOCK, ROPE // 2], WORD_TILE)
    copy_async(words, gl.expand_dims(rows, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(slot >= 0, 1))
    commit_copies()


@gluon.jit
def _fill_block(
    keys, buffers, full, empty, block, parity, pair, slot, WHICH: gl.constexpr, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr
):
    """Writes a block to shared memory, the half that is given back first before the other."""
    FIRST: gl.constexpr = 3 * WHICH
    SECOND: gl.constexpr = 1 + WHICH
    mbarrier.wait(empty[FIRST], parity)
    if not E8M0:
        if WHICH == 1:  # over its RoPE part lies P1, until the second half is empty, too
            mbarrier.wait(empty[SECOND], parity)
        _copy_rope(keys, buffers.rope.index(WHICH), pair, slot, ROPE_WORD)
    buffers.valid.index(WHICH).store((slot >= 0).to(gl.int32))
    _store_half(buffers.k.index(FIRST), block, WHICH, E8M0)
    mbarrier.arrive(full[FIRST])
    if E8M0 or WHICH == 0:
        mbarrier.wait(empty[SECOND], parity)
    _store_half(buffers.k.index(SECOND), block, 1 - WHICH, E8M0)
    if not E8M0:
        wait_copies(0)
    mbarrier.arrive(full[SECOND])


@gluon.jit
def _prefetch(keys, pair, index, tile, E8M0: gl.constexpr, TILES: gl.constexpr):
    """Begins to fetch the rows of a pair into the second-level cache; the first two head tiles have one half each."""
    slot = keys.slots(pair, index)
    wanted = slot >= 0
    if TILES > 1:
        wanted = wanted & ((gl.arange(0, 2 * BLOCK, layout=PAIR) & 1) == tile)
    rows = keys.rows(pair, slot)
    if E8M0:
        gl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.b32 wanted, $3, 0; mov.b32 $0, 0; @wanted prefetch.global.L2 [$2];"
            " @wanted cp.async.bulk.prefetch.L2.global [$1], 576; }", "=r,l,l,r",
            [rows.to(gl.int64), keys.scales(pair, slot, rows).to(gl.int64), wanted.to(gl.int32)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.b32 wanted, $2, 0; mov.b32 $0, 0;"
            " @wanted cp.async.bulk.prefetch.L2.global [$1], 656; }", "=r,l,r",
            [rows.to(gl.int64), wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def gather(
    work, buffers, barriers, q_desc, cache, extra, indices_ptr, extra_indices_ptr, stride_b, stride_s, extra_stride_b,
    extra_stride_s, ROWS: gl.constexpr, ROW_TILES: gl.constexpr, HAS_ROPE: gl.constexpr, E8M0: gl.constexpr,
    ROPE_WORD: gl.constexpr,
):  # fmt: skip
    """Fetches the queries of every item, and gathers and dequantises the keys of every pair."""
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
        if pairs == 0:
            fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
        slot = keys.slots(0, keys.load_indices(0, 0, BLOCK, ROWS_64))
        block = _load_block(keys, 0, slot, E8M0, ROPE_WORD)
        for pair in range(pairs):
            parity = (pairs_done & 1) ^ 1
            # Indices come a block ahead of the keys, and are looked at as late.
            index = keys.load_indices(pair, 1, BLOCK, ROWS_64)
            next_pair = keys.load_indices(pair + 1, 0, 2 * BLOCK, PAIR)
            _fill_block(keys, buffers, full, empty, block, parity, pair, slot, 0, E8M0, ROPE_WORD)
            slot = keys.slots(pair, index)
            block = _load_block(keys, pair, slot, E8M0, ROPE_WORD)
            _prefetch(keys, pair + 1, next_pair, work.tile, E8M0, ROW_TILES)
            index = keys.load_indices(pair + 1, 0, BLOCK, ROWS_64)
            if pair == 0:  # what the first products of block 0 wait for comes first
                fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
            _fill_block(keys, buffers, full, empty, block, parity, pair, slot, 1, E8M0, ROPE_WORD)
            slot = keys.slots(pair + 1, index)
            block = _load_block(keys, pair + 1, slot, E8M0, ROPE_WORD)
            pairs_done += 1
