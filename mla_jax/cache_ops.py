"""`append`, `read` and `copy_pages` for JAX: a paged cache is written, read and copied, in place where it is donated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mla_kernels.cache_plan import plan, refusals
from mla_kernels.cache_problem import Append, CacheProblem, Read, make_append, make_copy_pages, make_read
from mla_kernels.choose import choose, requested
from mla_kernels.device import DeviceFacts
from mla_kernels.launch import Refusal

from . import interpret, jax_triton_compat, launcher
from .cache_reference import Arrays, append_reference, copy_pages_reference, read_reference
from .device import current_facts
from .specs import array_spec, narrow
from .traced import vary

IMPLEMENTATIONS = ("triton", "reference")


@dataclass(frozen=True)
class CacheCall:
    """All about a call that is static; the key of its compiled form.

    Attributes:
      names: implementations that are tried in turn.
      falls_back: a call that takes the kernels on CUDA takes the reference on other platforms.
    """

    problem: CacheProblem
    names: tuple[str, ...]
    falls_back: bool
    facts: DeviceFacts | None

    @property
    def function(self) -> str:
        if isinstance(self.problem, Append):
            return "append"
        return "read" if isinstance(self.problem, Read) else "copy_pages"


def _call(problem: CacheProblem, implementation: Any) -> CacheCall:
    """The call, after the choice of an implementation has been found to be possible."""
    names = requested(implementation, IMPLEMENTATIONS)
    falls_back = "reference" in names
    facts = current_facts()
    if implementation is None:
        # A GPU user who gets the reference has asked for it.
        names = ("reference",) if facts is None else ("triton",)
    call = CacheCall(problem, names, falls_back, facts)
    _chosen(call)
    return call


def _chosen(call: CacheCall) -> str:
    refused: dict[str, tuple[Refusal, ...]] = dict.fromkeys(IMPLEMENTATIONS, ())
    if call.problem.empty:
        return call.names[0]
    if call.facts is None:
        reason = (
            "the kernels need a CUDA device (or mla_jax.device_facts to lower for one elsewhere, "
            "or the CPU, where TRITON_INTERPRET=1 was set before the import)"
        )
        refused["triton"] = (Refusal("kv_cache", reason),)
    elif not call.facts.interpreted and not jax_triton_compat.available():
        refused["triton"] = (Refusal("kv_cache", f"the kernels need jax-triton: {jax_triton_compat.reason()}"),)
    else:
        refused["triton"] = refusals(call.problem, call.facts)
    return choose(call.names, refused)


def _reference(problem: CacheProblem, arrays: Arrays) -> jax.Array:
    if isinstance(problem, Append):
        return append_reference(problem, arrays)
    if isinstance(problem, Read):
        return read_reference(problem, arrays)
    return copy_pages_reference(problem, arrays)


def _trace(call: CacheCall, arrays: Arrays) -> jax.Array:
    """Traces the implementation of a call that is not empty: kernels or reference by platform."""
    problem, facts = call.problem, call.facts
    if _chosen(call) == "reference" or facts is None:
        return _reference(problem, arrays)
    made = plan(problem, facts)
    result = "rows" if isinstance(problem, Read) else "kv_cache"
    if facts.interpreted:
        return vary(interpret.run_cache(made, arrays, result), arrays)

    # A kernel's results are typed as the same on all shards, and the branches of a conditional must agree in that.
    def kernels(arrays: Arrays) -> jax.Array:
        return vary(launcher.run_launches(made, arrays)[result], arrays)

    def elsewhere(arrays: Arrays) -> jax.Array:
        if call.falls_back:
            return vary(_reference(problem, arrays), arrays)
        like = jax.eval_shape(functools.partial(_reference, problem), arrays)
        (array,) = launcher.refuse_elsewhere("triton", [jax.core.ShapedArray(like.shape, like.dtype)])
        return vary(array, arrays)

    return jax.lax.platform_dependent(arrays, cuda=kernels, default=elsewhere)


@functools.lru_cache(maxsize=4096)
def _operation(call: CacheCall) -> Callable[[Arrays], jax.Array]:
    """The traced function of a call, which says in words that it has no derivative and no batched form."""

    @jax.custom_jvp
    def differentiable(arrays: Arrays) -> jax.Array:
        return _trace(call, arrays)

    @differentiable.defjvp
    def no_gradient(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"mla_jax.{call.function} is forward-only: none of its arguments can be differentiated; "
            "pass them through jax.lax.stop_gradient"
        )

    @jax.custom_batching.custom_vmap
    def batchable(arrays: Arrays) -> jax.Array:
        return differentiable(arrays)

    @batchable.def_vmap
    def no_batch(axis_size: int, mapped: Any, arrays: Arrays) -> Any:
        raise NotImplementedError(
            f"mla_jax.{call.function} under vmap: one cache is written or read by one call; fold the mapped axis into n"
        )

    return batchable


@functools.partial(jax.jit, static_argnums=0)
def _run(call: CacheCall, arrays: Arrays) -> jax.Array:
    return _operation(call)(arrays)


def _expect_writable(kv_cache: Any, problem: CacheProblem) -> None:
    """A result that shares memory with an argument is of the same dtype, and kernels write bytes as uint8."""
    if str(kv_cache.dtype) != problem.cache.format.dtype:
        raise NotImplementedError(
            f"kv_cache: written as {problem.cache.format.dtype} alone, got {kv_cache.dtype}; make the cache of that dtype"
        )


def append(
    kv_cache: jax.Array,
    latent: jax.Array,
    rope: jax.Array | None,
    slots: jax.Array,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    power_of_two_scales: bool | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Writes new tokens into a paged cache, quantised as `quantize_cache` does, and returns the cache.

    Where `kv_cache` is donated to the jitted function around the call (`jax.jit(step, donate_argnums=...)`) and not used
    afterwards, or carried by a `lax.scan`, it is written in place; otherwise the result is a copy with the new tokens.
    Works eagerly, under `jit` and in `lax.scan`.  Arrays may be numpy's.  Nothing but the bytes of the tokens named is
    written: padding keeps what it holds.

    In a quantised cache a NaN or an infinity in `latent` is stored as NaN; the scale of its tile is that of the finite
    values, so its neighbours are left alone.  In the RoPE part and in a 16-bit cache an infinity stays one, and so becomes a
    value beyond the range.  A 16-bit cache takes values of its own dtype bit for bit; any other NaN is stored as the
    positive quiet one.

    Args:
      kv_cache: bf16 or fp16 [pages, page_size, 1, d_qk]; or quantised, uint8 [pages, page_size, 1, bytes_per_token], 656
        bytes for `v32_fp8` and 584 for `model1_fp8`, whose pages may also come as [pages, page_bytes] with `page_size`.
      latent: bf16, fp16 or fp32 [n, d], the part without RoPE: d is 512 for `v32_fp8`, 448 for `model1_fp8`; for a 16-bit
        cache d_qk less the columns of `rope`.
      rope: bf16, fp16 or fp32 [n, 64]; for a 16-bit cache [n, d_qk - d], or None where there is none.
      slots: int32 or int64 [n], flat slots `page * page_size + offset`.  A token whose slot is below 0 or not in the cache
        is skipped, and its values are not read.  Of tokens with the same slot any one may be stored, in parts even.
      cache_format: `bf16`, `fp16`, `v32_fp8` or `model1_fp8`; None takes it from dtype and width of `kv_cache`.
      page_size: tokens of a page; needed for pages given as [pages, page_bytes].
      power_of_two_scales: False (only `v32_fp8`) stores unrounded scales `max(amax / 448, 2**-100)`.  None means True:
        `2 ** ceil(log2(max(amax / 448, 1e-4)))`.
      implementation: `"triton"`, `"reference"`, or a sequence of names tried in order.  None takes the kernels on CUDA and
        the reference on other platforms, in one traced function.

    Returns:
      The cache with the new tokens, of the shape and dtype of `kv_cache`.

    Raises (while tracing):
      ValueError: a wrong type, shape, dtype or combination; the message names the argument.
      NotImplementedError: a reserved format, more than one key-value head, a cache of int8 or float8, a gradient, a
        `vmap`, or no implementation serves the call.
    """
    given = {"kv_cache": kv_cache, "latent": latent, "slots": narrow(slots)}
    if rope is not None:
        given["rope"] = rope
    specs = {name: array_spec(name, array) for name, array in given.items()}
    problem = make_append(
        **{"rope": None, **specs},  # type: ignore[arg-type]
        cache_format=cache_format,
        page_size=page_size,
        power_of_two_scales=power_of_two_scales,
    )
    _expect_writable(kv_cache, problem)
    call = _call(problem, implementation)
    return jnp.asarray(kv_cache) if problem.empty else _run(call, given)


