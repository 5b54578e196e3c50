"""What checks need to know of an array."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mla_kernels.problem import TensorSpec


def array_spec(name: str, array: Any, shapes_too: bool = False) -> TensorSpec:
    """Shape and dtype of an argument; with `shapes_too` it may be a `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: it is no array.
    """
    if not (isinstance(array, (jax.Array, np.ndarray)) or (shapes_too and isinstance(array, jax.ShapeDtypeStruct))):
        got = f"{type(array).__module__}.{type(array).__qualname__}"
        raise ValueError(f"{name}: expected a jax.Array or numpy.ndarray, got {got}")
    return TensorSpec(tuple(array.shape), str(array.dtype))


def narrow(array: Any) -> Any:
    """numpy's int64 as int32 where JAX has no int64, and anything else as it is.

    What lies beyond int32 becomes one of its ends, which is no slot, where JAX would make another number of it.
    """
    if isinstance(array, np.ndarray) and array.dtype == np.int64 and jax.dtypes.canonicalize_dtype(np.int64) == np.int32:
        ends = np.iinfo(np.int32)
        return np.clip(array, ends.min, ends.max).astype(np.int32)
    return array
