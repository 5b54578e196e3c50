"""What the GPU tests share: a judge that runs on the GPU, poisoned buffers, captured graphs, comparisons of bits."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mla_kernels.launch import Plan
from mla_torch import api, launcher
from tests.arg_specs import ArgSpec
from tests.inputs import make_inputs
from tests.judge import Judgement, assert_close, to_numpy
from tests.torch_calls import fresh_cache

DEVICE = "cuda"


def torch_call(spec: ArgSpec, seed: int = 0) -> dict[str, Any]:
    """The arguments of a spec on the GPU."""
    return make_inputs(spec, seed).to_torch(DEVICE)


def page_bytes(cache: torch.Tensor, width: int, step: int, start: int = 0) -> torch.Tensor:
    """Bytes [pages, page_size, width] at `start + slot * step` of each page of a 4-D cache of bytes."""
    raw = cache.view(torch.uint8)
    return raw.as_strided((*raw.shape[:2], width), (raw.stride(0), step, 1), raw.storage_offset() + start)


def stored_keys(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """The keys at (page, slot) as they are stored, fp64 [n, h_kv, d_qk]."""
    if cache.dtype in (torch.bfloat16, torch.float16):
        return cache[page, slot].double()
    if cache.shape[3] == 656:
        row = page_bytes(cache, 656, cache.stride(1))[page, slot]
        nope, rope = row[:, :512], row[:, 528:]
        scales = row[:, 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, 1)
    else:
        row = page_bytes(cache, 576, 576)[page, slot]
        nope, rope = row[:, :448], row[:, 448:]
        codes = page_bytes(cache, 8, 8, cache.shape[1] * 576)[page, slot][:, :7]
        scales = torch.where(
            codes == 255, torch.nan, torch.ldexp(torch.ones_like(codes, dtype=torch.float64), codes.int() - 127)
        )
        scales = scales.repeat_interleave(64, 1)
    values = nope.contiguous().view(torch.float8_e4m3fn).float().double() * scales
    return torch.cat([values, rope.contiguous().view(torch.bfloat16).double()], 1)[:, None]


def _selected(call: dict[str, Any], request: int, query: int) -> torch.Tensor:
    """The keys that the indices of a query select, [n, 1, d_qk]."""
    keys = []
    for cache_name, index_name, length_name in (
        ("kv_cache", "indices", "topk_length"),
        ("extra_kv_cache", "extra_indices", "extra_topk_length"),
    ):
        cache = call.get(cache_name)
        if cache is None:
            continue
        index = call[index_name][request, query]
        if call.get(length_name) is not None:
            index = index[: max(int(call[length_name][request]), 0)]
        index = index[(index >= 0) & (index < cache.shape[0] * cache.shape[1])].long()
        keys.append(stored_keys(cache, index // cache.shape[1], index % cache.shape[1]))
    return torch.cat(keys)


def _tokens(call: dict[str, Any], request: int) -> torch.Tensor:
    """The keys of a request of a dense call, [n, h_kv, d_qk]."""
    cache, table = call["kv_cache"], call["block_table"][request]
    page_size = cache.shape[1]
    t = torch.arange(min(max(int(call["cache_seqlens"][request]), 0), len(table) * page_size), device=cache.device)
    return stored_keys(cache, table[t // page_size].long(), t % page_size)


def judge(call: dict[str, Any], spec: ArgSpec | None = None) -> Judgement:
    """As `tests.judge.judge`, on the device of the call, whose caches are 4-D.

    Kernels round value times scale to bf16 before the products.  With scales that are not powers of two this moves the
    scores, by units where they are hundreds.  The bound of `lse` has a term for it and that of `out` has not: there each
    element of `out` is judged, as strictly, by the keys as they enter the products.
    """
    expected = _judge(call, rounded=False)
    if spec is None or spec.scales == "pow2" or spec.std < 1:
        return expected
    rounded = _judge(call, rounded=True)
    return replace(expected, out=rounded.out, spread=rounded.spread)


def _judge(call: dict[str, Any], rounded: bool) -> Judgement:
    q = call["q"].double()
    batch, s_q, h_q, d_qk = q.shape
    d_v = call.get("head_dim_v") or 512
    scale = call.get("softmax_scale")
    scale = d_qk**-0.5 if scale is None else float(scale)
    out = q.new_zeros(batch, s_q, h_q, d_v)
    spread = torch.zeros_like(out)
    lse = q.new_full((batch, h_q, s_q), torch.inf)
    score_norm = torch.zeros_like(lse)
    sparse = call.get("indices") is not None
    for i in range(batch):
        # Queries with the same keys go together: all of a request in a dense call, one in a sparse call.
        for first, last in [(j, j + 1) for j in range(s_q)] if sparse else [(0, s_q)]:
            k = (_selected(call, i, first) if sparse else _tokens(call, i)).transpose(0, 1)  # [h_kv, n, d_qk]
            if k.shape[1] == 0:
                continue
            if rounded:
                k = k.float().bfloat16().double()
            limit = torch.full((last - first,), k.shape[1], device=q.device)
            if call.get("causal"):
                limit = limit - s_q + 1 + torch.arange(s_q, device=q.device)
            keep = torch.arange(k.shape[1], device=q.device) < limit[:, None]  # [queries, n]
            grouped = q[i, first:last].unflatten(1, (k.shape[0], -1)).transpose(0, 1)  # [h_kv, queries, group, d_qk]
            scores = (scale * torch.einsum("aqgd,and->aqgn", grouped, k)).masked_fill(~keep[:, None], -torch.inf)
            some = keep.any(-1)
            logsum = scores.logsumexp(-1)
            p = (scores - logsum[..., None]).exp()
            if call.get("attn_sink") is not None:
                sink = call["attn_sink"].double().view(k.shape[0], 1, -1)
                p = p / (1 + (sink - logsum).exp())[..., None]
            p = p.masked_fill(~some[:, None, None], 0.0)
            v = k[..., :d_v]
            out[i, first:last] = torch.einsum("aqgn,anv->qagv", p, v).flatten(1, 2)
            spread[i, first:last] = torch.einsum("aqgn,anv->qagv", p, v.abs()).flatten(1, 2)
            logsum = logsum.masked_fill(~some[:, None], torch.inf)
            lse[i, :, first:last] = logsum.transpose(1, 2).flatten(0, 1)
            longest = torch.where(keep[None], k.norm(dim=-1)[:, None], 0.0).amax(-1)  # [h_kv, queries]
            norm = abs(scale) * grouped.norm(dim=-1) * longest[..., None]
            score_norm[i, :, first:last] = norm.transpose(1, 2).flatten(0, 1)
    quantised = call["kv_cache"].dtype not in (torch.bfloat16, torch.float16)
    return Judgement(*(x.cpu().numpy() for x in (out, lse, spread, score_norm)), quantised)


def assert_right(result: tuple[Any, Any], expected: Judgement, spec: ArgSpec | None = None) -> None:
    """That (out, lse) keeps the bounds of the judge; `spec` says which."""
    exact_scales = spec is None or spec.scales == "pow2"
    published = spec is not None and spec.std == 0.1 and exact_scales
    assert_close(*result, expected, power_of_two_scales=exact_scales, published_bounds=published)


def bits(x: Any) -> np.ndarray:
    """The bytes of a tensor or array as integers of its width."""
    x = np.ascontiguousarray(to_numpy(x))
    return x.view(f"u{x.itemsize}")


def assert_same_bits(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """That two results (out, lse) are equal bit by bit."""
    for name, x, y in zip(("out", "lse"), found, expected, strict=True):
        a, b = bits(x), bits(y)
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.dtype} {a.shape}, expected {b.dtype} {b.shape}"
        wrong = np.argwhere(a != b)
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            raise AssertionError(
                f"{name}{list(at)} = {to_numpy(x)[at]!r}, expected {to_numpy(y)[at]!r}: "
                f"{len(wrong)} of {a.size} elements differ in their bits"
            )


def poisoned(shape: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """For `launcher.allocate`: NaN, and integers that make a wrong schedule."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 3, dtype=dtype, device=device)


