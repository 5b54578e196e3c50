"""`decode` and `explain` for PyTorch: checks a call, chooses an implementation and runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_kernels.choose import Explanation, choose, requested
from mla_kernels.device import DeviceFacts
from mla_kernels.hopper import plan as hopper
from mla_kernels.launch import Plan, Refusal
from mla_kernels.plan import plan_decode, refusals
from mla_kernels.problem import Problem, make_problem

from . import launcher
from .reference import decode_reference
from .tensors import Spec, as_bytes, check_scale, check_tensors, full_spec, refuse_transform, transform_level

CALLS_KEPT = 4096
_ALIGNED = ("q", "kv_cache", "extra_kv_cache")  # whose addresses decide which kernels may run

Refusals = tuple[Refusal, ...]
Results = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to serve a call.

    Attributes:
      refusals: why it does not serve a problem on a device (facts None: a device that the kernels do not run on).
      automatic: whether it is tried on such a device when the caller names none.
      plan: what it launches; None for an implementation made of PyTorch operations.
    """

    refusals: Callable[[Problem, DeviceFacts | None], Refusals]
    automatic: Callable[[DeviceFacts | None], bool]
    plan: Callable[[Problem, DeviceFacts], Plan] | None = None


def _hopper_refusals(problem: Problem, facts: DeviceFacts | None) -> Refusals:
    if facts is None:
        return (Refusal("q", "the kernels need tensors on a CUDA device"),)
    return hopper.refusals(problem, facts)


def _triton_refusals(problem: Problem, facts: DeviceFacts | None) -> Refusals:
    if facts is None:
        reason = "the kernels need tensors on a CUDA device (or on the CPU, where TRITON_INTERPRET=1 was set before the import)"
        return (Refusal("q", reason),)
    return refusals(problem, facts)


# Best first.  An implementation is one entry here; all else follows from the entry.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "hopper": Implementation(_hopper_refusals, automatic=lambda facts: facts is not None, plan=hopper.plan_decode),
    "triton": Implementation(_triton_refusals, automatic=lambda facts: facts is not None, plan=plan_decode),
    # A GPU user who gets the reference has asked for it: it is slow enough to be taken for a fault.
    "reference": Implementation(lambda problem, facts: (), automatic=lambda facts: facts is None or facts.interpreted),
}


@dataclass(frozen=True)
class _Prepared:
    """All about a call that its tensors' values, and how their addresses differ by multiples of 16, do not change."""

    problem: Problem
    name: str
    refused: dict[str, Refusals]
    facts: DeviceFacts | None
    program: launcher.Program | None


_TENSORS = (
    "q",
    "kv_cache",
    "block_table",
    "cache_seqlens",
    "indices",
    "topk_length",
    "extra_kv_cache",
    "extra_indices",
    "extra_topk_length",
    "attn_sink",
    "out",
)


def _prepare(
    device: torch.device,
    specs: tuple[Spec | None, ...],
    head_dim_v: int | None,
    causal: bool,
    cache_format: str | None,
    page_size: int | tuple[int | None, int | None] | None,
    num_splits: int | None,
    implementation: str | tuple[str, ...] | None,
    pair_types: tuple[type, ...] | None = None,  # of a pair as `page_size`: a part of the key
) -> _Prepared:
    given: dict[str, Any] = {name: full_spec(spec) for name, spec in zip(_TENSORS, specs, strict=True) if spec is not None}
    problem = make_problem(
        **given,
        head_dim_v=head_dim_v,
        causal=causal,
        cache_format=cache_format,
        page_size=page_size,
        num_splits=num_splits,
    )
    facts = launcher.device_facts(device)
    names = requested(implementation, tuple(IMPLEMENTATIONS))
    if implementation is None:
        names = tuple(name for name in names if IMPLEMENTATIONS[name].automatic(facts))
    if facts is not None and facts.interpreted:
        # The interpreter's `out` is fp32 and rounded into the caller's tensor afterwards, so its strides are its own.
        planned = replace(problem, out_strides=None)
    else:
        planned = problem

    refused: dict[str, Refusals] = dict.fromkeys(IMPLEMENTATIONS, ())
    if not problem.empty and device.type == "meta":
        refused = dict.fromkeys(IMPLEMENTATIONS, (Refusal("q", "a tensor on the meta device holds no values"),))
    elif not problem.empty:
        refused = {name: entry.refusals(planned, facts) for name, entry in IMPLEMENTATIONS.items()}
    name = choose(names, refused)
    plan = IMPLEMENTATIONS[name].plan
    program = None
    if plan is not None and facts is not None and not problem.empty:
        program = launcher.Program(plan(planned, facts))
    return _Prepared(problem, name, {name: found for name, found in refused.items() if found}, facts, program)


