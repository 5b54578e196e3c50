"""Launches a binary of Triton's through the CUDA driver, without the Python that Triton runs for every launch.

Triton's launcher looks at each argument anew, constants too, which takes a host three times as long as the driver takes.  All
that it would tell the driver is known with the binary, but for addresses, tensor maps and the stream: here the rest is
written once, into memory that the driver copies the parameters from.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton import knobs

SWITCH = "MLA_DECODE_DIRECT"  # an environment variable: "0" when this is imported leaves all launches to Triton
TURNED_OFF = os.environ.get(SWITCH) == "0"

MAPS_KEPT = 256  # per descriptor: a cache has one address, and so has each layer's; q has those that an allocator reuses
MAP_BYTES = 128  # of a CUtensorMap
MAP_ALIGNMENT = 128
MAX_SHARED_MEMORY = 228 * 1024  # beyond, Triton sets an attribute of its own

# Triton's versions whose launchers do what is done here, and what their `make_tensordesc_arg` takes beside a descriptor.
VERSIONS: dict[tuple[int, int], tuple] = {(3, 6): (), (3, 7): (), (3, 8): (None,), (3, 9): (None,)}

SCALARS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q"}  # Triton's types, and those of `struct`

CUDA_ERROR_INVALID_CONTEXT = 201
PROGRAMMATIC_STREAM_SERIALIZATION = 6


class Refused(Exception):  # noqa: N818
    """Why a binary is left to Triton's own launcher."""


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_memory", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


class _At:
    """In place of a tensor, for Triton to encode a tensor map of."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@functools.cache
def load_driver() -> Any:
    """The CUDA driver's functions, which give the interpreter up while they run.

    A launch waits where the driver's queue is full.  What it waits for may be a host function of the stream that needs the
    interpreter, so a launch must not hold it.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        for name in ("cuLaunchKernelEx", "cuFuncGetParamInfo", "cuGetErrorName"):
            getattr(cuda, name)
    except (OSError, AttributeError) as error:
        raise Refused(f"no CUDA driver, or not one of CUDA 12.4 or later: {error}") from None
    return cuda


def hooked() -> bool:
    """Whether somebody, such as a profiler, wants to hear of launches, which only Triton's launcher tells."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _map_encoder(describe: Callable[[Any], Any], metadata: Any) -> Callable[[int], bytes]:
    """A function of the address that gives the bytes of the tensor map, encoded as Triton does, or kept from before."""
    from triton.backends.nvidia import driver

    more = VERSIONS[_version()]
    # A Python object that ends with the map: what is before it differs with the alignment that Triton's compiler knew.
    offset = driver.PyCUtensorMap.__basicsize__ - MAP_BYTES
    if offset not in (64, 128):
        raise Refused(f"a tensor map lies {offset} bytes into Triton's object")

    @functools.lru_cache(MAPS_KEPT)
    def encode(address: int) -> bytes:
        found = driver.make_tensordesc_arg(describe(_At(address)), metadata, *more)[0]
        return ctypes.string_at(id(found) + offset, MAP_BYTES)

    return encode


def _version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def check(binary: Any, grid: Sequence[int]) -> None:
    """Raises `Refused` for what Triton's launcher does more of than is done here."""
    metadata = binary.metadata
    if TURNED_OFF:
        raise Refused(f"turned off by {SWITCH}=0")
    if _version() not in VERSIONS:
        raise Refused(f"Triton {triton.__version__} is not known")
    if metadata.target.backend != "cuda":
        raise Refused(f"a binary for {metadata.target.backend}")
    if 0 in grid:
        raise Refused("an empty grid")
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.instrumentation_mode:
        raise Refused("clusters, a cooperative grid, or instrumentation")
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.shared > MAX_SHARED_MEMORY:
        raise Refused("scratch of Triton's own, or more shared memory than usual")


def layout(binary: Any, arguments: Sequence[Any]) -> list[tuple[str, Any]]:
    """The kernel's parameters in order.

    Args:
      binary: Triton's `CompiledKernel`.
      arguments: as `DirectLaunch` takes them.

    Returns:
      Per parameter its type, in the words of `struct`, and what it is: "map" or "address", both with the index of an address of
      a launch, or "value" with an integer.
    """
    signature = list(binary.src.signature.values())
    if any(kind != "constexpr" for kind in signature[len(arguments) :]):
        raise Refused("parameters without an argument")
    parameters: list[tuple[str, Any]] = []
    index = 0
    for kind, argument in zip(signature, arguments, strict=False):
        if isinstance(argument, int):
            if kind != "constexpr":  # as Triton makes of an integer that it specialises the kernel on
                if kind not in SCALARS:
                    raise Refused(f"an integer as {kind}")
                parameters.append((SCALARS[kind], ("value", argument)))
            continue
        if argument is None and kind.startswith("*"):
            parameters.append(("Q", ("address", index)))
        elif argument is not None and kind.startswith("tensordesc<"):
            descriptor = argument(_At(0))
            parameters.append((f"{MAP_BYTES}s", ("map", index)))
            parameters += [("i", ("value", size)) for size in descriptor.shape]
            parameters += [("q", ("value", stride)) for stride in descriptor.strides]
        else:
            raise Refused(f"an array or a descriptor as {kind}")
        index += 1
    return [*parameters, ("Q", ("value", 0)), ("Q", ("value", 0))]  # no scratch of Triton's own, of either kind


