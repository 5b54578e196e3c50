"""A kernel whose warpgroups hand values to each other as those of the Hopper kernels do, and nothing else.

Racecheck should find nothing in it.  What it does report here, it cannot be believed about in the other kernels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SIZE = 64
PROGRAMS = 4
ROUNDS = 20

ROWS = gl.constexpr(SIZE)
# The rows of a product of a warpgroup: four threads hold each.
LAYOUT = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))


@gluon.jit
def _exchange(vectors, full, rounds, x_ptr, y_ptr, OWN: gl.constexpr):
    """In each round, warpgroup 0 gives its vector to warpgroup 1, which gives it back with 1 added.

    All threads of a warpgroup store, a `bar.sync` of the warpgroup follows, one thread arrives, and all threads of the other
    warpgroup wait before they load.  A vector is stored again only after the other one, made of it, has come back.
    """
    OTHER: gl.constexpr = 1 - OWN
    row = gl.arange(0, ROWS, layout=LAYOUT)
    x = gl.load(x_ptr + row)
    for i in range(rounds):
        if OWN == 1:
            mbarrier.wait(full[OTHER], i & 1)
            x = vectors.index(OTHER).load(LAYOUT) + 1
        vectors.index(OWN).store(x)
        mbarrier.arrive(full[OWN])
        if OWN == 0:
            mbarrier.wait(full[OTHER], i & 1)
            x = vectors.index(OTHER).load(LAYOUT)
    gl.store(y_ptr + (2 * gl.program_id(0) + OWN) * ROWS + row, x)


@gluon.jit
def _note(rounds, seen_ptr):
    gl.store(seen_ptr + gl.program_id(0), rounds)


@gluon.jit
def control_kernel(x_ptr, rounds_ptr, y_ptr, seen_ptr):
    """y [programs, 2, 64] = x + rounds, by either warpgroup; a third partition, of one warp, notes the rounds in `seen`."""
    rounds = gl.load(rounds_ptr)  # computed here, so that the partitions get it through shared memory
    vectors = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=1)
    back = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(back, count=1)
    gl.warp_specialize(
        [
            (_exchange, (vectors, (there, back), rounds, x_ptr, y_ptr, 0)),
            (_exchange, (vectors, (there, back), rounds, x_ptr, y_ptr, 1)),
            (_note, (rounds, seen_ptr)),
        ],
        [4, 1],
        [64, 24],
    )


def run() -> bool:
    """Whether the current GPU, which must be a Hopper one, hands over every value."""
    import torch

    x = torch.arange(SIZE, dtype=torch.float32, device="cuda")
    rounds = torch.full((1,), ROUNDS, dtype=torch.int32, device="cuda")
    y = torch.zeros(PROGRAMS, 2, SIZE, dtype=torch.float32, device="cuda")
    seen = torch.zeros(PROGRAMS, dtype=torch.int32, device="cuda")
    control_kernel[(PROGRAMS,)](x, rounds, y, seen, num_warps=4)
    torch.cuda.synchronize()
    return bool((y == x + ROUNDS).all() and (seen == ROUNDS).all())
