"""What the partitions of the kernels share: sizes, layouts, the work of a program, its shared memory."""

# Without `from __future__ import annotations`: an aggregate looks at the annotations of its fields.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..schedule import item_lengths, item_units
from . import sizes
from .gluon_names import aggregate

SLACK = gl.constexpr(8.0)  # powers of two by which scores may exceed the reference of the exponents

TILE = gl.constexpr(sizes.TILE)
BLOCK = gl.constexpr(sizes.BLOCK)
HALF = gl.constexpr(sizes.D_V // 2)
ROPE = gl.constexpr(sizes.ROPE)
PANEL = gl.constexpr(sizes.PANEL)

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# The same by products of half the width: of a thread block of 512 threads ptxas refuses wider ones.
NARROW_O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROWS_OF_S = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))


@gluon.jit
def _keys_of_units(units, length, UNIT: gl.constexpr):
    """Keys before so many units."""
    # In keys, the end of the last unit can lie beyond 32 bits.
    return gl.minimum(gl.minimum(units, length // UNIT + 1) * UNIT, length)


@gluon.jit
def pairs_of(keys):
    """Pairs of blocks that hold so many keys."""
    return (keys + 2 * BLOCK - 1) // (2 * BLOCK)


@aggregate
class Work:
    """What one program does: a stretch of the line of all items."""

    lengths: gl.tensor
    extra_lengths: gl.tensor
    max_tokens: gl.tensor
    extra_tokens: gl.tensor
    tile: gl.tensor
    first_item: gl.tensor
    last_item: gl.tensor
    first_unit: gl.tensor  # of the first item
    end_unit: gl.tensor  # of the last item
    first_slot: gl.tensor  # of the scratch, for the first item; -1 if it is whole
    last_slot: gl.tensor
    QUERIES: gl.constexpr
    HAS_LENGTH: gl.constexpr
    HAS_EXTRA: gl.constexpr
    HAS_EXTRA_LENGTH: gl.constexpr
    UNIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, lengths, extra_lengths, max_tokens, extra_tokens, tile, first_item, last_item, first_unit, end_unit, first_slot,
        last_slot, QUERIES, HAS_LENGTH, HAS_EXTRA, HAS_EXTRA_LENGTH, UNIT,
    ):  # fmt: skip
        self.lengths = lengths
        self.extra_lengths = extra_lengths
        self.max_tokens = max_tokens
        self.extra_tokens = extra_tokens
        self.tile = tile
        self.first_item = first_item
        self.last_item = last_item
        self.first_unit = first_unit
        self.end_unit = end_unit
        self.first_slot = first_slot
        self.last_slot = last_slot
        self.QUERIES = gl.constexpr(QUERIES)
        self.HAS_LENGTH = gl.constexpr(HAS_LENGTH)
        self.HAS_EXTRA = gl.constexpr(HAS_EXTRA)
        self.HAS_EXTRA_LENGTH = gl.constexpr(HAS_EXTRA_LENGTH)
        self.UNIT = gl.constexpr(UNIT)

    @gluon.jit
    def keys(self, item):
        """Keys of an item in the main cache, and which of them, [lo, hi), and of the extra cache's are this program's."""
        length, extra_length = item_lengths(
            item, item >= 0, self.lengths, self.extra_lengths, self.max_tokens, self.extra_tokens,
            self.QUERIES, self.HAS_LENGTH, self.HAS_EXTRA, self.HAS_EXTRA_LENGTH,
        )  # fmt: skip
        lo = gl.where(item == self.first_item, self.first_unit, 0)
        hi = gl.where(item == self.last_item, self.end_unit, item_units(length, extra_length, self.UNIT))
        main_units = (length + self.UNIT - 1) // self.UNIT
        extra_lo, extra_hi = extra_length * 0, extra_length * 0
        if self.HAS_EXTRA:
            extra_lo = _keys_of_units(gl.maximum(lo - main_units, 0), extra_length, self.UNIT)
            extra_hi = _keys_of_units(gl.maximum(hi - main_units, 0), extra_length, self.UNIT)
        return length, _keys_of_units(lo, length, self.UNIT), _keys_of_units(hi, length, self.UNIT), extra_lo, extra_hi

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
    q_rope: gl.shared_memory_descriptor  # [64, 64]
    p0: gl.shared_memory_descriptor  # [64, 64]
    p1: gl.shared_memory_descriptor  # [64, 64]: lies over a tile that is not needed any more
    top: gl.shared_memory_descriptor  # fp32 [2, 64]: running maxima after block 0 and block 1
    total: gl.shared_memory_descriptor  # fp32 [2, 64]: sums of the warpgroups
    valid: gl.shared_memory_descriptor  # int32 [2, 64]: by block, which keys there are (where they are selected by indices)

    @gluon.constexpr_function
    def __init__(self, q, k, rope, q_rope, p0, p1, top, total, valid):
        self.q = q
        self.k = k
        self.rope = rope
        self.q_rope = q_rope
        self.p0 = p0
        self.p1 = p1
        self.top = top
        self.total = total
        self.valid = valid


@gluon.jit
def new_buffers(DTYPE: gl.constexpr, LAYOUT: gl.constexpr, P1_OVER_ROPE: gl.constexpr):
    """With `P1_OVER_ROPE`, P1 lies over the RoPE part of its own block; otherwise over that of the queries."""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_rope = gl.allocate_shared_memory(DTYPE, [TILE, ROPE], LAYOUT)
    rope = gl.allocate_shared_memory(DTYPE, [2, BLOCK, ROPE], LAYOUT)
    return Buffers(
        gl.allocate_shared_memory(DTYPE, [2, TILE, HALF], LAYOUT),
        gl.allocate_shared_memory(DTYPE, [4, BLOCK, HALF], LAYOUT),
        rope,
        q_rope,
        gl.allocate_shared_memory(DTYPE, [TILE, BLOCK], LAYOUT),
        rope.index(1) if P1_OVER_ROPE else q_rope,
        gl.allocate_shared_memory(gl.float32, [2, TILE], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2, TILE], VECTOR),
        gl.allocate_shared_memory(gl.int32, [2, BLOCK], VECTOR),
    )


@gluon.jit
def new_barrier(COUNT: gl.constexpr):
    # An allocation of its own: the compiler synchronises the threads between operations on two parts of one.
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def new_barriers(PRODUCERS: gl.constexpr):
    """Of the queries: full, empty; of the halves of the blocks: full, empty; then that P, and that the sums are there.

    A half is full when so many partitions have filled their share of it.
    """
    return (
        new_barrier(1),
        new_barrier(2),
        (new_barrier(PRODUCERS), new_barrier(PRODUCERS), new_barrier(PRODUCERS), new_barrier(PRODUCERS)),
        (new_barrier(1), new_barrier(1), new_barrier(1), new_barrier(1)),
        (new_barrier(1), new_barrier(1)),
        (new_barrier(1), new_barrier(1)),
    )
