"""The partition of the sparse kernel that fetches: four warps, which gather fp8 rows by index and dequantise them.

While one half of a block's columns is dequantised, the other one is under way.  The right half goes through registers; the
left one is copied, as it is stored, into the tile that it is written to afterwards.
"""

# Without `from __future__ import annotations`: an aggregate looks at the annotations of its fields.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..decode_row import e8m0_to_float32
from .dequantise import e4m3_to_bf16
from .gluon_names import aggregate, commit_copies, copy_async, reinterpret, wait_copies
from .parts import BLOCK, HALF, ROPE, pairs_of
from .producer import fetch_queries

# Lanes: four read 64 bytes of a row, which become a row of a panel in shared memory.  Eight, which write at once, have two
# rows, whose swizzles differ in the lowest bit: so they write to all banks.
_ROWS_OF_WARPS = [[4, 0], [8, 0]]
WORDS_64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [16, 0], [32, 0]], [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]], _ROWS_OF_WARPS, [], [64, 64]
    )
)
WORDS_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0]], [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]], _ROWS_OF_WARPS, [], [64, 32]
    )
)
WORDS_16 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]], [[0, 4], [0, 8], [1, 0], [16, 0], [2, 0]], _ROWS_OF_WARPS, [], [64, 16]
    )
)
# The scales of a row, in each of its lanes.
_LANES_OF_ROWS = [[0, 0], [0, 0], [1, 0], [0, 0], [2, 0]]
SCALES_4 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [16, 0], [32, 0]], _LANES_OF_ROWS, _ROWS_OF_WARPS, [], [64, 4])
)
SCALES_2 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [16, 0], [32, 0]], _LANES_OF_ROWS, _ROWS_OF_WARPS, [], [64, 2]))
ROWS_64 = gl.constexpr(gl.SliceLayout(1, WORDS_64.value))
ROWS_32 = gl.constexpr(gl.SliceLayout(1, WORDS_32.value))
ROWS_16 = gl.constexpr(gl.SliceLayout(1, WORDS_16.value))
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
    def load_indices(self, pair, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
        """The indices of a block, -1 behind the end."""
        start = self.lo + pair * (2 * BLOCK)
        end = self.hi
        indices = self.indices
        if self.HAS_EXTRA:
            extra_start = self.extra_lo + (pair - pairs_of(self.hi - self.lo)) * (2 * BLOCK)
            extra = self.in_extra(pair)
            start = gl.where(extra, extra_start, start)
            end = gl.where(extra, self.extra_hi, end)
            indices = gl.where(extra, self.extra_indices, indices)
        t = start + WHICH * BLOCK + gl.arange(0, BLOCK, layout=LAYOUT)
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
def _copy_words(keys, memory, pair, slot, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Begins to copy `COUNT` words of each row from `FIRST` on into shared memory; zero where there is no key."""
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    rows, _ = keys.places(pair, slot)
    column = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    copy_async(memory, gl.expand_dims(rows, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(slot >= 0, 1))
    commit_copies()


@gluon.jit
def _stored_left(tile):
    """The front of a tile, where the left half of a block lies as it is stored before it is dequantised in place."""
    return reinterpret(tile, gl.int32, [BLOCK, HALF // 2], WORD_TILE).slice(0, 64, dim=1)


@gluon.jit
def _load_right(keys, pair, slot, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr):
    """The right half of a block as it is stored, and the words of the scales of both.

    That of MODEL1 has three tiles of values, here 32 and 16 words, and the RoPE part.
    """
    rows, scales = keys.places(pair, slot)
    if E8M0:
        rows_32 = gl.convert_layout(rows, ROWS_32, assert_trivial=True)
        slot_32 = gl.convert_layout(slot, ROWS_32, assert_trivial=True)
        right = (
            _load_words(rows_32, slot_32, 64, 32, WORDS_32),
            _load_words(gl.convert_layout(rows, ROWS_16), gl.convert_layout(slot, ROWS_16), 96, 16, WORDS_16),
            _load_words(rows_32, slot_32, ROPE_WORD, 32, WORDS_32),
        )
        block_scales = _load_scales(scales, slot, 2, SCALES_2)
    else:
        right = _load_words(rows, slot, 64, 64, WORDS_64)
        block_scales = _load_scales(scales, slot, 4, SCALES_4)
    return right, block_scales


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
def _store(tile, words, scales, SIDE: gl.constexpr, E8M0: gl.constexpr):
    """Dequantises half of a block into its tile in shared memory."""
    all_words = reinterpret(tile, gl.int32, [BLOCK, HALF // 2], WORD_TILE)
    if not E8M0:
        even, odd = gl.split(gl.reshape(scales, [BLOCK, 2, 2]))
        low = gl.expand_dims(_column(even, SIDE, ROWS_64).to(gl.float32, bitcast=True), 1)
        high = gl.expand_dims(_column(odd, SIDE, ROWS_64).to(gl.float32, bitcast=True), 1)
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, WORDS_64)), 0)
        all_words.store(e4m3_to_bf16(words, gl.where(column < 32, low, high)))
    elif SIDE == 0:
        codes = _column(scales, 0, ROWS_64)
        all_words.store(e4m3_to_bf16(words, _tile_scales(codes, WORDS_64, 64, 0)))
    else:
        first_words, last_words, rope = words
        codes = _column(scales, 1, ROWS_32)
        last_codes = gl.convert_layout(codes, ROWS_16)
        all_words.slice(0, 64, dim=1).store(e4m3_to_bf16(first_words, _tile_scales(codes, WORDS_32, 32, 0)))
        all_words.slice(64, 32, dim=1).store(e4m3_to_bf16(last_words, _tile_scales(last_codes, WORDS_16, 16, 2)))
        all_words.slice(96, 32, dim=1).store(rope)


@gluon.jit
def _fill_right(
    keys, buffers, full, empty, right, scales, parity, pair, slot, zero,
    WHICH: gl.constexpr, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr,
):  # fmt: skip
    """Writes the right half of a block, says which keys there are, and begins to copy the RoPE part.

    The latter is there with the left half.  P1 lies over that of block 1 until tile 2, which its left half has been copied
    to already, is empty.
    """
    TILE_INDEX: gl.constexpr = 2 * WHICH + 1
    mbarrier.wait(empty[TILE_INDEX], parity)
    if not E8M0:
        rope = reinterpret(buffers.rope.index(zero + WHICH), gl.int32, [BLOCK, ROPE // 2], WORD_TILE)
        _copy_words(keys, rope, pair, slot, ROPE_WORD, ROPE // 2, WORDS_32)
    buffers.valid.index(WHICH).store((slot >= 0).to(gl.int32))
    _store(buffers.k.index(zero + TILE_INDEX), right, scales, 1, E8M0)
    mbarrier.arrive(full[TILE_INDEX])


@gluon.jit
def _fill_left(buffers, full, scales, zero, WHICH: gl.constexpr, E8M0: gl.constexpr):
    """Dequantises the left half of a block in place."""
    wait_copies(0)
    tile = buffers.k.index(zero + 2 * WHICH)
    _store(tile, _stored_left(tile).load(WORDS_64), scales, 0, E8M0)
    mbarrier.arrive(full[2 * WHICH])


@gluon.jit
def _begin_left(keys, buffers, empty, parity, pair, slot, zero, WHICH: gl.constexpr):
    """Begins to copy the left half of a block, as it is stored."""
    mbarrier.wait(empty[2 * WHICH], parity)
    _copy_words(keys, _stored_left(buffers.k.index(zero + 2 * WHICH)), pair, slot, 0, 64, WORDS_64)


@gluon.jit
def gather(
    work, buffers, barriers, q_desc, cache, extra, indices_ptr, extra_indices_ptr, stride_b, stride_s, extra_stride_b,
    extra_stride_s, ROWS: gl.constexpr, HAS_ROPE: gl.constexpr, E8M0: gl.constexpr, ROPE_WORD: gl.constexpr,
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
        slot = keys.slots(0, keys.load_indices(0, 0, ROWS_64))
        right, scales = _load_right(keys, 0, slot, E8M0, ROPE_WORD)
        # Indices come a block ahead of the keys, with those that are waited for together with them.
        index = keys.load_indices(0, 1, ROWS_64)
        if pairs == 0:
            fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
        else:
            _begin_left(keys, buffers, empty, (pairs_done & 1) ^ 1, 0, slot, 0, 0)
        for pair in range(pairs):
            parity = (pairs_done & 1) ^ 1
            # Zero, which the compiler does not know: it would keep the addresses of all tiles in registers it does not have.
            zero = pair >> 30
            _fill_right(keys, buffers, full, empty, right, scales, parity, pair, slot, zero, 0, E8M0, ROPE_WORD)
            slot = keys.slots(pair, index)
            right, other_scales = _load_right(keys, pair, slot, E8M0, ROPE_WORD)
            index = keys.load_indices(pair + 1, 0, ROWS_64)
            _fill_left(buffers, full, scales, zero, 0, E8M0)
            _begin_left(keys, buffers, empty, parity, pair, slot, zero, 1)
            if pair == 0:  # what the first products of block 0 wait for comes first
                fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
            _fill_right(keys, buffers, full, empty, right, other_scales, parity, pair, slot, zero, 1, E8M0, ROPE_WORD)
            slot = keys.slots(pair + 1, index)
            right, scales = _load_right(keys, pair + 1, slot, E8M0, ROPE_WORD)
            index = keys.load_indices(pair + 1, 1, ROWS_64)
            _fill_left(buffers, full, other_scales, zero, 1, E8M0)
            if pair + 1 < pairs:
                _begin_left(keys, buffers, empty, parity ^ 1, pair + 1, slot, zero, 0)
            pairs_done += 1
