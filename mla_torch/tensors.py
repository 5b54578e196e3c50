"""What every call asks of its tensors before their shapes are looked at, and what it keeps of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from mla_kernels.problem import TensorSpec

ALIGNMENT = 16  # bytes; the kernels read and write quantised rows in vectors, and TMA takes no other address
FLOAT32_MAX = torch.finfo(torch.float32).max

# The level of the innermost transform of torch.func that is active, None outside of all, and whether a tensor belongs to one.
_functorch = getattr(torch._C, "_functorch", None)
transform_level: Callable[[], int | None] = getattr(_functorch, "maybe_current_level", lambda: None)
_is_transformed: Callable[[torch.Tensor], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", lambda tensor: False)

# What the checks need of a tensor: dtype, shape, strides, and whether its address is a multiple of `ALIGNMENT`.  A plain tuple,
# because every call makes some.
Spec = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def float_dtype(dtype: Any, allowed: Sequence[str]) -> torch.dtype:
    """`dtype`, an argument of this name.

    Raises:
      ValueError: it is none of those `allowed`.
    """
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) not in allowed:
        raise ValueError(f"dtype: expected {' or '.join(f'torch.{name}' for name in allowed)}, got {dtype!r}")
    return dtype


def full_spec(spec: Spec) -> TensorSpec:
    dtype, shape, strides, aligned = spec
    return TensorSpec(tuple(shape), dtype_name(dtype), tuple(strides), aligned)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the first byte lies at a multiple of 16; what has no address is taken to."""
    if tensor.is_meta or (type(tensor) is not torch.Tensor and isinstance(tensor, FakeTensor)):
        return True
    return tensor.data_ptr() % ALIGNMENT == 0


def _refuse_gradient(function: str, name: str) -> None:
    raise ValueError(f"{name}: requires a gradient; {function} is forward-only: detach it or call under torch.no_grad()")


def _differentiates_forward() -> bool:
    """Whether a level of forward-mode differentiation is active: outside of one no tensor has a tangent."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def _refuse_tangents(function: str, tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(f"{name}: has a tangent, which {function} would lose: detach it")


def refuse_transform(function: str, tensors: Mapping[str, Any]) -> None:
    """Refuses a call inside a transform of torch.func: tensors that are made there may have no address to launch with."""
    where = "a transform of torch.func (grad, jvp, vmap and others)"
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and _is_transformed(tensor):
            raise ValueError(f"{name}: belongs to {where}, in which {function} does not run: call it outside")
    raise ValueError(f"{function}: does not run in {where}: call it outside")


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
            _refuse_gradient(function, name)
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: expected a strided tensor, got layout {tensor.layout}")
        specs.append((tensor.dtype, tensor.shape, tensor.stride(), name not in aligned or is_aligned(tensor)))
    if _differentiates_forward():
        _refuse_tangents(function, tensors)
    return tuple(specs)


def check_scale(function: str, value: Any, device: torch.device) -> float | torch.Tensor:
    """`softmax_scale` as a Python number, or as a tensor of one element on `device`; never waits for a device.

    Raises:
      ValueError: neither a finite number that fp32 holds nor one floating-point element on the CPU or on `device`, or one with
        a derivative.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(
                "softmax_scale: expected a number or a floating-point tensor of one element, "
                f"got {dtype_name(value.dtype)} {list(value.shape)}"
            )
        if value.requires_grad and torch.is_grad_enabled():
            _refuse_gradient(function, "softmax_scale")
        if _differentiates_forward():
            _refuse_tangents(function, {"softmax_scale": value})
        if value.device == device:
            return value
        if value.device.type != "cpu":
            raise ValueError(f"softmax_scale: expected device {device}, as q has, or the CPU, got {value.device}")
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"softmax_scale: expected a number or a tensor of one element, got {value!r}") from None
    if not (math.isfinite(number) and abs(number) <= FLOAT32_MAX):
        raise ValueError(f"softmax_scale: expected a finite number that float32 holds, got {number}")
    return number


def as_bytes(name: str, cache: torch.Tensor) -> torch.Tensor:
    """A quantised cache as uint8, without a copy."""
    if cache.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name}: its first byte must lie at a multiple of {ALIGNMENT}, got {cache.data_ptr():#x}")
    return cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
