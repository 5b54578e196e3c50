"""Small calls of `mla_torch.decode`, and a stand-in for the kernels that records what reaches them."""

import functools
from dataclasses import replace

import torch

import mla_torch
from mla_kernels.device import INTERPRETER
from mla_kernels.launch import Buffer, Launch, Plan, Refusal
from mla_torch import api, launcher


def dense(b=2, s_q=1, h_q=4, d_qk=576, page_size=16, pages=3, dtype=torch.bfloat16):
    """Keyword arguments of a dense call; request i has its own pages and 5 + 10 * i tokens."""
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(b, s_q, h_q, d_qk, generator=generator).to(dtype),
        "kv_cache": torch.randn(b * pages, page_size, 1, d_qk, generator=generator).to(dtype),
        "block_table": torch.arange(b * pages, dtype=torch.int32).view(b, pages),
        "cache_seqlens": 5 + 10 * torch.arange(b, dtype=torch.int32),
    }


def sparse(cache_format="bf16", b=2, s_q=1, h_q=4, topk=9, page_size=16, pages=3, extra=False):
    d_qk = 512 if cache_format == "model1_fp8" else 576
    call = dense(b, s_q, h_q, d_qk, page_size, pages)
    del call["block_table"], call["cache_seqlens"]
    call["indices"] = torch.arange(b * s_q * topk, dtype=torch.int32).view(b, s_q, topk) % (b * pages * page_size)
    call["topk_length"] = torch.full((b,), topk - 2, dtype=torch.int32)
    if extra:
        call["extra_kv_cache"] = call["kv_cache"].flip(0).contiguous()
        call["extra_indices"] = call["indices"].flip(-1).contiguous()
        call["extra_topk_length"] = torch.full((b,), 3, dtype=torch.int32)
    if cache_format != "bf16":
        for name in ("kv_cache", "extra_kv_cache"):
            if name in call:
                call[name] = mla_torch.quantize_cache(call[name], cache_format)
    return call


def to_cuda(call, device="cuda"):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Recorder:
    """A kernel that notes its launches and fills the tensor called `out` with 1."""

    __name__ = "recorder"

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.launches.append((grid, args, kwargs))
            args[-2].fill_(1.0)

        return launch


def fresh_cache(monkeypatch):
    """For a test that replaces what a prepared call is made from."""
    cached = functools.lru_cache(maxsize=api.CALLS_KEPT, typed=True)(api._prepare)
    monkeypatch.setattr(api, "_prepare_cached", cached)


def recording(monkeypatch, facts=INTERPRETER, inputs=("q", "kv_cache", "table", "lengths", "softmax_scale"), grid=(2, 1, 1)):
    """Makes "triton" a plan of one launch of a `Recorder`, for tensors of the CPU; nothing faster serves any call."""
    fresh_cache(monkeypatch)
    kernel = Recorder()
    made = []

    def plan(problem, facts):
        made.append(problem)
        buffers = {
            "out": Buffer(problem.out_shape, "float32" if facts.interpreted else problem.dtype),
            "lse": Buffer(problem.lse_shape, "float32"),
            "scratch": Buffer((7,), "float32"),
        }
        launch = Launch(kernel, inputs, (11, 12), ("scratch", "out", "lse"), {"BLOCK": 8}, grid, num_warps=4, num_stages=2)
        return Plan("triton", problem, facts, (launch,), buffers, {"block": 8})

    entry = replace(api.IMPLEMENTATIONS["triton"], refusals=lambda problem, facts: (), plan=plan)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "triton", entry)
    slower = replace(api.IMPLEMENTATIONS["hopper"], refusals=lambda problem, facts: (Refusal("q", "is recorded"),))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "hopper", slower)
    monkeypatch.setattr(launcher, "device_facts", lambda device: facts)
    kernel.plans = made
    return kernel
