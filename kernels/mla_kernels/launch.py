"""The plan of a call as data: which kernels run, on which arrays, with which constants.

A front end executes a `Plan` without understanding it: it allocates `buffers`, then issues `launches` in order.  For each
launch the kernel's parameters are, in this order: `inputs` (arrays by name, or descriptors of them), `scalars` (32-bit
integers), `outputs` (arrays by name), and `constexprs` by keyword.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from triton.experimental.gluon import language as gl

from .device import DeviceFacts
from .problem import Problem

# Held while interpreted kernels run: Triton's interpreter keeps its state in module globals.
INTERPRETER_LOCK = threading.Lock()


@dataclass(frozen=True)
class Buffer:
    """An array that the front end allocates, uninitialised."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TileDescriptor:
    """A TMA descriptor of a two-dimensional view of an input array: tiles of it are fetched into shared memory.

    The view starts at the array's first element, whose address must be a multiple of 16 bytes.  Its elements have 16 bits,
    its rows start 16 bytes or a multiple of that apart, and a tile lies in shared memory with a swizzle of 128 bytes.

    Attributes:
      array: its name, as in `Launch.inputs`.
      shape: of the view, in elements.  What a tile reaches beyond it is filled with zeros.
      row_stride: elements from row to row; columns are dense.
      block_shape: of a tile, in elements.
    """

    array: str
    shape: tuple[int, int]
    row_stride: int
    block_shape: tuple[int, int]

    @property
    def layout(self) -> gl.NVMMASharedLayout:
        """Of a tile in shared memory."""
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Names in `inputs` are those of the call's arrays (`q`, `kv_cache`, `table`, `lengths`, `extra_kv_cache`, `extra_table`,
    `extra_lengths`, `softmax_scale`, `attn_sink`) or of buffers written by an earlier launch.  `table` is the block table
    of a dense call and the indices of a sparse one; `lengths` is `cache_seqlens` or `topk_length`.  A name that stands in
    both `inputs` and `outputs` is updated in place, and the kernel gets its pointer twice.  A `TileDescriptor` only reads:
    its array is no output of the same launch.

    With `overlaps`, a front end that can should have the launch begin before the one before it has ended (CUDA's programmatic
    dependent launch): the kernel itself waits for that end before it touches memory.
    """

    kernel: Any  # triton.JITFunction or GluonJITFunction, or the interpreted twin of the former
    inputs: tuple[str | TileDescriptor, ...]
    scalars: tuple[int, ...]
    outputs: tuple[str, ...]
    constexprs: dict[str, Any]
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    overlaps: bool = False

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__ if hasattr(self.kernel, "fn") else self.kernel.__name__

    @property
    def input_arrays(self) -> tuple[str, ...]:
        """Names of the arrays that `inputs` points to or describes."""
        return tuple(item.array if isinstance(item, TileDescriptor) else item for item in self.inputs)

    @property
    def aliases(self) -> dict[int, int]:
        """Positions in `inputs` to positions in `outputs` of the arrays that are updated in place."""
        return {self.inputs.index(name): i for i, name in enumerate(self.outputs) if name in self.inputs}


@dataclass(frozen=True)
class Plan:
    """How an implementation serves a problem on a device.  `buffers` holds `out`, `lse` and the scratch."""

    implementation: str
    problem: Problem
    facts: DeviceFacts
    launches: tuple[Launch, ...]
    buffers: dict[str, Buffer]
    details: dict[str, Any] = field(default_factory=dict)  # tiles, programs, splits: for `explain`


@dataclass(frozen=True)
class Refusal:
    """Why an implementation does not serve a problem: the argument at fault, and the reason."""

    argument: str
    reason: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.reason}"
