"""Reads the kernel calls in a lowered JAX function: names, launch sizes and PTX, as the GPU's runtime will get them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mla_jax import jax_triton_compat as compat

TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor; shape and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]


@dataclass(frozen=True)
class KernelCall:
    """One call of a compiled kernel.

    Attributes:
      num_warps: that it is launched with.
      params: the kernel's arguments in order: "pointer", "descriptor", or the value of a scalar.
      descriptors: those of `params`.
      operands, results: MLIR types of the custom call's arrays.
      aliases: operand to result of the buffers that are shared.
    """

    name: str
    ptx: str
    num_warps: int
    shared_memory: int
    compute_capability: int
    grid: tuple[int, int, int]
    params: tuple[int | str, ...]
    descriptors: tuple[Descriptor, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    aliases: dict[int, int]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a protocol buffer; nested messages and strings as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind == 2:
                size, at = _varint(data, at)
            else:
                size = {1: 8, 5: 4}[kind]
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _descriptor(message: bytes) -> Descriptor:
    content = dict(_fields(dict(_fields(message))[1]))

    def numbers(packed: bytes) -> tuple[int, ...]:
        found, at = [], 0
        while at < len(packed):
            number, at = _varint(packed, at)
            found.append(number)
        return tuple(found)

    return Descriptor(numbers(content[3]), numbers(content[4]), numbers(content[5]))


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner
                yield from _operations(inner)


def _parse(payload: bytes, operation: Any) -> KernelCall:
    (call,) = [value for number, value in _fields(zlib.decompress(payload)) if number == 1]
    kernel: dict[int, Any] = {}
    grid = {2: 1, 3: 1, 4: 1}
    params: list[int | str] = []
    descriptors: list[Descriptor] = []
    repeated = 0
    for number, value in _fields(call):
        if number == 1:
            kernel = dict(_fields(value))
        elif number in grid:
            grid[number] = value
        elif number == 5:
            ((field, content),) = _fields(value)
            if repeated:  # a descriptor's shape and strides follow it as scalars
                repeated -= 1
            elif field == 9:
                params.append("descriptor")
                descriptors.append(_descriptor(content))
                repeated = 2 * len(descriptors[-1].shape)
            else:
                params.append("pointer" if field == 1 else content)
    aliases = {}
    attributes = operation.attributes
    if "output_operand_aliases" in attributes:
        found = list(attributes["output_operand_aliases"])
    else:
        found = []
    for alias in found:
        text = str(alias)  # the bindings give no access to its parts
        result = int(text.split("output_tuple_indices = [")[1].split("]")[0] or 0)
        aliases[int(text.split("operand_index = ")[1].split(",")[0])] = result
    return KernelCall(
        name=kernel[1].decode(),
        ptx=kernel[4].decode(),
        num_warps=kernel[2],
        shared_memory=kernel.get(3, 0),
        compute_capability=kernel[6],
        grid=(grid[2], grid[3], grid[4]),
        params=tuple(params),
        descriptors=tuple(descriptors),
        operands=tuple(str(operand.type) for operand in operation.operands),
        results=tuple(str(result.type) for result in operation.results),
        aliases=aliases,
    )


def kernel_operations(module: Any) -> list[Any]:
    """The custom calls of kernels in a StableHLO module, in order; they do not outlive it."""
    return [
        operation
        for operation in _operations(module.operation)
        if operation.operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value in TARGETS
    ]


def kernel_calls(lowered: Any) -> list[KernelCall]:
    """The kernel calls of a `jax.stages.Lowered` (for CUDA), in order."""
    calls = []
    module = lowered.compiler_ir("stablehlo")
    for operation in kernel_operations(module):
        attributes = operation.attributes
        if "mhlo.backend_config" in attributes:
            payload = attributes["mhlo.backend_config"]["opaque"].value_bytes
        else:
            payload = attributes["backend_config"].value_bytes
        calls.append(_parse(payload, operation))
    return calls


def ptx_of_calls(ptx: str) -> str:
    """What Triton's PTX of one of the package's kernels becomes in a compiled call."""
    slim = (0, 4) <= compat.version_of("jax-triton") <= (0, 4, 1)
    return compat.slim_ptx(ptx) if slim else ptx
