"""`append`, `read` and `copy_pages` for PyTorch: a paged cache is written, read and copied, in place and without a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from mla_kernels.cache_plan import CachePlan, plan, refusals
from mla_kernels.cache_problem import Append, CacheProblem, CopyPages, Read, make_append, make_copy_pages, make_read
from mla_kernels.choose import choose, requested
from mla_kernels.launch import INTERPRETER_LOCK, Refusal

from . import launcher
from .cache_reference import append_reference, copy_pages_reference, read_reference
from .tensors import as_bytes, check_tensors, dtype_name, full_spec, refuse_transform, transform_level

CALLS_KEPT = 4096
IMPLEMENTATIONS = ("triton", "reference")


class Program:
    """A plan made ready to be executed many times, by any number of threads."""

    def __init__(self, plan: CachePlan):
        self._buffers = {name: (buffer.shape, getattr(torch, buffer.dtype)) for name, buffer in plan.buffers.items()}
        self._steps = [launcher.Step(launch) for launch in plan.launches]
        self._lock = INTERPRETER_LOCK if plan.facts.interpreted else nullcontext()

    def run(self, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Launches everything on the current stream of the current device; waits for nothing.

        Returns:
          The plan's buffers by their names.
        """
        device = arrays["kv_cache"].device
        made = {name: launcher.allocate(shape, dtype=dtype, device=device) for name, (shape, dtype) in self._buffers.items()}
        tensors = {**arrays, **made}
        addresses = {name: x.data_ptr() for name, x in tensors.items()}
        stream = launcher.current_stream(device)
        with self._lock:
            for step in self._steps:
                step(addresses, tensors.__getitem__, stream)
        return made


@dataclass(frozen=True)
class _Prepared:
    """All about a call that the values of its tensors do not change; no program where the reference serves it."""

    problem: CacheProblem
    program: Program | None


_MAKE: dict[str, Callable[..., CacheProblem]] = {"append": make_append, "read": make_read, "copy_pages": make_copy_pages}
_TENSORS = {
    "append": ("kv_cache", "latent", "rope", "slots"),
    "read": ("kv_cache", "slots"),
    "copy_pages": ("kv_cache", "source_pages", "target_pages"),
}


def _prepare(function: str, device: torch.device, specs: tuple, implementation: Any, **options: Any) -> _Prepared:
    given = {name: None if spec is None else full_spec(spec) for name, spec in zip(_TENSORS[function], specs, strict=True)}
    problem = _MAKE[function](**given, **options)
    facts = launcher.device_facts(device)
    names = requested(implementation, IMPLEMENTATIONS)
    if implementation is None and facts is not None and not facts.interpreted:
        names = ("triton",)  # a GPU user who gets the reference has asked for it: it waits for the device
    refused: dict[str, tuple[Refusal, ...]] = dict.fromkeys(IMPLEMENTATIONS, ())
    if not problem.empty and device.type == "meta":
        refused = dict.fromkeys(IMPLEMENTATIONS, (Refusal("kv_cache", "a tensor on the meta device holds no values"),))
    elif not problem.empty and facts is None:
        reason = "the kernels need tensors on a CUDA device (or on the CPU, where TRITON_INTERPRET=1 was set before the import)"
        refused["triton"] = (Refusal("kv_cache", reason),)
    elif not problem.empty and facts is not None:
        refused["triton"] = refusals(problem, facts)
    name = choose(names, refused)
    if name == "reference" or facts is None or problem.empty:
        return _Prepared(problem, None)
    return _Prepared(problem, Program(plan(problem, facts)))


# typed: 1 must not find what True left.  That looks at arguments and not into them, so each option is an argument.
_prepare_cached = functools.lru_cache(maxsize=CALLS_KEPT, typed=True)(_prepare)


def _check(function: str, tensors: dict[str, Any], options: dict[str, Any], implementation: Any) -> _Prepared:
    """Everything that comes before a launch; makes bytes of a quantised cache in `tensors`."""
    if transform_level() is not None:
        refuse_transform(function, tensors)
    needed = [name for name in tensors if name != "rope"]
    specs = check_tensors(function, tensors, needed)
    device = tensors["kv_cache"].device
    if isinstance(implementation, list):
        implementation = tuple(implementation)
    try:
        prepared = _prepare_cached(function, device, specs, implementation, **options)
    except TypeError:  # an option that has no hash: most likely wrong, and then named by the checks
        prepared = _prepare(function, device, specs, implementation, **options)
    if prepared.problem.cache.format.quantised and not prepared.problem.empty:
        tensors["kv_cache"] = as_bytes("kv_cache", tensors["kv_cache"])
    return prepared


