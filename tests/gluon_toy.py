"""Small Gluon kernels with what the launchers and the adapter to jax-triton must get right."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mla_kernels.device import DeviceFacts
from mla_kernels.launch import Buffer, Launch, Plan, TileDescriptor
from mla_kernels.problem import Problem

# Triton 3.8 renamed it, 3.9 dropped the old name.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _double_half(x_ptr, n, y_ptr, first, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = first + gl.arange(0, BLOCK, layout=layout)
    gl.store(y_ptr + i, 2 * gl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n)


@gluon.jit
def _even(x_ptr, n, y_ptr, BLOCK: gl.constexpr):
    _double_half(x_ptr, n, y_ptr, 0, BLOCK)


@gluon.jit
def _odd(x_ptr, n, y_ptr, BLOCK: gl.constexpr):
    _double_half(x_ptr, n, y_ptr, BLOCK, BLOCK)


@gluon.jit(do_not_specialize=["n"])
def specialised_kernel(x_ptr, n, y_ptr, BLOCK: gl.constexpr):
    """y = 2 x by two partitions of four warps, for n = 2 * BLOCK."""
    gl.warp_specialize([(_even, (x_ptr, n, y_ptr, BLOCK)), (_odd, (x_ptr, n, y_ptr, BLOCK))], [4], [64])


@gluon.jit
def descriptor_kernel(x_desc, y_ptr):
    """Copies a 64 x 64 tile through a TMA descriptor."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, [64, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, 64 * 64 * 2)
    async_load(x_desc, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(y_ptr + rows[:, None] * 64 + columns[None, :], tile.load(layout))


@gluon.jit
def _fetch(x_desc, row, tile, ready):
    mbarrier.expect(ready, 64 * 64 * 2)
    async_load(x_desc, [row, 64], ready, tile)


@gluon.jit
def _double(one, row, tile, ready, y_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    mbarrier.wait(ready, 0)
    y = (one + 1) * tile.load(layout).to(gl.float32)
    gl.store(y_ptr + rows[:, None] * 64 + columns[None, :], y)


@gluon.jit(do_not_specialize=["one"])
def fetch_and_double_kernel(x_desc, x_ptr, one, y_ptr, ROWS: gl.constexpr):
    """y = 2 x[:, 64:128]: a partition of one warp fetches, and the default partition doubles, for one = 1."""
    tile = gl.allocate_shared_memory(x_desc.dtype, [ROWS, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    row = gl.program_id(0) * ROWS
    gl.warp_specialize([(_double, (one, row, tile, ready, y_ptr)), (_fetch, (x_desc, row, tile, ready))], [1], [24])


def fetching_plan(problem: Problem, facts: DeviceFacts) -> Plan:
    """One launch that fetches tiles of q through a descriptor; `lse` is there because plans have one."""
    rows = problem.batch * problem.s_q * problem.h_q
    launch = Launch(
        kernel=fetch_and_double_kernel,
        inputs=(TileDescriptor("q", (rows, problem.d_qk), problem.d_qk, (64, 64)), "q"),
        scalars=(1,),
        outputs=("out",),
        constexprs={"ROWS": 64},
        grid=(rows // 64, 1, 1),
        num_warps=4,
        num_stages=1,
    )
    buffers = {"out": Buffer((rows, 64), "float32"), "lse": Buffer(problem.lse_shape, "float32")}
    return Plan("toy", problem, facts, (launch,), buffers)
