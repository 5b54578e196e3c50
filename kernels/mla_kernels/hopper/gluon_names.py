"""Names of Gluon that differ between the versions of Triton that are supported (3.6 to 3.9)."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

aggregate = getattr(gluon, "aggregate", None) or core._aggregate
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
