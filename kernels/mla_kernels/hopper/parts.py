"""What the partitions of the dense kernel share: sizes, layouts, the work of a program, its shared memory."""

# Without `from __future__ import annotations`: an aggregate looks at the annotations of its fields.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import sizes
from .gluon_names import aggregate
from .schedule import item_length, item_units

SLACK = gl.constexpr(8.0)  # powers of two by which scores may exceed the reference of the exponents

TILE = gl.constexpr(sizes.TILE)
BLOCK = gl.constexpr(sizes.BLOCK)
HALF = gl.constexpr(sizes.D_V // 2)
ROPE = gl.constexpr(sizes.ROPE)
PANEL = gl.constexpr(sizes.PANEL)

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
def new_barrier(COUNT: gl.constexpr):
    # An allocation of its own: the compiler synchronises the threads between operations on two parts of one.
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier
