"""Executes plans with PyTorch tensors: device facts, buffers, the softmax scale's pointer and the launches."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels import direct
from mla_kernels.attend import attend_kernel
from mla_kernels.device import INTERPRETER, DeviceFacts
from mla_kernels.launch import INTERPRETER_LOCK, Buffer, Launch, Plan, TileDescriptor

# Triton decides when a kernel is defined, so the kernel itself is what knows.
INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)

SCALES_KEPT = 256
SCALES_PINNED = 256
SCRATCH_ALIGNMENT = 64  # elements, 256 bytes


def allocate(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor; all made here are: a test that replaces this function sees, or poisons, all of them."""
    return torch.empty(*shape, dtype=dtype, device=device)  # which PyTorch reads in less time than a tuple


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    found = torch.cuda.get_device_properties(index)
    shared_memory = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return DeviceFacts(found.name, (found.major, found.minor), found.multi_processor_count, shared_memory)


def device_facts(device: torch.device) -> DeviceFacts | None:
    """What planning may know of `device`; None where the kernels do not run."""
    if device.type not in ("cpu", "cuda"):
        return None
    if INTERPRETED:
        return INTERPRETER
    if device.type == "cpu":
        return None
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


class Scales:
    """One-element fp32 tensors of Python numbers, so that a repeated scale costs no fill.

    A tensor is kept per device, stream and value, because its fill is ordered with the work of one stream only.  A tensor
    that a CUDA graph captured is pinned: the graph replays its address for as long as it lives.  A value that is new during
    a capture is not kept at all: its memory belongs to the graph, and its fill runs only when the graph is replayed.
    """

    def __init__(self, kept: int = SCALES_KEPT, pinned: int = SCALES_PINNED):
        self._kept: OrderedDict[tuple, torch.Tensor] = OrderedDict()
        self._pinned: dict[tuple, torch.Tensor] = {}
        self._max_kept = kept
        self._max_pinned = pinned
        self._lock = threading.Lock()

    def get(self, value: float, device: torch.device, stream: int | None = None, capturing: bool = False) -> torch.Tensor:
        """fp32 [1] on `device`; `stream` is the current one there, `capturing` whether a graph is being captured from it."""
        key = (device, stream, value)
        with self._lock:
            found = self._pinned.get(key)
            if found is None and (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                if not capturing:
                    found = kept
                elif len(self._pinned) < self._max_pinned:
                    found = self._pinned[key] = kept
        if found is None:
            found = torch.full((1,), value, dtype=torch.float32, device=device)
            if not capturing:
                with self._lock:
                    self._kept[key] = found
                    while len(self._kept) > self._max_kept:
                        self._kept.popitem(last=False)
        return found


scales = Scales()


def scale_tensor(value: float | torch.Tensor, device: torch.device, stream: int | None) -> torch.Tensor:
    """The fp32 element that the kernels read, from what `check_scale` returned; `stream` is the current one of `device`."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype == torch.float32 else value.to(torch.float32)
    return scales.get(value, device, stream, stream is not None and torch.cuda.is_current_stream_capturing())


@functools.cache
def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"  # for which PyTorch makes a string each time


def current_stream(device: torch.device) -> int | None:
    """The handle of the current stream of a CUDA device, which must be the current one; None for another device."""
    if not _is_cuda(device):
        return None
    # PyTorch's own way makes an object of it, which takes ten times as long.
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.get_current_stream(index)


def _descriptor_maker(tile: TileDescriptor) -> Callable[[torch.Tensor], Any]:
    """A function that makes Triton's descriptor of `tile` for the tensor of a call.

    Triton's constructor checks every field, which takes several times as long as all else here.  It does so once: what it
    made is copied without being called again, and each descriptor is a new object, so that threads share none.
    """
    nothing = torch.empty(0, dtype=torch.bfloat16, device="cpu")  # a tensor of a call would be kept alive
    checked = TensorDescriptor(nothing, list(tile.shape), [tile.row_stride, 1], list(tile.block_shape), layout=tile.layout)
    fields = vars(checked)

    def make(tensor: torch.Tensor) -> Any:
        descriptor = object.__new__(TensorDescriptor)
        own = descriptor.__dict__
        own.update(fields)
        own["base"] = tensor
        return descriptor

    return make


class _Binary(NamedTuple):
    """What launches a binary: Triton, which takes the constants too, and what takes less time, or why that is refused."""

    launch: Callable[..., None]
    constants: tuple
    direct: direct.DirectLaunch | None
    refused: str = ""


class Step:
    """One launch, with all that does not change between calls worked out.

    Triton's own way to launch looks at every argument anew, which takes longer than the kernel of a small call.  All that a
    binary depends on beside the plan is which pointers are multiples of 16 bytes, so binaries are kept by that, and get
    addresses in place of tensors.
    """

    __slots__ = (
        "_addresses",
        "_binaries",
        "_constants",
        "_descriptors",
        "_grid",
        "_inputs",
        "_kernel",
        "_options",
        "_outputs",
        "_overlaps",
        "_scalars",
    )

    def __init__(self, launch: Launch):
        self._kernel = launch.kernel
        self._grid = launch.grid
        self._inputs = launch.input_arrays
        self._descriptors = [
            (i, item.array, _descriptor_maker(item)) for i, item in enumerate(launch.inputs) if isinstance(item, TileDescriptor)
        ]
        self._scalars = launch.scalars
        self._outputs = launch.outputs
        self._addresses = operator.itemgetter(*self._inputs, *self._outputs)  # of two at least, so a tuple
        self._constants = launch.constexprs
        self._overlaps = launch.overlaps
        self._options = {
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            # Stated because jax-triton and Triton could differ in their defaults, and the binaries must not.
            "enable_fp_fusion": True,
        }
        self._binaries: dict[tuple[bool, ...], _Binary] = {}

    def __call__(self, addresses: Mapping[str, int], tensor: Callable[[str], torch.Tensor], stream: int | None = None) -> None:
        """Launches on `stream`, of the current device.

        Args:
          addresses: of the arrays by their names.
          tensor: gives the tensor of a name.
        """
        given = self._addresses(addresses)
        aligned = tuple([address % 16 == 0 for address in given])
        known = self._binaries.get(aligned)
        if known is None:
            self._compile(aligned, tensor)
            return
        launch, constants, fast, _ = known
        if fast is not None and stream is not None and not direct.hooked() and fast(given, stream):
            return
        inputs: list[Any] = list(given[: len(self._inputs)])
        for i, name, make in self._descriptors:
            inputs[i] = make(tensor(name))
        launch(*inputs, *self._scalars, *given[len(self._inputs) :], *constants, stream=stream)

    def _compile(self, aligned: tuple[bool, ...], tensor: Callable[[str], torch.Tensor]) -> None:
        """Launches in Triton's way, and keeps the binary that it has for these arguments."""
        tensors: list[Any] = [tensor(name) for name in self._inputs]
        for i, name, make in self._descriptors:
            tensors[i] = make(tensor(name))
        arguments = (*tensors, *self._scalars, *[tensor(name) for name in self._outputs])
        binary = self._kernel[self._grid](*arguments, **self._constants, **self._options)
        if binary is None:  # as the interpreter's is
            return
        launch = binary[self._grid]
        constants = tuple([self._constants[name] for name in self._kernel.arg_names[len(arguments) :]])
        kinds: list[Any] = [None] * len(self._inputs)
        for i, _, make in self._descriptors:
            kinds[i] = make
        kinds += [*self._scalars, *[None] * len(self._outputs)]
        try:
            known = _Binary(launch, constants, direct.DirectLaunch(binary, self._grid, kinds, self._overlaps))
        except Exception as error:  # Triton's own launcher serves every binary, and says what is wrong with one
            known = _Binary(launch, constants, None, f"{type(error).__name__}: {error}")
        self._binaries[aligned] = known


# The arguments of `decode` that launches have other names for.
ARRAYS = {
    "table": "block_table",
    "lengths": "cache_seqlens",
    "extra_table": "extra_indices",
    "extra_lengths": "extra_topk_length",
}
SPARSE_ARRAYS = {"table": "indices", "lengths": "topk_length"}


class Program:
    """A plan made ready to be executed many times, by any number of threads.

    Attributes:
      scratch: every buffer of the scratch, and the element of the allocation that it starts at.
      scratch_size: elements of the allocation.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        problem = plan.problem
        lse = plan.buffers["lse"]
        self._lse_shape = lse.shape
        # All scratch is one allocation of fp32: an allocation takes as long as half a launch.
        self.scratch: dict[str, tuple[int, Buffer]] = {}
        self.scratch_size = 0
        for name, buffer in plan.buffers.items():
            if name not in ("out", "lse"):
                self.scratch[name] = self.scratch_size, buffer
                elements = -(-math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize // 4)
                self.scratch_size += -(-elements // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self._scratch_bytes = [(name, 4 * offset) for name, (offset, _) in self.scratch.items()]
        out = plan.buffers["out"]
        self._out_shape = out.shape
        self._out_dtype = getattr(torch, out.dtype)
        # The interpreter cannot round to 16 bits as a GPU does, so its plan computes `out` in fp32 and PyTorch rounds it.
        self._rounded_to = None if out.dtype == problem.dtype else getattr(torch, problem.dtype)
        launches = [launch for launch in plan.launches if launch.grid[0] > 0]
        self._steps = [Step(launch) for launch in launches]
        names = ARRAYS | SPARSE_ARRAYS if problem.sparse else ARRAYS
        given = {name for launch in launches for name in launch.input_arrays} - plan.buffers.keys() - {"softmax_scale"}
        self._arguments = [(name, names.get(name, name)) for name in sorted(given)]
        self._lock = INTERPRETER_LOCK if plan.facts.interpreted else nullcontext()

    def run(self, tensors: Mapping[str, Any], scale: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches everything on the current stream of the current device; waits for nothing.

        Args:
          tensors: the call's, by argument.  `out`, unless None, is written in place of a new tensor; it has the strides that
            the plan's problem states.
          scale: of the softmax, as `check_scale` returns it.

        Returns:
          out [b, s_q, h_q, d_v] in the dtype of q, and lse fp32 [b, h_q, s_q].
        """
        device = tensors["q"].device
        out = tensors["out"]
        stream = current_stream(device)
        softmax_scale = scale_tensor(scale, device, stream)
        lse = allocate(self._lse_shape, dtype=torch.float32, device=device)
        if out is None or self._rounded_to is not None:
            result = allocate(self._out_shape, dtype=self._out_dtype, device=device)
        else:
            result = out
        addresses = {name: tensors[argument].data_ptr() for name, argument in self._arguments}
        addresses["softmax_scale"] = softmax_scale.data_ptr()
        addresses["out"] = result.data_ptr()
        addresses["lse"] = lse.data_ptr()
        if self.scratch_size:
            scratch = allocate((self.scratch_size,), dtype=torch.float32, device=device)
            start = scratch.data_ptr()
            for name, offset in self._scratch_bytes:
                addresses[name] = start + offset

        def tensor(name: str) -> torch.Tensor:
            if name not in self.scratch:
                made = {"softmax_scale": softmax_scale, "out": result, "lse": lse}
                return made[name] if name in made else tensors[dict(self._arguments)[name]]
            offset, buffer = self.scratch[name]
            part = scratch[offset:].view(getattr(torch, buffer.dtype))
            return part[: math.prod(buffer.shape)].view(buffer.shape)

        with self._lock:
            for step in self._steps:
                step(addresses, tensor, stream)
        if self._rounded_to is not None:
            result = result.to(self._rounded_to) if out is None else out.copy_(result)
        return result, lse
