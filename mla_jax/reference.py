"""What decode computes, in plain `jax.numpy`: the default without a GPU, and what the kernels are compared with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mla_kernels.problem import INT32_MAX, CacheSpec, Problem, TensorSpec, make_problem

from .cache import decode_rows
from .specs import array_spec, check_scale, float_dtype

BLOCK_KEYS = 512  # keys that are held at a time


def decode_reference(
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array | None = None,
    cache_seqlens: jax.Array | None = None,
    *,
    indices: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    extra_kv_cache: jax.Array | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    head_dim_v: int | None = None,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    cache_format: str | None = None,
    page_size: int | tuple[int | None, int | None] | None = None,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """One attention step over a paged latent cache.

    Works under `jit`, `scan` and `vmap`; a new scale or new lengths compile nothing.  Reads attended keys only.  The
    arguments are those of `mla_jax.decode`; besides bf16 and fp16, q (and with it an unquantised cache) may be fp32 or
    fp64.

    Args:
      q: [b, s_q, h_q, d_qk].
      kv_cache: [pages, page_size, h_kv, d_qk] in q's dtype, or bytes in a quantised format.
      block_table: int32 [b, max_pages], with `cache_seqlens` int32 [b]: dense.
      indices: int32 [b, s_q, topk], flat slots `page * page_size + offset`: sparse; entries out of range are skipped.
      topk_length: int32 [b], how many of the leftmost indices count.
      extra_kv_cache: a second cache with `extra_indices` and `extra_topk_length`, under the same softmax.
      attn_sink: fp32 [h_q], scales out by `1 / (1 + exp(sink - lse))`.
      head_dim_v: the first so many columns of a key are its value; 512 by default when d_qk is 576 or 512.
      softmax_scale: `d_qk ** -0.5` by default.
      causal: dense only, query j sees tokens `t <= cache_seqlens - s_q + j`.
      cache_format: needed where dtype and width do not tell it.
      page_size: of caches given as [pages, page_bytes]; a pair when the two caches differ.
      dtype: fp32, or fp64 where JAX has it enabled, of the arithmetic (fp64 anyway if q is fp64).

    Returns:
      out [b, s_q, h_q, d_v] in q's dtype, rounded once, and lse fp32 [b, h_q, s_q], the natural log-sum-exp of the
      scaled scores without the sink.  If the arithmetic is fp64, both are fp64.  A row without a key is 0 and +inf.

    Raises:
      ValueError, NotImplementedError: as `mla_jax.decode`, while tracing.
    """
    dtype = float_dtype("dtype", dtype, ("float32", "float64"))
    arrays = {
        "q": q,
        "kv_cache": kv_cache,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        "indices": indices,
        "topk_length": topk_length,
        "extra_kv_cache": extra_kv_cache,
        "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length,
        "attn_sink": attn_sink,
    }
    specs = {name: array_spec(name, x) for name, x in arrays.items() if x is not None or name in ("q", "kv_cache")}
    wide = specs["q"].dtype if specs["q"].dtype in ("float32", "float64") else None
    problem = make_problem(
        **{name: _narrowed(name, spec, wide) for name, spec in specs.items()},  # type: ignore[arg-type]
        head_dim_v=head_dim_v,
        causal=causal,
        cache_format=cache_format,
        page_size=page_size,
    )
    if wide == "float64":
        dtype = float_dtype("q", wide, (wide,))
    scale = problem.d_qk**-0.5 if softmax_scale is None else check_scale(softmax_scale)
    scale = jnp.asarray(scale, dtype).reshape(())
    tables = (block_table, cache_seqlens) if indices is None else (indices, topk_length)
    return _decode(
        q, kv_cache, *tables, extra_kv_cache, extra_indices, extra_topk_length, attn_sink, scale, problem=problem, dtype=dtype
    )


def _narrowed(name: str, spec: TensorSpec, wide: str | None) -> TensorSpec:
    """The checks know 16-bit queries and caches; fp32 and fp64 ones differ from bf16 in nothing that they look at."""
    if name in ("q", "kv_cache", "extra_kv_cache") and wide is not None:
        if spec.dtype == wide:
            return replace(spec, dtype="bfloat16")
        if spec.dtype in ("bfloat16", "float16", "float32", "float64"):
            raise ValueError(f"{name}: expected the dtype of q ({wide}), got {spec}")
    return spec


@partial(jax.jit, static_argnames=("problem", "dtype"))
def _decode(
    q: jax.Array,
    kv_cache: jax.Array,
    table: jax.Array,
    length: jax.Array | None,
    extra_kv_cache: jax.Array | None,
    extra_table: jax.Array | None,
    extra_length: jax.Array | None,
    sink: jax.Array | None,
    scale: jax.Array,
    *,
    problem: Problem,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    scopes = [(kv_cache, problem.cache, table, length)]
    if problem.extra is not None:
        assert extra_kv_cache is not None
        assert extra_table is not None
        scopes.append((extra_kv_cache, problem.extra, extra_table, extra_length))
    scopes = [scope for scope in scopes if scope[1].num_slots > 0 and scope[2].shape[-1] > 0]
    heads = (problem.h_kv, problem.h_q // problem.h_kv)

    def row(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One query token: an online softmax over blocks of its keys."""
        request, query = i // problem.s_q, i % problem.s_q
        q_row = q[request, query].astype(dtype).reshape(*heads, problem.d_qk)
        state = (
            # like q, so that the state is as sharded as q is under shard_map
            lax.full_like(q_row, -jnp.inf, shape=heads),
            lax.full_like(q_row, 0, shape=heads),
            lax.full_like(q_row, 0, shape=(*heads, problem.d_v)),
        )
        for scope in scopes:
            state = _attend(q_row, scope, request, query, scale, state, problem, dtype)
        maximum, total, out = state
        empty = maximum == -jnp.inf
        lse = maximum + jnp.log(total)
        factor = 1 / total
        if sink is not None:
            factor = factor * jax.nn.sigmoid(lse - sink.astype(dtype).reshape(heads))
        out = jnp.where(empty[..., None], 0.0, out * factor[..., None])
        return out.reshape(problem.h_q, problem.d_v), jnp.where(empty, jnp.inf, lse).reshape(problem.h_q)

    precise = dtype == jnp.float64
    if problem.empty or not scopes:
        return (
            jnp.zeros(problem.out_shape, dtype if precise else q.dtype),
            jnp.full(problem.lse_shape, jnp.inf, dtype),
        )
    out, lse = lax.map(row, jnp.arange(problem.batch * problem.s_q, dtype=jnp.int32))
    out = out.reshape(problem.out_shape).astype(dtype if precise else q.dtype)
    return out, lse.reshape(problem.batch, problem.s_q, problem.h_q).transpose(0, 2, 1)


