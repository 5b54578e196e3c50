"""`decode` and `explain` for JAX: checks a call, while it is traced, and hands it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_kernels.choose import Explanation
from mla_kernels.problem import Problem, make_problem

from .choice import Call, choose_for, make_call, plan_for
from .device import current_facts
from .specs import array_spec, check_scale
from .traced import PLAN_NAMES, Results, run


def _check(arrays: Mapping[str, Any], implementation: Any, options: Mapping[str, Any], shapes_too: bool = False) -> Call:
    """The call, from shapes, dtypes and options alone."""
    specs = {name: array_spec(name, x, shapes_too) for name, x in arrays.items() if x is not None or name in ("q", "kv_cache")}
    problem = make_problem(**specs, **options)  # type: ignore[arg-type]
    call = make_call(problem, implementation, current_facts())
    choose_for(call)
    return call


def _scale(value: Any, problem: Problem) -> Any:
    """`softmax_scale` as fp32 [1]."""
    value = problem.d_qk**-0.5 if value is None else check_scale(value)
    return value.astype(jnp.float32).reshape(1) if isinstance(value, jax.Array) else np.full(1, value, np.float32)


def decode(
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
    num_splits: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Results:
    """Attention of new queries over a paged latent KV cache; dense with `block_table`, sparse with `indices`.

    Works eagerly, under `jit` and in `lax.scan`; `vmap` over the per-request arguments (`q`, `block_table`,
    `cache_seqlens`, `indices`, `topk_length`, `extra_indices`, `extra_topk_length`) folds the mapped axis into the batch.
    Forward only.  Arrays may be numpy's.  The cache is never copied; under `jit` with sharded arrays wrap the call in
    `shard_map`, or JAX gathers them.

    Args:
      q: bf16 or fp16 [b, s_q, h_q, d_qk].
      kv_cache: bf16 or fp16 [pages, page_size, h_kv, d_qk]; or quantised bytes (uint8, int8 or float8_e4m3fn)
        [pages, page_size, 1, bytes_per_token], 656 bytes for `v32_fp8` and 584 for `model1_fp8`, whose pages may also come
        as [pages, page_bytes] with `page_size`: so padded pages are given here, where arrays have no strides.
      block_table: int32 [b, max_pages], the pages of each request.  Entries behind the last used page may hold anything.
      cache_seqlens: int32 [b], tokens of each request, clamped to 0 ... max_pages * page_size.
      indices: int32 [b, s_q, topk], flat slots `page * page_size + offset`; those out of range are masked.
      topk_length: int32 [b], only the leftmost entries of `indices` count.
      extra_kv_cache, extra_indices, extra_topk_length: a second cache under the same softmax (sparse calls).
      attn_sink: fp32 [h_q]; `out` is multiplied by `1 / (1 + exp(attn_sink - lse))`.
      head_dim_v: d_v, the leading columns of a row that are its value; 512 by default where d_qk is 576 or 512.
      softmax_scale: a number or an array of one element, traced or not; `d_qk ** -0.5` by default.  A new one recompiles
        nothing.
      causal: query j of s_q sees `cache_seqlens - s_q + j + 1` tokens (dense calls).  In the kernels a NaN or infinity of a
        token that only later queries see can make `out` of earlier ones NaN, too.
      cache_format: `bf16`, `fp16`, `v32_fp8` or `model1_fp8`; None takes it from dtype and width of `kv_cache`.
      page_size: tokens of a page; needed for pages given as [pages, page_bytes].  A pair for (kv_cache, extra_kv_cache).
      num_splits: cuts each request into exactly this many ranges, whatever else is in the batch; None lets the schedule decide.
      implementation: `"hopper"`, `"triton"`, `"reference"`, or a sequence of names tried in order.  None takes the best
        kernels on CUDA and the reference on other platforms, in one traced function.

    Returns:
      out [b, s_q, h_q, d_v] in the dtype of `q`, and the natural log-sum-exp of the scaled scores, fp32 [b, h_q, s_q].  A
      row without a key is 0 with lse +inf.

    Raises (while tracing):
      ValueError: a wrong type, shape, dtype or combination; the message names the argument.
      NotImplementedError: no implementation (of those asked for) serves the call, and the message lists why; a gradient; a
        `vmap` over a cache, `attn_sink` or `softmax_scale`.
    """
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
    options = {
        "head_dim_v": head_dim_v,
        "causal": causal,
        "cache_format": cache_format,
        "page_size": page_size,
        "num_splits": num_splits,
    }
    call = _check(arrays, implementation, options)
    scale = _scale(softmax_scale, call.problem)
    named = {PLAN_NAMES.get(name, name): array for name, array in arrays.items() if array is not None}
    return run(call, {**named, "softmax_scale": scale})


def explain(
    q: Any,
    kv_cache: Any,
    block_table: Any = None,
    cache_seqlens: Any = None,
    *,
    indices: Any = None,
    topk_length: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    attn_sink: Any = None,
    head_dim_v: int | None = None,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    cache_format: str | None = None,
    page_size: int | tuple[int | None, int | None] | None = None,
    num_splits: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Explanation:
    """How `decode` would serve the call with these arguments; launches nothing and reads no array.

    Arrays may also be `jax.ShapeDtypeStruct`.

    Returns:
      An account to print: the implementation chosen, why others refuse, tiles, splits, launches, scratch, and the most bytes
      and FLOPs that the shapes allow (what is attended is known on the device only).  Its attributes say the same to code.

    Raises:
      ValueError, NotImplementedError: as `decode`.
    """
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
    options = {
        "head_dim_v": head_dim_v,
        "causal": causal,
        "cache_format": cache_format,
        "page_size": page_size,
        "num_splits": num_splits,
    }
    call = _check(arrays, implementation, options, shapes_too=True)
    if softmax_scale is not None:
        check_scale(softmax_scale, shapes_too=True)
    name, refused = choose_for(call)
    plan = plan_for(call)
    compiled = plan is not None and not plan.facts.interpreted
    return Explanation(
        problem=call.problem,
        implementation=name,
        refused=refused,
        facts=call.facts,
        plan=plan,
        note="on CUDA, the reference on other platforms" if compiled and call.falls_back else "",
    )