# typed: 1 must not find what True left.  That looks at arguments and not into a pair, whose types are therefore one.
_prepare_cached = functools.lru_cache(maxsize=CALLS_KEPT, typed=True)(_prepare)


def _check_call(
    tensors: dict[str, Any], options: tuple[Any, Any, Any, Any, Any], implementation: Any, softmax_scale: Any
) -> tuple[_Prepared, float | torch.Tensor]:
    """Everything that comes before the first launch; turns quantised caches in `tensors` into uint8.

    Returns:
      The prepared call and its scale.
    """
    if transform_level() is not None:
        refuse_transform("decode", {**tensors, "softmax_scale": softmax_scale})
    specs = check_tensors("decode", tensors, needed=("q", "kv_cache"), aligned=_ALIGNED)
    device = tensors["q"].device
    if isinstance(implementation, list):
        implementation = tuple(implementation)
    more = (tuple(map(type, options[3])),) if isinstance(options[3], tuple) else ()
    try:
        prepared = _prepare_cached(device, specs, *options, implementation, *more)
    except TypeError:  # an option that has no hash: most likely wrong, and then named by the checks
        prepared = _prepare(device, specs, *options, implementation)
    problem = prepared.problem
    if softmax_scale is None:
        scale: float | torch.Tensor = problem.d_qk**-0.5
    else:
        scale = check_scale("decode", softmax_scale, device)
    if problem.cache.format.quantised:
        tensors["kv_cache"] = as_bytes("kv_cache", tensors["kv_cache"])
        if problem.extra is not None:
            tensors["extra_kv_cache"] = as_bytes("extra_kv_cache", tensors["extra_kv_cache"])
    return prepared, scale


def _run_reference(prepared: _Prepared, tensors: dict[str, Any], scale: float | torch.Tensor) -> Results:
    problem = prepared.problem
    given = {name: tensor for name, tensor in tensors.items() if name != "out"}
    sizes = (problem.cache.page_size, None if problem.extra is None else problem.extra.page_size)
    result, lse = decode_reference(
        **given,
        head_dim_v=problem.d_v,
        softmax_scale=scale,
        causal=problem.causal,
        cache_format=problem.cache.format.name,
        page_size=sizes,
    )
    out = tensors["out"]
    return (result if out is None else out.copy_(result)), lse


