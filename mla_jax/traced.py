"""What a checked call is traced to: kernels or reference by platform, with rules for `vmap`, `shard_map` and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mla_kernels.problem import Problem

from . import interpret, launcher
from .choice import Call, plan_for
from .reference import decode_reference

Arrays = dict[str, jax.Array]
Results = tuple[jax.Array, jax.Array]

# What plans call the arguments that they do not call by the caller's names.
PLAN_NAMES = {
    "block_table": "table",
    "cache_seqlens": "lengths",
    "indices": "table",
    "topk_length": "lengths",
    "extra_indices": "extra_table",
    "extra_topk_length": "extra_lengths",
}
_PER_REQUEST = ("q", "table", "lengths", "extra_table", "extra_lengths")
_SHARED = ("kv_cache", "extra_kv_cache", "attn_sink", "softmax_scale")


def _reference(problem: Problem, arrays: Arrays) -> Results:
    sparse = problem.sparse
    return decode_reference(
        arrays["q"],
        arrays["kv_cache"],
        None if sparse else arrays["table"],
        None if sparse else arrays["lengths"],
        indices=arrays["table"] if sparse else None,
        topk_length=arrays.get("lengths") if sparse else None,
        extra_kv_cache=arrays.get("extra_kv_cache"),
        extra_indices=arrays.get("extra_table"),
        extra_topk_length=arrays.get("extra_lengths"),
        attn_sink=arrays.get("attn_sink"),
        head_dim_v=problem.d_v,
        softmax_scale=arrays["softmax_scale"][0],
        causal=problem.causal,
        cache_format=problem.cache.format.name,
        page_size=(problem.cache.page_size, problem.extra.page_size if problem.extra is not None else None),
    )


def vary(array: jax.Array, like: Arrays) -> jax.Array:
    """`array`, typed as varying over every axis of a `shard_map` that one of `like` varies over; no value changes."""
    axes = frozenset().union(*(jax.typeof(other).mat.varying for other in like.values()))
    missing = tuple(axes - jax.typeof(array).mat.varying)
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def trace(call: Call, arrays: Arrays) -> Results:
    """Traces the implementation of a call that is not empty."""
    plan = plan_for(call)

    def reference(arrays: Arrays) -> Results:
        # its loops keep a state that varies as q does
        return _reference(call.problem, {**arrays, "q": vary(arrays["q"], arrays)})

    if plan is None:
        return reference(arrays)

    # A kernel's results are typed as the same on all shards, and the branches of a conditional must agree in that.
    def kernels(arrays: Arrays) -> Results:
        out, lse = interpret.run(plan, arrays) if plan.facts.interpreted else launcher.run(plan, arrays)
        return vary(out, arrays), vary(lse, arrays)

    def nowhere(arrays: Arrays) -> Results:
        out, lse = launcher.run_elsewhere(plan)
        return vary(out, arrays), vary(lse, arrays)

    if plan.facts.interpreted:
        return kernels(arrays)
    return jax.lax.platform_dependent(arrays, cuda=kernels, default=reference if call.falls_back else nowhere)


@functools.lru_cache(maxsize=4096)
def _operation(call: Call) -> Callable[[Arrays], Results]:
    """The traced function of a call with its rules for differentiation (none, in words) and for `vmap`."""

    @jax.custom_jvp
    def differentiable(arrays: Arrays) -> Results:
        return trace(call, arrays)

    @differentiable.defjvp
    def no_gradient(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "mla_jax.decode is forward-only: none of its arguments can be differentiated; "
            "pass them through jax.lax.stop_gradient"
        )

    @jax.custom_batching.custom_vmap
    def batchable(arrays: Arrays) -> Results:
        return differentiable(arrays)

    @batchable.def_vmap
    def fold(axis_size: int, mapped: tuple[dict[str, bool]], arrays: Arrays) -> tuple[Results, tuple[bool, bool]]:
        (is_mapped,) = mapped
        return _fold(call, axis_size, is_mapped, arrays), (True, True)

    return batchable


def _mappable(problem: Problem, arrays: Arrays) -> str:
    """The per-request arguments of a call, in the caller's words."""
    addressing = ("indices", "topk_length") if problem.sparse else ("block_table", "cache_seqlens")
    words = ("q", *addressing, "extra_indices", "extra_topk_length")
    return ", ".join(word for word in words if PLAN_NAMES.get(word, word) in arrays)


def _fold(call: Call, size: int, is_mapped: Mapping[str, bool], arrays: Arrays) -> Results:
    """`vmap`: the mapped axis becomes part of the batch."""
    problem = call.problem
    for name in _SHARED:
        if is_mapped.get(name):
            raise NotImplementedError(
                f"{name}: mla_jax.decode under vmap needs one for all examples (mapped may be {_mappable(problem, arrays)}); "
                "keep the pages of all examples in one cache, or use jax.lax.map"
            )
    folded = dict(arrays)
    for name in _PER_REQUEST:
        if name in arrays:
            array = arrays[name]
            if not is_mapped[name]:
                array = jnp.broadcast_to(array, (size, *array.shape))
            folded[name] = array.reshape(size * problem.batch, *array.shape[2:])
    out, lse = run(replace(call, problem=replace(problem, batch=size * problem.batch)), folded)
    return out.reshape(size, *problem.out_shape), lse.reshape(size, *problem.lse_shape)


@functools.partial(jax.jit, static_argnums=0)
def _decode(call: Call, arrays: Arrays) -> Results:
    return _operation(call)(arrays)


def run(call: Call, arrays: Arrays) -> Results:
    problem = call.problem
    if problem.empty:
        return jnp.zeros(problem.out_shape, problem.dtype), jnp.zeros(problem.lse_shape, jnp.float32)
    return _decode(call, arrays)