def read(
    kv_cache: jax.Array,
    slots: jax.Array,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    dtype: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """The rows of some tokens of a paged cache as numbers, the latent part before the RoPE part.

    Reads those tokens and nothing else, and copies no cache.

    Args:
      kv_cache, cache_format, page_size, implementation: as for `append`; quantised bytes may also be int8 or float8_e4m3fn.
      slots: int32 or int64 [n], flat slots `page * page_size + offset`.
      dtype: bf16, fp16 or fp32; None means that of a 16-bit cache, and bf16 for a quantised one.  Value times scale is
        computed in fp32 and rounded once.  A NaN that is converted becomes the positive quiet one.

    Returns:
      [n, d_qk] in `dtype`; a slot below 0 or not in the cache gives a row of zeros.

    Raises (while tracing):
      ValueError, NotImplementedError: as `append`.
    """
    try:
        wanted = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        raise ValueError(f"dtype: expected None or a dtype, got {dtype!r}") from None
    given = {"kv_cache": kv_cache, "slots": narrow(slots)}
    specs = {name: array_spec(name, array) for name, array in given.items()}
    problem = make_read(**specs, cache_format=cache_format, page_size=page_size, dtype=wanted)
    call = _call(problem, implementation)
    return jnp.zeros((0, problem.d_qk), problem.dtype) if problem.empty else _run(call, given)


def copy_pages(
    kv_cache: jax.Array,
    source_pages: jax.Array,
    target_pages: jax.Array,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Makes pages of a cache copies of other pages, so that requests can go on from a shared prefix; returns the cache.

    In place under the conditions of `append`.  The bytes of a page's tokens are copied, padding behind them is not.

    Args:
      kv_cache, cache_format, page_size, implementation: as for `append`.
      source_pages: int32 or int64 [n].
      target_pages: int32 or int64 [n]; page `target_pages[i]` becomes a copy of page `source_pages[i]`.  A pair of which
        one page is below 0 or not in the cache is skipped.  What a page holds that is a target twice, or a target and a
        source, is not specified.

    Returns:
      The cache, of the shape and dtype of `kv_cache`.

    Raises (while tracing):
      ValueError, NotImplementedError: as `append`.
    """
    given = {"kv_cache": kv_cache, "source_pages": narrow(source_pages), "target_pages": narrow(target_pages)}
    specs = {name: array_spec(name, array) for name, array in given.items()}
    problem = make_copy_pages(**specs, cache_format=cache_format, page_size=page_size)
    _expect_writable(kv_cache, problem)
    call = _call(problem, implementation)
    return jnp.asarray(kv_cache) if problem.empty else _run(call, given)
