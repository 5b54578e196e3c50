"""What `append`, `read` and `copy_pages` do, in plain JAX: for users without a GPU, and to test the kernels by."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mla_kernels.cache_problem import Append, CopyPages, Read
from mla_kernels.problem import CacheSpec

from .cache import decode_rows, encode_rows

Arrays = dict[str, jax.Array]


def convert(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` rounded to nearest even; a NaN becomes the positive quiet one.  Values of `dtype` stay as they are, NaN included."""
    if x.dtype == dtype:
        return x
    return jnp.where(jnp.isnan(x), jnp.nan, x.astype(dtype))


def _find(slots: jax.Array, spec: CacheSpec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Page and place of each slot, and whether it is one of the cache; page 0 and place 0 if not."""
    page = slots // spec.page_size
    valid = (slots >= 0) & (page < spec.num_pages)
    return jnp.where(valid, page, 0), jnp.where(valid, slots % spec.page_size, 0), valid


def append_reference(problem: Append, arrays: Arrays) -> jax.Array:
    """`mla_jax.append` of checked arguments."""
    spec, fmt = problem.cache, problem.cache.format
    kv_cache, latent = arrays["kv_cache"], arrays["latent"]
    page, token, valid = _find(arrays["slots"], spec)
    page = jnp.where(valid, page, spec.num_pages)  # out of range, and so dropped
    if not fmt.quantised:
        parts = [latent, arrays["rope"]] if problem.d_rope else [latent]
        row = jnp.concatenate([convert(part, kv_cache.dtype) for part in parts], 1)
        if kv_cache.dtype != jnp.bfloat16:
            return kv_cache.at[page, token, 0].set(row, mode="drop")
        # Some versions of XLA convert the whole of a bf16 array to write into it, and lose bits of NaN.
        bits = lax.bitcast_convert_type(kv_cache, jnp.uint16)
        bits = bits.at[page, token, 0].set(lax.bitcast_convert_type(row, jnp.uint16), mode="drop")
        return lax.bitcast_convert_type(bits, jnp.bfloat16)
    codes, scales, rope = encode_rows(latent, arrays["rope"], fmt, problem.power_of_two_scales)
    if not fmt.scale_in_page:
        return kv_cache.at[page, token, 0].set(jnp.concatenate([codes, scales, rope], 1), mode="drop")
    pages = kv_cache.reshape(spec.num_pages, math.prod(kv_cache.shape[1:]))
    pages = _write_runs(pages, page, token * fmt.row_bytes, jnp.concatenate([codes, rope], 1))
    pages = _write_runs(pages, page, token * fmt.scale_bytes + spec.page_size * fmt.row_bytes, scales)
    return pages.reshape(kv_cache.shape)


def _write_runs(pages: jax.Array, page: jax.Array, offset: jax.Array, runs: jax.Array) -> jax.Array:
    """Runs of bytes [n, size] put at an offset of a page each."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(pages, jnp.stack([page, offset], 1), runs, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)


def read_reference(problem: Read, arrays: Arrays) -> jax.Array:
    """`mla_jax.read` of checked arguments."""
    spec = problem.cache
    kv_cache = arrays["kv_cache"]
    if spec.num_pages == 0:
        return jnp.zeros((problem.n, problem.d_qk), problem.dtype)
    page, token, valid = _find(arrays["slots"], spec)
    wide = jnp.float32 if spec.format.quantised else kv_cache.dtype
    rows = decode_rows(kv_cache, spec, page, token, wide)[:, 0]
    if spec.format.quantised:
        rows = jnp.where(jnp.isnan(rows), jnp.nan, rows)
    rows = convert(rows, jnp.dtype(problem.dtype))
    # As integers: some versions of XLA compute a choice between bf16 values in fp32, and lose bits of NaN.
    bits = lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * rows.dtype.itemsize}"))
    return lax.bitcast_convert_type(jnp.where(valid[:, None], bits, 0), rows.dtype)


def copy_pages_reference(problem: CopyPages, arrays: Arrays) -> jax.Array:
    """`mla_jax.copy_pages` of checked arguments."""
    spec, kv_cache = problem.cache, arrays["kv_cache"]
    source, target = arrays["source_pages"], arrays["target_pages"]
    valid = (source >= 0) & (source < spec.num_pages) & (target >= 0) & (target < spec.num_pages)
    source, target = jnp.where(valid, source, 0), jnp.where(valid, target, spec.num_pages)
    if kv_cache.ndim == 2:
        width = spec.page_size * spec.format.token_bytes
        return kv_cache.at[target, :width].set(kv_cache[source, :width], mode="drop")
    stored = kv_cache.dtype
    bits = lax.bitcast_convert_type(kv_cache, jnp.dtype(f"uint{8 * stored.itemsize}"))
    return lax.bitcast_convert_type(bits.at[target].set(bits[source], mode="drop"), stored)