def change_plans(monkeypatch: Any, change: Callable[[Plan], Plan]) -> None:
    """Lets `mla_torch` run plans that `change` has been at."""
    fresh_cache(monkeypatch)
    entry = api.IMPLEMENTATIONS["triton"]
    assert entry.plan is not None
    plan = entry.plan
    monkeypatch.setitem(api.IMPLEMENTATIONS, "triton", replace(entry, plan=lambda problem, facts: change(plan(problem, facts))))


def with_constants(plan: Plan, kernel: str, **constants: Any) -> Plan:
    """The plan with other constants in the launches of one kernel."""
    launches = tuple(
        replace(launch, constexprs={**launch.constexprs, **constants}) if launch.name == kernel else launch
        for launch in plan.launches
    )
    return replace(plan, launches=launches)


def capture(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Captures `call` in a CUDA graph, after a run outside it: what replays it, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph.replay, result


class Allocations:
    """For `launcher.allocate`: keeps what it hands out."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def __call__(self, shape: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.made.append(tensor)
        return tensor

    def schedule(self, plan: Plan) -> torch.Tensor:
        """The schedule in the newest scratch of a plan, in place."""
        program = launcher.Program(plan)
        start, buffer = program.scratch["schedule"]
        scratch = next(tensor for tensor in reversed(self.made) if tensor.shape == (program.scratch_size,))
        return scratch.view(torch.int32)[start : start + buffer.shape[0]]


def skip_where_refused(call: dict[str, Any], implementation: str) -> bool:
    """Skips a test on a GPU that the implementation is not for; returns whether it is the one chosen by default."""
    explanation = api.explain(**call, implementation=(implementation, "reference"))
    if explanation.implementation != implementation:
        pytest.skip("; ".join(map(str, explanation.refused[implementation])))
    return api.explain(**call).implementation == implementation


def compiled_kernels(plan: Plan) -> int:
    """Binaries that Triton holds for the kernels of a plan, in this process."""
    kernels = {id(launch.kernel): launch.kernel for launch in plan.launches}.values()
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def plan_of(call: dict[str, Any]) -> Plan:
    plan = api.explain(**call).plan
    assert plan is not None
    return plan


@contextmanager
def much_memory(num_bytes: int, patience: float = 60.0) -> Iterator[None]:
    """Waits until so much of the GPU is free; one test process at a time."""
    with open(Path(tempfile.gettempdir()) / "mla_decode_gpu_memory.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        end = time.monotonic() + patience
        while torch.cuda.mem_get_info()[0] < num_bytes + 2**30:
            if time.monotonic() > end:
                raise MemoryError(f"{num_bytes} bytes of GPU memory are not free: {torch.cuda.mem_get_info()}")
            time.sleep(0.5)
        try:
            yield
        finally:
            torch.cuda.empty_cache()
