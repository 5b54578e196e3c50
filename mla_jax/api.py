"""`decode` and `explain` for JAX: checks a call while it is traced, chooses an implementation and traces it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_kernels.choose import Explanation, Refusals, choose, requested
from mla_kernels.device import DeviceFacts
from mla_kernels.launch import Plan, Refusal
from mla_kernels.plan import plan_decode, refusals
from mla_kernels.problem import Problem, TensorSpec, make_problem

from . import interpret, jax_triton_compat, launcher
from .device import current_facts
from .reference import decode_reference

Arrays = dict[str, jax.Array]
Results = tuple[jax.Array, jax.Array]

# What plans call the arguments that they do not call by the caller's names.
_PLAN_NAMES = {
    "block_table": "table",
    "cache_seqlens": "lengths",
    "indices": "table",
    "topk_length": "lengths",
    "extra_indices": "extra_table",
    "extra_topk_length": "extra_lengths",
}
_PER_REQUEST = ("q", "table", "lengths", "extra_table", "extra_lengths")
_SHARED = ("kv_cache", "extra_kv_cache", "attn_sink", "softmax_scale")


@dataclass(frozen=True)
class Implementation:
    """One way to serve a call.

    Attributes:
      refusals: why it does not serve a problem on a device (facts None: no device that the kernels run on is known).
      automatic: whether it is tried on such a device when the caller names none.
      plan: what it launches; None for an implementation made of JAX operations.
    """

    refusals: Callable[[Problem, DeviceFacts | None], Refusals]
    automatic: Callable[[DeviceFacts | None], bool]
    plan: Callable[[Problem, DeviceFacts], Plan] | None = None


def _triton_refusals(problem: Problem, facts: DeviceFacts | None) -> Refusals:
    if facts is None:
        reason = (
            "the kernels need a CUDA device (or mla_jax.device_facts to lower for one elsewhere, "
            "or the CPU, where TRITON_INTERPRET=1 was set before the import)"
        )
        return (Refusal("q", reason),)
    if not facts.interpreted and not jax_triton_compat.available():
        return (Refusal("q", f"the kernels need jax-triton: {jax_triton_compat.reason()}"),)
    return tuple(refusals(problem, facts))


# Best first.  An implementation is one entry here; all else follows from the entry.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Implementation(_triton_refusals, automatic=lambda facts: facts is not None, plan=plan_decode),
    # A GPU user who gets the reference has asked for it: it is slow enough to be taken for a fault.
    "reference": Implementation(lambda problem, facts: (), automatic=lambda facts: facts is None or facts.interpreted),
}


@dataclass(frozen=True)
class _Call:
    """All about a call that is static; the key of its compiled form."""

    problem: Problem
    implementation: str | tuple[str, ...] | None
    facts: DeviceFacts | None


@functools.lru_cache(maxsize=4096)
def _choose(call: _Call) -> tuple[str, dict[str, Refusals]]:
    """The implementation of a call, and the refusals of all that refuse it."""
    names = requested(call.implementation, tuple(IMPLEMENTATIONS))
    if call.implementation is None:
        names = tuple(name for name in names if IMPLEMENTATIONS[name].automatic(call.facts))
    if call.problem.empty:
        return names[0], {}
    reasons = {name: entry.refusals(call.problem, call.facts) for name, entry in IMPLEMENTATIONS.items()}
    return choose(names, reasons), {name: found for name, found in reasons.items() if found}


def _plan(call: _Call) -> Plan | None:
    entry = IMPLEMENTATIONS[_choose(call)[0]]
    if entry.plan is None or call.facts is None or call.problem.empty:
        return None
    return entry.plan(call.problem, call.facts)


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


def _trace(call: _Call, arrays: Arrays) -> Results:
    problem = call.problem
    reference = functools.partial(_reference, problem)
    plan = _plan(call)
    if plan is None:
        return reference(arrays)
    if plan.facts.interpreted:
        return interpret.run(plan, arrays)
    elsewhere = reference if _falls_back(call) else functools.partial(launcher.run_elsewhere, plan)
    return jax.lax.platform_dependent(arrays, cuda=functools.partial(launcher.run, plan), default=elsewhere)


def _falls_back(call: _Call) -> bool:
    """Whether a call that takes the kernels on CUDA takes the reference on other platforms."""
    return "reference" in requested(call.implementation, tuple(IMPLEMENTATIONS))


@functools.lru_cache(maxsize=4096)
def _operation(call: _Call) -> Callable[[Arrays], Results]:
    """The traced function of a call with its rules for differentiation (none, in words) and for `vmap`."""

    @jax.custom_jvp
    def differentiable(arrays: Arrays) -> Results:
        return _trace(call, arrays)

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
    return ", ".join(word for word in words if _PLAN_NAMES.get(word, word) in arrays)


def _fold(call: _Call, size: int, is_mapped: Mapping[str, bool], arrays: Arrays) -> Results:
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
    out, lse = _run(replace(call, problem=replace(problem, batch=size * problem.batch)), folded)
    return out.reshape(size, *problem.out_shape), lse.reshape(size, *problem.lse_shape)


@functools.partial(jax.jit, static_argnums=0)
def _decode(call: _Call, arrays: Arrays) -> Results:
    return _operation(call)(arrays)


def _run(call: _Call, arrays: Arrays) -> Results:
    problem = call.problem
    if problem.empty:
        return jnp.zeros(problem.out_shape, problem.dtype), jnp.zeros(problem.lse_shape, jnp.float32)
    return _decode(call, arrays)


def _spec(name: str, array: Any, shapes_too: bool) -> TensorSpec:
    if not (isinstance(array, (jax.Array, np.ndarray)) or (shapes_too and isinstance(array, jax.ShapeDtypeStruct))):
        got = f"{type(array).__module__}.{type(array).__qualname__}"
        raise ValueError(f"{name}: expected a jax.Array or numpy.ndarray, got {got}")
    return TensorSpec(tuple(array.shape), str(array.dtype))


def _check(arrays: Mapping[str, Any], implementation: Any, options: Mapping[str, Any], shapes_too: bool = False) -> _Call:
    """The call, from shapes, dtypes and options alone."""
    specs = {name: _spec(name, x, shapes_too) for name, x in arrays.items() if x is not None or name in ("q", "kv_cache")}
    problem = make_problem(**specs, **options)  # type: ignore[arg-type]
    requested(implementation, tuple(IMPLEMENTATIONS))
    if implementation is not None and not isinstance(implementation, str):
        implementation = tuple(implementation)
    call = _Call(problem, implementation, current_facts())
    _choose(call)
    return call


def _scale(value: Any, problem: Problem) -> Any:
    """`softmax_scale` as fp32 [1]."""
    if value is None:
        value = problem.d_qk**-0.5
    if isinstance(value, (jax.Array, np.ndarray)):
        if value.size != 1 or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                "softmax_scale: expected a number or a floating-point array of one element, "
                f"got {value.dtype} {list(value.shape)}"
            )
        return value.astype(jnp.float32).reshape(1)
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"softmax_scale: expected a number or an array of one element, got {value!r}") from None
    if not abs(number) <= np.finfo(np.float32).max:
        raise ValueError(f"softmax_scale: expected a finite number that float32 holds, got {number}")
    return np.full(1, number, np.float32)


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
    Forward only.  Arrays may be numpy's.  The cache is never copied.

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
      causal: query j of s_q sees `cache_seqlens - s_q + j + 1` tokens (dense calls).
      cache_format: `bf16`, `fp16`, `v32_fp8` or `model1_fp8`; None takes it from dtype and width of `kv_cache`.
      page_size: tokens of a page; needed for pages given as [pages, page_bytes].  A pair for (kv_cache, extra_kv_cache).
      num_splits: cuts each request into exactly this many ranges, whatever else is in the batch; None lets the schedule decide.
      implementation: `"triton"`, `"reference"`, or a sequence of names tried in order.  None takes the Triton kernels on
        CUDA and the reference on other platforms, in one traced function.

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
    named = {_PLAN_NAMES.get(name, name): array for name, array in arrays.items() if array is not None}
    return _run(call, {**named, "softmax_scale": scale})


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
    _scale(softmax_scale, call.problem)
    name, refused = _choose(call)
    plan = _plan(call)
    compiled = plan is not None and not plan.facts.interpreted
    return Explanation(
        problem=call.problem,
        implementation=name,
        refused=refused,
        facts=call.facts,
        plan=plan,
        note="on CUDA, the reference on other platforms" if compiled and _falls_back(call) else "",
    )