def _attend(
    q: jax.Array,
    scope: tuple[jax.Array, CacheSpec, jax.Array, jax.Array | None],
    request: jax.Array,
    query: jax.Array,
    scale: jax.Array,
    state: tuple[jax.Array, jax.Array, jax.Array],
    problem: Problem,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the keys of one scope to (maximum, sum of exponentials, weighted sum of values) of the query token q."""
    cache, spec, table, length = scope
    width = table.shape[-1] if problem.sparse else problem.max_tokens
    limit = jnp.int32(width) if length is None else jnp.clip(length[request], 0, width)
    if problem.causal:
        limit = limit - (problem.s_q - 1) + query
    entries = table[request, query] if problem.sparse else table[request]
    block = min(BLOCK_KEYS, width)

    def step(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        maximum, total, out = state
        left = limit - j * block
        valid = jnp.arange(block, dtype=jnp.int32) < left
        # Past the limit the position is 0, so that the last block cannot run past 2**31 - 1.
        position = jnp.where(valid, j * block + jnp.arange(block, dtype=jnp.int32), 0)
        if problem.sparse:
            index = entries[position]
            valid &= (index >= 0) & (index <= min(spec.num_slots - 1, INT32_MAX))
            page, slot = jnp.divmod(jnp.where(valid, index, 0), spec.page_size)
        else:
            page, slot = jnp.where(valid, entries[position // spec.page_size], 0), position % spec.page_size
        keys = decode_rows(cache, spec, page, slot, dtype)
        keys = jnp.where(valid[:, None, None], keys, 0)  # [block, h_kv, d_qk]
        scores = jnp.einsum("kgd,nkd->kgn", q, keys, precision=lax.Precision.HIGHEST) * scale
        scores = jnp.where(valid, scores, -jnp.inf)
        new = jnp.maximum(maximum, scores.max(-1))
        base = jnp.where(new == -jnp.inf, 0, new)
        p = jnp.exp(scores - base[..., None])
        keep = jnp.exp(maximum - base)
        values = keys[..., : problem.d_v]
        weighted = jnp.einsum("kgn,nkd->kgd", p, values, precision=lax.Precision.HIGHEST)
        return new, total * keep + p.sum(-1), out * keep[..., None] + weighted

    limit = jnp.maximum(limit, 0)
    return lax.fori_loop(0, limit // block + (limit % block > 0), step, state)