def _run(program: Program, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    arrays = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    device = arrays["kv_cache"].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return program.run(arrays)
    return program.run(arrays)


def append(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    power_of_two_scales: bool | None = None,
    implementation: str | Sequence[str] | None = None,
) -> torch.Tensor:
    """Writes new tokens into a paged cache, in place, quantised as `quantize_cache` does.

    Runs on the device of `kv_cache`, on its current stream, and never waits for the device, so it can be captured in a CUDA
    graph (the reference, which a GPU user only gets by asking for it, does wait).  Nothing but the bytes of the tokens
    named is written: padding keeps what it holds.

    In a quantised cache a NaN or an infinity in `latent` is stored as NaN; the scale of its tile is that of the finite
    values, so its neighbours are left alone.  In the RoPE part and in a 16-bit cache an infinity stays one, and so becomes a
    value beyond the range.  A 16-bit cache takes values of its own dtype bit for bit; any other NaN is stored as the
    positive quiet one.

    Args:
      kv_cache: bf16 or fp16 [pages, page_size, 1, d_qk]; or quantised bytes (uint8, int8 or float8_e4m3fn)
        [pages, page_size, 1, bytes_per_token], 656 bytes for `v32_fp8` and 584 for `model1_fp8`, whose pages may also come
        as [pages, page_bytes] with `page_size`.  Strides as `decode` takes them.
      latent: bf16, fp16 or fp32 [n, d], the part without RoPE: d is 512 for `v32_fp8`, 448 for `model1_fp8`; for a 16-bit
        cache d_qk less the columns of `rope`.  Rows may be any distance apart.
      rope: bf16, fp16 or fp32 [n, 64]; for a 16-bit cache [n, d_qk - d], or None where there is none.
      slots: int32 or int64 [n], flat slots `page * page_size + offset`.  A token whose slot is below 0 or not in the cache
        is skipped, and its values are not read.  Of tokens with the same slot any one may be stored, in parts even.
      cache_format: `bf16`, `fp16`, `v32_fp8` or `model1_fp8`; None takes it from dtype and width of `kv_cache`.
      page_size: tokens of a page; needed for pages given as [pages, page_bytes].
      power_of_two_scales: False (only `v32_fp8`) stores unrounded scales `max(amax / 448, 2**-100)`.  None means True:
        `2 ** ceil(log2(max(amax / 448, 1e-4)))`.
      implementation: `"triton"`, `"reference"`, or a sequence of names tried in order; None takes the kernels on a GPU.

    Returns:
      `kv_cache`.

    Raises:
      ValueError: a wrong type, shape, dtype, stride, device or combination; the message names the argument.
      NotImplementedError: a reserved format, more than one key-value head, or no implementation serves the call.
    """
    tensors: dict[str, Any] = {"kv_cache": kv_cache, "latent": latent, "rope": rope, "slots": slots}
    options = {"cache_format": cache_format, "page_size": page_size, "power_of_two_scales": power_of_two_scales}
    prepared = _check("append", tensors, options, implementation)
    problem = prepared.problem
    assert isinstance(problem, Append)
    if prepared.program is not None:
        _run(prepared.program, tensors)
    elif not problem.empty:
        append_reference(problem, **tensors)
    return kv_cache


def read(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    dtype: torch.dtype | None = None,
    implementation: str | Sequence[str] | None = None,
) -> torch.Tensor:
    """The rows of some tokens of a paged cache as numbers, the latent part before the RoPE part.

    Reads those tokens and nothing else, and waits for the device no more than `append` does.

    Args:
      kv_cache, cache_format, page_size, implementation: as for `append`.
      slots: int32 or int64 [n], flat slots `page * page_size + offset`.
      dtype: bf16, fp16 or fp32; None means that of a 16-bit cache, and bf16 for a quantised one.  Value times scale is
        computed in fp32 and rounded once.  A NaN that is converted becomes the positive quiet one.

    Returns:
      [n, d_qk] in `dtype`; a slot below 0 or not in the cache gives a row of zeros.

    Raises:
      ValueError, NotImplementedError: as `append`.
    """
    tensors = {"kv_cache": kv_cache, "slots": slots}
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected None or a torch.dtype, got {dtype!r}")
    options = {
        "cache_format": cache_format,
        "page_size": page_size,
        "dtype": None if dtype is None else dtype_name(dtype),
    }
    prepared = _check("read", tensors, options, implementation)
    problem = prepared.problem
    assert isinstance(problem, Read)
    if prepared.program is not None:
        return _run(prepared.program, tensors)["rows"]
    if problem.empty:
        return torch.empty((0, problem.d_qk), dtype=getattr(torch, problem.dtype), device=kv_cache.device)
    return read_reference(problem, **tensors)


def copy_pages(
    kv_cache: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> torch.Tensor:
    """Makes pages of a cache copies of other pages, in place, so that requests can go on from a shared prefix.

    The bytes of a page's tokens are copied, those between pages are not.  Waits for the device no more than `append` does.

    Args:
      kv_cache, cache_format, page_size, implementation: as for `append`.
      source_pages: int32 or int64 [n].
      target_pages: int32 or int64 [n]; page `target_pages[i]` becomes a copy of page `source_pages[i]`.  A pair of which
        one page is below 0 or not in the cache is skipped.  What a page holds that is a target twice, or a target and a
        source, is not specified.

    Returns:
      `kv_cache`.

    Raises:
      ValueError, NotImplementedError: as `append`.
    """
    tensors = {"kv_cache": kv_cache, "source_pages": source_pages, "target_pages": target_pages}
    options = {"cache_format": cache_format, "page_size": page_size}
    prepared = _check("copy_pages", tensors, options, implementation)
    problem = prepared.problem
    assert isinstance(problem, CopyPages)
    if prepared.program is not None:
        _run(prepared.program, tensors)
    elif not problem.empty:
        copy_pages_reference(problem, **tensors)
    return kv_cache