def _sizes_of_parameters(cuda: Any, function: ctypes.c_void_p) -> list[int]:
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while cuda.cuFuncGetParamInfo(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


class DirectLaunch:
    """Launches one binary, on one grid, with the same integers; any number of threads may do so at once.

    Args:
      binary: Triton's `CompiledKernel`, with its function loaded.
      grid: of the launch, three sizes.
      arguments: of the kernel, up to its constants: an integer; None for an array; or, for an array's descriptor, a function
        that makes it from what has the array's `data_ptr`.
      overlaps: it may begin before what is launched before it has ended, for which the kernel itself waits.
      cuda: the driver, if it is not to be the one of this machine.

    Raises:
      Refused: the binary is not launched here.
    """

    def __init__(self, binary: Any, grid: Sequence[int], arguments: Sequence[Any], overlaps: bool = False, cuda: Any = None):
        check(binary, grid)
        self._cuda = load_driver() if cuda is None else cuda
        self._launch = self._cuda.cuLaunchKernelEx
        self._overlaps = overlaps or binary.metadata.launch_pdl
        self._binary = binary  # Triton unloads a binary that nobody holds
        self._grid = tuple(grid)
        self._function = ctypes.c_void_p(binary.function)
        self._parameters = layout(binary, arguments)
        sizes = [struct.calcsize(kind) for kind, _ in self._parameters]
        wanted = _sizes_of_parameters(self._cuda, self._function)
        if sizes != wanted:
            raise Refused(f"parameters of {sizes} bytes, the binary has {wanted}")

        descriptors = [argument for argument in arguments if not isinstance(argument, int)]
        metas = iter(getattr(binary.metadata, "tensordesc_meta", None) or ())
        self._maps = []
        for i, describe in enumerate(descriptors):
            if describe is not None:
                meta = next(metas, None)
                if meta is None:
                    raise Refused("a descriptor that the kernel does not get as a tensor map")
                self._maps.append((i, _map_encoder(describe, meta)))
        self._pack = struct.Struct(f"<{f'{MAP_BYTES}s' * len(self._maps)}{len(descriptors)}Q").pack_into
        self._num_addresses = len(descriptors)
        # The driver copies the parameters before a launch returns, but other threads run meanwhile.  So a launch takes its
        # memory off this stack, and makes more where it finds none.
        self._memory = [self._new_memory()]

    def _new_memory(self) -> tuple[ctypes.Array, _Config, Any, ctypes.Array]:
        """What describes a launch: maps, addresses and integers; the configuration and a reference to it; the parameters."""
        start_of_addresses = MAP_BYTES * len(self._maps)
        start_of_values = start_of_addresses + 8 * self._num_addresses
        size = start_of_values + 8 * len(self._parameters)
        raw = (ctypes.c_char * (size + MAP_ALIGNMENT))()
        skipped = -ctypes.addressof(raw) % MAP_ALIGNMENT
        memory = (ctypes.c_char * size).from_buffer(raw, skipped)
        maps = [i for i, _ in self._maps]
        offsets = []
        for n, (kind, (what, given)) in enumerate(self._parameters):
            if what == "map":
                offset = MAP_BYTES * maps.index(given)
            elif what == "address":
                offset = start_of_addresses + 8 * given
            else:
                offset = start_of_values + 8 * n
                struct.pack_into(f"<{kind}", memory, offset, given)
            offsets.append(ctypes.addressof(memory) + offset)
        metadata = self._binary.metadata
        config = _Config(
            grid=self._grid,
            # The warps of all partitions of a warp-specialised kernel.
            block=(metadata.target.warp_size * metadata.num_warps, 1, 1),
            shared_memory=metadata.shared,
        )
        if self._overlaps:
            config.attributes = ctypes.pointer(_Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,)))
            config.num_attributes = 1
        return memory, config, ctypes.byref(config), (ctypes.c_void_p * len(offsets))(*offsets)

    def __call__(self, addresses: Sequence[int], stream: int) -> bool:
        """Launches on a stream of the current context.

        Args:
          addresses: of the arrays, and of those described, in their order.

        Returns:
          False if nothing was launched because this thread has no context, which Triton's launcher would see to.
        """
        try:
            taken = self._memory.pop()
        except IndexError:
            taken = self._new_memory()
        memory, config, reference, parameters = taken
        if self._maps:
            maps = [encode(addresses[i]) for i, encode in self._maps]
            self._pack(memory, 0, *maps, *addresses)
        else:
            self._pack(memory, 0, *addresses)
        config.stream = stream
        code = self._launch(reference, self._function, parameters, None)
        self._memory.append(taken)
        if code == 0:
            return True
        if code == CUDA_ERROR_INVALID_CONTEXT:
            return False
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(
            f"{self._binary.name}: the CUDA driver returned {(name.value or b'?').decode()} ({code}) for its launch"
        )
