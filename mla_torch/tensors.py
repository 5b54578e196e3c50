"""What every call asks of its tensors before their shapes are looked at, and what it keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor

from mla_kernels.problem import TensorSpec

ALIGNMENT = 16  # bytes; the kernels read and write quantised rows in vectors, and TMA takes no other address
GRADIENT = "requires a gradient; {} is forward-only: detach it or call under torch.no_grad()"

# What the checks need of a tensor: dtype, shape, strides, and whether its address is a multiple of `ALIGNMENT`.  A plain tuple,
# because every call makes some.
Spec = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def full_spec(spec: Spec) -> TensorSpec:
    dtype, shape, strides, aligned = spec
    return TensorSpec(tuple(shape), dtype_name(dtype), tuple(strides), aligned)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the first byte lies at a multiple of 16; what has no address is taken to."""
    if tensor.is_meta or (type(tensor) is not torch.Tensor and isinstance(tensor, FakeTensor)):
        return True
    return tensor.data_ptr() % ALIGNMENT == 0


def check_tensors(
    function: str, tensors: Mapping[str, Any], needed: Sequence[str], aligned: Sequence[str] = ()
) -> tuple[Spec | None, ...]:
    """The specs of the tensors in their order, after the checks that only a tensor itself can answer.

    Args:
      function: what the caller called.
      tensors: by argument; those that are not `needed` may be None.  The first of `needed` says the device.
      aligned: arguments whose alignment is asked for; it is taken for granted of others.
    """
    device = getattr(tensors[needed[0]], "device", None)
    refuse_gradients = torch.is_grad_enabled()
    specs: list[Spec | None] = []
    for name, tensor in tensors.items():
        if tensor is None and name not in needed:
            specs.append(None)
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__module__}.{type(tensor).__qualname__}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected device {device}, as {needed[0]} has, got {tensor.device}")
        if refuse_gradients and tensor.requires_grad:
            raise ValueError(f"{name}: {GRADIENT.format(function)}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: expected a strided tensor, got layout {tensor.layout}")
        specs.append((tensor.dtype, tensor.shape, tensor.stride(), name not in aligned or is_aligned(tensor)))
    return tuple(specs)


def as_bytes(name: str, cache: torch.Tensor) -> torch.Tensor:
    """A quantised cache as uint8, without a copy."""
    if cache.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name}: its first byte must lie at a multiple of {ALIGNMENT}, got {cache.data_ptr():#x}")
    return cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
