"""What checks need to know of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_kernels.problem import TensorSpec

FLOAT32_MAX = float(np.finfo(np.float32).max)  # as a number of Python: numpy warns when it compares a larger one with its own


def array_spec(name: str, array: Any, shapes_too: bool = False) -> TensorSpec:
    """Shape and dtype of an argument; with `shapes_too` it may be a `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: it is no array.
    """
    if not (isinstance(array, (jax.Array, np.ndarray)) or (shapes_too and isinstance(array, jax.ShapeDtypeStruct))):
        got = f"{type(array).__module__}.{type(array).__qualname__}"
        raise ValueError(f"{name}: expected a jax.Array or numpy.ndarray, got {got}")
    return TensorSpec(tuple(array.shape), str(array.dtype))


def float_dtype(argument: str, dtype: Any, allowed: Sequence[str]) -> np.dtype:
    """What `dtype` names.

    Raises:
      ValueError: it is none of those `allowed`, or one that JAX has not enabled.
    """
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = None
    if name is None or name not in allowed:
        raise ValueError(f"{argument}: expected {' or '.join(allowed)}, got {name or repr(dtype)}")
    if jax.dtypes.canonicalize_dtype(name).name != name:
        raise ValueError(f"{argument}: {name} needs jax_enable_x64")
    return jnp.dtype(name)


def check_scale(value: Any, shapes_too: bool = False) -> Any:
    """`softmax_scale` as a Python number, or as the `jax.Array` of one element (or its shape) that it is.

    Raises:
      ValueError: neither a finite number that fp32 holds nor one floating-point element.
    """
    arrays = (jax.Array, np.ndarray, jax.ShapeDtypeStruct) if shapes_too else (jax.Array, np.ndarray)
    if isinstance(value, arrays):
        if math.prod(value.shape) != 1 or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                "softmax_scale: expected a number or a floating-point array of one element, "
                f"got {value.dtype} {list(value.shape)}"
            )
        if not isinstance(value, np.ndarray):
            return value
        value = value.item()
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"softmax_scale: expected a number or an array of one element, got {value!r}") from None
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"softmax_scale: expected a finite number that float32 holds, got {number}")
    return number


def narrow(array: Any) -> Any:
    """numpy's int64 as int32 where JAX has no int64, and anything else as it is.

    What lies beyond int32 becomes one of its ends, which is no slot, where JAX would make another number of it.
    """
    if isinstance(array, np.ndarray) and array.dtype == np.int64 and jax.dtypes.canonicalize_dtype(np.int64) == np.int32:
        ends = np.iinfo(np.int32)
        return np.clip(array, ends.min, ends.max).astype(np.int32)
    return array