def _run_program(program: launcher.Program, tensors: dict[str, Any], scale: float | torch.Tensor) -> Results:
    q = tensors["q"]
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return program.run(tensors, scale)
    return program.run(tensors, scale)


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    head_dim_v: int | None = None,
    softmax_scale: float | torch.Tensor | None = None,
    causal: bool = False,
    cache_format: str | None = None,
    page_size: int | tuple[int | None, int | None] | None = None,
    num_splits: int | None = None,
    implementation: str | Sequence[str] | None = None,
    out: torch.Tensor | None = None,
) -> Results:
    """Attention of new queries over a paged latent KV cache; dense with `block_table`, sparse with `indices`.

    Runs on the device of `q` (which need not be the current one), on its current stream, and never waits for the device, so
    it can be captured in a CUDA graph (the reference, which a GPU user only gets by asking for it, does wait).  The cache
    is never copied; every stride is honoured as long as the innermost one is 1, and in a quantised cache those of pages and
    tokens are multiples of 4 bytes, the latter 584 in a `model1_fp8` one [pages, page_size, 1, 584].

    A number as `softmax_scale` is kept on the device per stream.  One that is first seen during a graph capture becomes part
    of the graph, a fill of a few bytes in each replay; warm up on the capturing stream, or pass a tensor, to avoid that.

    Args:
      q: bf16 or fp16 [b, s_q, h_q, d_qk].
      kv_cache: bf16 or fp16 [pages, page_size, h_kv, d_qk]; or quantised bytes (uint8, int8 or float8_e4m3fn)
        [pages, page_size, 1, bytes_per_token], 656 bytes for `v32_fp8` and 584 for `model1_fp8`, whose pages may also come
        as [pages, page_bytes] with `page_size`.  The first byte of a quantised cache lies at a multiple of 16.
      block_table: int32 [b, max_pages], the pages of each request.  Entries behind the last used page may hold anything.
      cache_seqlens: int32 [b], tokens of each request, clamped to 0 ... max_pages * page_size.
      indices: int32 [b, s_q, topk], flat slots `page * page_size + offset`; those out of range are masked.
      topk_length: int32 [b], only the leftmost entries of `indices` count.
      extra_kv_cache, extra_indices, extra_topk_length: a second cache under the same softmax (sparse calls).
      attn_sink: fp32 [h_q]; `out` is multiplied by `1 / (1 + exp(attn_sink - lse))`.
      head_dim_v: d_v, the leading columns of a row that are its value; 512 by default where d_qk is 576 or 512.
      softmax_scale: a number or a tensor of one element; `d_qk ** -0.5` by default.  A new one recompiles nothing.
      causal: query j of s_q sees `cache_seqlens - s_q + j + 1` tokens (dense calls).  In the kernels a NaN or infinity of a
        token that only later queries see can make `out` of earlier ones NaN, too.
      cache_format: `bf16`, `fp16`, `v32_fp8` or `model1_fp8`; None takes it from dtype and width of `kv_cache`.
      page_size: tokens of a page; needed for pages given as [pages, page_bytes].  A pair for (kv_cache, extra_kv_cache).
      num_splits: cuts each request into exactly this many ranges, whatever else is in the batch; None lets the schedule decide.
      implementation: `"hopper"`, `"triton"`, `"reference"`, or a sequence of names tried in order; None takes the best one
        that serves the call on the device.
      out: bf16 or fp16 [b, s_q, h_q, d_v] to write into.

    Returns:
      out [b, s_q, h_q, d_v] in the dtype of `q` (the tensor `out` if given), and the natural log-sum-exp of the scaled
      scores, fp32 [b, h_q, s_q].  A row without a key is 0 with lse +inf.

    Raises:
      ValueError: a wrong type, shape, dtype, stride, device or combination; the message names the argument.
      NotImplementedError: no implementation (of those asked for) serves the call; the message lists why.
    """
    tensors = {
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
        "out": out,
    }
    options = (head_dim_v, causal, cache_format, page_size, num_splits)
    if torch.compiler.is_compiling():
        # Tracing would only take the launcher to pieces.  Decorating `decode` would import the tracer for everyone.
        return torch.compiler.disable(_decode)(tensors, options, implementation, softmax_scale)
    return _decode(tensors, options, implementation, softmax_scale)


def _decode(tensors: dict[str, Any], options: Any, implementation: Any, softmax_scale: Any) -> Results:
    prepared, scale = _check_call(tensors, options, implementation, softmax_scale)
    problem, out = prepared.problem, tensors["out"]
    if problem.empty:
        q = tensors["q"]
        if out is None:
            out = launcher.allocate(problem.out_shape, dtype=q.dtype, device=q.device)
        return out, launcher.allocate(problem.lse_shape, dtype=torch.float32, device=q.device)
    if prepared.program is None:
        return _run_reference(prepared, tensors, scale)
    return _run_program(prepared.program, tensors, scale)


def explain(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    head_dim_v: int | None = None,
    softmax_scale: float | torch.Tensor | None = None,
    causal: bool = False,
    cache_format: str | None = None,
    page_size: int | tuple[int | None, int | None] | None = None,
    num_splits: int | None = None,
    implementation: str | Sequence[str] | None = None,
    out: torch.Tensor | None = None,
) -> Explanation:
    """How `decode` would serve the call with these arguments; launches nothing and reads no tensor.

    Returns:
      An account to print: the implementation chosen, why others refuse, tiles, splits, launches, scratch, and the most bytes
      and FLOPs that the shapes allow (what is attended is known on the device only).  Its attributes say the same to code.

    Raises:
      ValueError, NotImplementedError: as `decode`.
    """
    tensors = {
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
        "out": out,
    }
    options = (head_dim_v, causal, cache_format, page_size, num_splits)
    prepared, _ = _check_call(tensors, options, implementation, softmax_scale)
    return Explanation(
        problem=prepared.problem,
        implementation=prepared.name,
        refused=dict(prepared.refused),
        facts=prepared.facts,
        plan=None if prepared.program is None else prepared.program.plan,
    )
