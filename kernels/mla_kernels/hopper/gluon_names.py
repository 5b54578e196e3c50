"""Names of Gluon that differ between the versions of Triton that are supported (3.6 to 3.9)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

aggregate = getattr(gluon, "aggregate", None) or core._aggregate
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_copies = async_copy.commit_group
wait_copies = async_copy.wait_group

_UNDERSCORED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory as elements of another type."""
    if _UNDERSCORED:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
