"""`mla_torch.decode` and `explain` as an interface: what they accept, refuse, choose, keep and hand to the kernels."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mla_torch
from mla_kernels.device import INTERPRETER, KNOWN_DEVICES
from mla_kernels.launch import Buffer, Launch, Plan, Refusal
from mla_torch import api, launcher

H200 = KNOWN_DEVICES["NVIDIA H200"]
BF16_BOUND = 2**-7  # outputs of order 1, rounded to bf16 twice (P and out)


@pytest.fixture(autouse=True)
def fresh_cache():
    """Tests replace what a prepared call is made from."""
    api._prepare_cached.cache_clear()
    yield
    api._prepare_cached.cache_clear()


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


def recording(monkeypatch, facts=INTERPRETER, inputs=("q", "kv_cache", "table", "lengths", "softmax_scale"), grid=(2, 1, 1)):
    """Makes "triton" a plan of one launch of a `Recorder`, for tensors of the CPU."""
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
    monkeypatch.setattr(launcher, "device_facts", lambda device: facts)
    kernel.plans = made
    return kernel


# Results


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: dense(), id="dense"),
        pytest.param(lambda: dense(s_q=3) | {"causal": True, "num_splits": 2}, id="dense-causal-splits"),
        pytest.param(lambda: sparse() | {"attn_sink": torch.tensor([-torch.inf, 0.0, 3.0, torch.inf])}, id="sparse-sink"),
        pytest.param(lambda: sparse("v32_fp8"), id="v32_fp8"),
        pytest.param(lambda: sparse("model1_fp8", extra=True), id="model1_fp8-extra"),
    ],
)
def test_results(call, implementation):
    if implementation == "triton" and not launcher.INTERPRETED:
        pytest.skip("kernels run on CPU tensors only where TRITON_INTERPRET=1")
    call = call()
    out, lse = mla_torch.decode(**call, implementation=implementation)
    call.pop("num_splits", None)
    expected, expected_lse = mla_torch.decode_reference(**call, dtype=torch.float64)
    assert out.dtype == torch.bfloat16
    assert out.shape == expected.shape
    assert lse.dtype == torch.float32
    assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])
    torch.testing.assert_close(out.double(), expected, rtol=BF16_BOUND, atol=BF16_BOUND)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)  # bf16 dequantisation moves the scores


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_out_is_written_in_place_through_its_strides(implementation):
    if implementation == "triton" and not launcher.INTERPRETED:
        pytest.skip("kernels run on CPU tensors only where TRITON_INTERPRET=1")
    call = dense(s_q=2)
    expected, _ = mla_torch.decode(**call, implementation=implementation)
    buffer = torch.full((2, 4, 2, 600), 7.0, dtype=torch.bfloat16)
    out = buffer.transpose(1, 2)[..., :512]
    result, _ = mla_torch.decode(**call, implementation=implementation, out=out)
    assert result is out
    assert_same_bits(result, expected)
    assert (buffer[..., 512:] == 7).all()


def test_no_result_depends_on_what_new_memory_holds(monkeypatch):
    call = dense(b=3) | {"cache_seqlens": torch.tensor([0, 1, 48], dtype=torch.int32)}
    out, lse = mla_torch.decode(**call)

    def poisoned(shape, *, dtype, device):
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.fill_(torch.nan if dtype.is_floating_point else -(2**30))

    monkeypatch.setattr(launcher, "allocate", poisoned)
    again, lse_again = mla_torch.decode(**call)
    assert_same_bits(out, again)
    assert_same_bits(lse, lse_again)
    assert (again[0] == 0).all()
    assert (lse_again[0] == torch.inf).all()


@pytest.mark.parametrize("implementation", [None, "triton", "reference"])
@pytest.mark.parametrize(("b", "s_q"), [(0, 1), (2, 0), (0, 0)])
def test_empty_calls_give_empty_results_and_launch_nothing(b, s_q, implementation, monkeypatch):
    kernel = recording(monkeypatch)
    call = dense() | {
        "q": torch.empty(b, s_q, 4, 576, dtype=torch.bfloat16),
        "block_table": torch.empty(b, 3, dtype=torch.int32),
        "cache_seqlens": torch.empty(b, dtype=torch.int32),
    }
    out, lse = mla_torch.decode(**call, implementation=implementation)
    assert (out.shape, out.dtype) == ((b, s_q, 4, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((b, 4, s_q), torch.float32)
    given = torch.empty(b, s_q, 4, 512, dtype=torch.bfloat16)
    assert mla_torch.decode(**call, implementation=implementation, out=given)[0] is given
    assert "none, the result is empty" in str(mla_torch.explain(**call, implementation=implementation))
    assert kernel.launches == []


def test_a_call_without_pages_has_zero_rows():
    call = dense() | {"block_table": torch.empty(2, 0, dtype=torch.int32)}
    out, lse = mla_torch.decode(**call)
    assert (out == 0).all()
    assert (lse == torch.inf).all()


# Choosing


def test_the_best_for_each_device_comes_first(monkeypatch):
    call = dense()
    for interpreted, facts, chosen in ((False, None, "reference"), (True, INTERPRETER, "triton"), (False, H200, "triton")):
        api._prepare_cached.cache_clear()
        monkeypatch.setattr(launcher, "INTERPRETED", interpreted)
        if facts is H200:
            monkeypatch.setattr(launcher, "device_facts", lambda device: H200)
        explanation = mla_torch.explain(**call)
        assert explanation.implementation == chosen
        assert explanation.facts == facts


def test_a_name_forces_an_implementation_and_a_sequence_is_an_order(monkeypatch):
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    call = dense()
    assert mla_torch.explain(**call, implementation="reference").implementation == "reference"
    for names in (["triton", "reference"], ("triton", "reference")):
        assert mla_torch.explain(**call, implementation=names).implementation == "reference"
    with pytest.raises(NotImplementedError, match=r"(?s)no implementation serves this call.*triton: q: .*TRITON_INTERPRET=1"):
        mla_torch.decode(**call, implementation="triton")
    monkeypatch.setattr(launcher, "INTERPRETED", True)
    api._prepare_cached.cache_clear()
    assert mla_torch.explain(**call, implementation=["reference", "triton"]).implementation == "reference"


def test_one_error_lists_every_refusal_of_every_implementation(monkeypatch):
    reasons = {"triton": [("indices", "too odd"), ("attn_sink", "too deep")], "reference": [("q", "too wide")]}
    for name, found in reasons.items():
        entry = replace(api.IMPLEMENTATIONS[name], refusals=lambda p, f, found=found: tuple(Refusal(*r) for r in found))
        monkeypatch.setitem(api.IMPLEMENTATIONS, name, entry)
    with pytest.raises(NotImplementedError) as caught:
        mla_torch.decode(**dense(), implementation=["reference", "triton"])
    lines = str(caught.value).splitlines()
    assert [line.strip() for line in lines[1:]] == [
        "reference: q: too wide",
        "triton: indices: too odd",
        "triton: attn_sink: too deep",
    ]


def test_a_further_implementation_is_one_entry(monkeypatch):
    kernel = recording(monkeypatch)
    fast = replace(
        api.IMPLEMENTATIONS["triton"],
        refusals=lambda problem, facts: (Refusal("q", "16 heads or more"),) if problem.h_q < 16 else (),
    )
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"fast": fast, **api.IMPLEMENTATIONS})
    assert mla_torch.explain(**dense(h_q=16)).implementation == "fast"
    assert (mla_torch.decode(**dense(h_q=16))[0] == 1).all()
    explanation = mla_torch.explain(**dense(h_q=4))
    assert explanation.implementation == "triton"
    assert explanation.refused == {"fast": (Refusal("q", "16 heads or more"),)}
    assert "refused fast: q: 16 heads or more" in str(explanation)
    assert len(kernel.launches) == 1


@pytest.mark.parametrize("implementation", ["cuda", "", ["triton", "cuda"], [], (), 3, {"triton": 1}, [None]])
def test_unknown_implementations_are_named(implementation):
    with pytest.raises(ValueError, match=r"implementation: expected .*'triton'.*'reference'"):
        mla_torch.decode(**dense(), implementation=implementation)


# Explaining


def test_explain_accounts_for_a_plan(monkeypatch):
    monkeypatch.setattr(launcher, "device_facts", lambda device: H200)
    call = dense(b=4, h_q=128, page_size=64)
    explanation = mla_torch.explain(**call)
    assert explanation.implementation == "triton"
    assert explanation.plan.problem.h_q == 128
    assert explanation.plan.details
    scratch = {name: b for name, b in explanation.plan.buffers.items() if name not in ("out", "lse")}
    assert explanation.scratch_bytes == 4 * sum(int(np.prod(b.shape)) for b in scratch.values())
    keys = 4 * 3 * 64
    assert explanation.max_keys == (keys, 0)
    text = str(explanation)
    for piece in ("implementation: triton", "b=4", "h_q=128", "NVIDIA H200", "attend_kernel", "num_splits", "scratch"):
        assert piece in text
    assert f"{keys * 2 * 128 * (576 + 512) / 1e6:.4g} MFLOP" in text


def test_explain_says_why_the_kernels_do_not_run(monkeypatch):
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    explanation = mla_torch.explain(**dense())
    assert explanation.plan is None
    assert explanation.scratch_bytes == 0
    assert [r.argument for r in explanation.refused["triton"]] == ["q"]
    assert "refused triton: q: " in str(explanation)


def test_explain_launches_and_allocates_nothing(monkeypatch):
    kernel = recording(monkeypatch)
    monkeypatch.setattr(launcher, "allocate", None)
    mla_torch.explain(**dense(), softmax_scale=0.5)
    assert kernel.launches == []


# What is handed to the kernels


def test_a_launch_gets_its_parameters_in_the_order_of_the_plan(monkeypatch):
    kernel = recording(monkeypatch)
    call = dense()
    out, lse = mla_torch.decode(**call, softmax_scale=0.25)
    ((grid, args, options),) = kernel.launches
    assert grid == (2, 1, 1)
    q, cache, table, lengths, scale, *scalars, scratch, given_out, given_lse = args
    assert q is call["q"]
    assert cache is call["kv_cache"]
    assert table is call["block_table"]
    assert lengths is call["cache_seqlens"]
    assert (scale.dtype, scale.tolist()) == (torch.float32, [0.25])
    assert scalars == [11, 12]
    assert scratch.shape == (7,)
    assert given_out.dtype == torch.float32  # interpreted: rounded afterwards, once
    assert given_lse is lse
    assert options == {"BLOCK": 8, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert out.dtype == torch.bfloat16
    assert (out == 1).all()


def test_a_compiled_kernel_writes_out_itself(monkeypatch):
    kernel = recording(monkeypatch, facts=H200)
    out = torch.empty(2, 1, 4, 1024, dtype=torch.bfloat16)[..., ::1][..., :512]
    result, _ = mla_torch.decode(**dense(), out=out)
    assert result is out
    assert kernel.launches[0][1][-2] is out
    assert kernel.plans[0].out_strides == (4096, 4096, 1024)
    result, _ = mla_torch.decode(**dense())
    assert result is kernel.launches[1][1][-2]


def test_a_sparse_launch_gets_indices_and_the_extra_scope(monkeypatch):
    names = ("table", "lengths", "extra_kv_cache", "extra_table", "extra_lengths", "attn_sink")
    kernel = recording(monkeypatch, inputs=names)
    call = sparse(extra=True) | {"attn_sink": torch.zeros(4)}
    mla_torch.decode(**call)
    given = kernel.launches[0][1][: len(names)]
    wanted = ("indices", "topk_length", "extra_kv_cache", "extra_indices", "extra_topk_length", "attn_sink")
    assert all(a is call[name] for a, name in zip(given, wanted, strict=True))


def test_an_empty_grid_is_not_launched(monkeypatch):
    kernel = recording(monkeypatch, grid=(0, 1, 1))
    mla_torch.decode(**dense())
    assert kernel.launches == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_caches_of_bytes_are_viewed_not_copied(dtype, monkeypatch):
    kernel = recording(monkeypatch, inputs=("kv_cache", "extra_kv_cache"))
    call = sparse("model1_fp8", extra=True)
    for name in ("kv_cache", "extra_kv_cache"):
        call[name] = call[name].view(dtype)
    mla_torch.decode(**call)
    for given, name in zip(kernel.launches[0][1], ("kv_cache", "extra_kv_cache"), strict=False):
        assert given.dtype == torch.uint8
        assert given.data_ptr() == call[name].data_ptr()
        assert given.stride() == call[name].stride()


@pytest.mark.parametrize("cache_format", ["v32_fp8", "model1_fp8"])
def test_every_dtype_of_bytes_gives_the_same_bits(cache_format):
    call = sparse(cache_format)
    out, lse = mla_torch.decode(**call)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        again, lse_again = mla_torch.decode(**call | {"kv_cache": call["kv_cache"].view(dtype)})
        assert_same_bits(out, again)
        assert_same_bits(lse, lse_again)


def test_pages_of_bytes():
    call = sparse("model1_fp8")
    out, _ = mla_torch.decode(**call)
    cache = call["kv_cache"]
    flat = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
    again, _ = mla_torch.decode(**call | {"kv_cache": flat}, page_size=16)
    assert_same_bits(out, again)
    with pytest.raises(ValueError, match="page_size"):
        mla_torch.decode(**call | {"kv_cache": flat}, cache_format="model1_fp8")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", ["kv_cache", "extra_kv_cache"])
def test_a_quantised_cache_starts_at_a_multiple_of_16(name, implementation, monkeypatch):
    monkeypatch.setattr(launcher, "device_facts", lambda device: INTERPRETER)
    call = sparse("v32_fp8", extra=True)
    storage = torch.empty(call[name].numel() + 16, dtype=torch.uint8)
    offset = 8 - storage.data_ptr() % 8 + 4
    call[name] = storage[offset : offset + call[name].numel()].view(call[name].shape)
    with pytest.raises(ValueError, match=rf"^{name}: its first byte must lie at a multiple of 16"):
        mla_torch.decode(**call, implementation=implementation)


# The softmax scale


def scale_given(kernel):
    return kernel.launches[-1][1][4]


@pytest.mark.parametrize(
    "scale",
    [
        0.125,
        np.float32(0.125),
        np.float64(0.125),
        np.array(0.125),
        torch.tensor(0.125),
        torch.tensor([0.125], dtype=torch.float64),
        torch.tensor([[0.125]], dtype=torch.bfloat16),
    ],
    ids=["float", "float32", "float64", "array", "tensor", "tensor-float64", "tensor-bfloat16"],
)
def test_kinds_of_scales(scale, monkeypatch):
    kernel = recording(monkeypatch)
    mla_torch.decode(**dense(), softmax_scale=scale)
    given = scale_given(kernel)
    assert (given.dtype, given.numel(), float(given)) == (torch.float32, 1, 0.125)
    assert len(kernel.plans) == 1
    monkeypatch.undo()
    api._prepare_cached.cache_clear()
    out, _ = mla_torch.decode(**dense(), softmax_scale=scale, implementation="reference")
    expected, _ = mla_torch.decode(**dense(), softmax_scale=0.125, implementation="reference")
    torch.testing.assert_close(out, expected, rtol=BF16_BOUND, atol=0)


def test_the_scale_is_by_default_that_of_the_key_width(monkeypatch):
    kernel = recording(monkeypatch)
    mla_torch.decode(**dense())
    assert float(scale_given(kernel)) == np.float32(576**-0.5)


def test_a_tensor_scale_is_read_where_it_lies(monkeypatch):
    kernel = recording(monkeypatch)
    scale = torch.tensor([0.5])
    mla_torch.decode(**dense(), softmax_scale=scale)
    assert scale_given(kernel) is scale


@pytest.mark.parametrize(
    "named",
    {
        "bool": True,
        "str": "0.5",
        "complex": 1j,
        "list": [0.5],
        "array-of-two": np.zeros(2),
        "nan": float("nan"),
        "inf": float("inf"),
        "beyond-float32": 1e39,
        "beyond-float64": 10**400,
        "two-elements": torch.zeros(2),
        "no-element": torch.zeros(0),
        "integer-tensor": torch.tensor(1),
        "bool-tensor": torch.tensor(True),
        "other-device": torch.zeros(1, device="meta"),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_wrong_scales_are_named(named, monkeypatch):
    _, scale = named
    kernel = recording(monkeypatch)
    with pytest.raises(ValueError, match=r"^softmax_scale: expected"):
        mla_torch.decode(**dense(), softmax_scale=scale)
    assert kernel.launches == []


class TestScales:
    cpu = torch.device("cpu")

    def test_a_repeated_value_is_filled_in_once(self):
        scales = launcher.Scales()
        assert scales.get(0.5, self.cpu) is scales.get(0.5, self.cpu)
        assert scales.get(0.5, self.cpu) is not scales.get(0.25, self.cpu)

    def test_streams_do_not_share_a_fill(self):
        scales = launcher.Scales()
        assert scales.get(0.5, self.cpu, stream=1) is not scales.get(0.5, self.cpu, stream=2)

    def test_the_least_recently_used_goes_first(self):
        scales = launcher.Scales(kept=2)
        kept, gone = scales.get(1.0, self.cpu), scales.get(2.0, self.cpu)
        scales.get(1.0, self.cpu)
        scales.get(3.0, self.cpu)
        assert scales.get(1.0, self.cpu) is kept
        assert scales.get(2.0, self.cpu) is not gone

    def test_a_value_that_is_new_during_a_capture_is_not_kept(self):
        scales = launcher.Scales()
        captured = scales.get(0.5, self.cpu, capturing=True)
        assert captured.tolist() == [0.5]
        assert scales.get(0.5, self.cpu, capturing=True) is not captured
        assert scales.get(0.5, self.cpu) is not captured

    def test_a_captured_value_is_never_dropped(self):
        scales = launcher.Scales(kept=1, pinned=1)
        kept = scales.get(0.5, self.cpu)
        assert scales.get(0.5, self.cpu, capturing=True) is kept
        for value in range(10):
            scales.get(float(value), self.cpu)
        assert scales.get(0.5, self.cpu) is kept
        # No room to pin another: its own fill is captured instead.
        other = scales.get(9.0, self.cpu)
        assert scales.get(9.0, self.cpu, capturing=True) is not other


# Errors


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "cache_seqlens", "attn_sink", "out"])
@pytest.mark.parametrize("value", [np.zeros(3, np.float32), [1, 2], 3], ids=["ndarray", "list", "int"])
def test_what_is_no_tensor_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected a torch.Tensor, got "):
        mla_torch.decode(**dense() | {name: value})


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_what_is_needed_is_named(name):
    with pytest.raises(ValueError, match=rf"^{name}: expected a torch.Tensor, got builtins.NoneType"):
        mla_torch.decode(**dense() | {name: None})


ALL_SPARSE = ("kv_cache", "indices", "topk_length", "extra_kv_cache", "extra_indices", "extra_topk_length", "attn_sink", "out")


def everything_sparse():
    out = torch.empty(2, 1, 4, 512, dtype=torch.bfloat16)
    return sparse(extra=True) | {"attn_sink": torch.zeros(4), "out": out}


@pytest.mark.parametrize("name", ALL_SPARSE)
def test_tensors_of_two_devices_are_named(name):
    call = everything_sparse()
    call[name] = call[name].to("meta")
    with pytest.raises(ValueError, match=rf"^{name}: expected device cpu, as q has, got meta"):
        mla_torch.decode(**call)


def test_a_call_on_the_meta_device_is_refused_in_words():
    call = {name: tensor.to("meta") for name, tensor in dense().items()}
    with pytest.raises(NotImplementedError, match="reference: q: a tensor on the meta device holds no values"):
        mla_torch.decode(**call)


@pytest.mark.parametrize("name", ["q", "kv_cache", "extra_kv_cache", "attn_sink", "softmax_scale", "out"])
def test_tensors_that_require_a_gradient_are_refused(name):
    call = everything_sparse() | {"softmax_scale": torch.tensor(0.1)}
    call[name] = call[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: requires a gradient; decode is forward-only: detach it or call under"):
        mla_torch.decode(**call)
    if name != "out":  # autograd itself forbids writing into a leaf only where gradients are on
        with torch.no_grad():
            out, _ = mla_torch.decode(**call)
        assert not out.requires_grad


WRONG = {
    "q-rank": (
        lambda: dense() | {"q": torch.zeros(2, 4, 576, dtype=torch.bfloat16)},
        ValueError,
        r"^q: .*bfloat16 \[2, 4, 576\]",
    ),
    "q-dtype": (
        lambda: dense() | {"q": torch.zeros(2, 1, 4, 576)},
        ValueError,
        "^q: expected bfloat16 or float16, got float32",
    ),
    "q-columns": (
        lambda: dense() | {"q": torch.zeros(2, 1, 4, 1152, dtype=torch.bfloat16)[..., ::2]},
        ValueError,
        "^q: the innermost dimension must be dense",
    ),
    "cache-dtype": (lambda: dense() | {"kv_cache": dense(dtype=torch.float16)["kv_cache"]}, ValueError, "^kv_cache: "),
    "cache-width": (lambda: dense() | {"kv_cache": dense(d_qk=512)["kv_cache"]}, ValueError, "^kv_cache: .*d_qk=576"),
    "table-dtype": (lambda: dense() | {"block_table": dense()["block_table"].long()}, ValueError, "^block_table: .*got int64"),
    "table-missing": (lambda: dense() | {"block_table": None}, ValueError, "^block_table: needed"),
    "table-and-indices": (lambda: sparse() | {"block_table": dense()["block_table"]}, ValueError, "^block_table: "),
    "lengths-shape": (
        lambda: dense() | {"cache_seqlens": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        r"^cache_seqlens: .*b=2",
    ),
    "lengths-missing": (lambda: dense() | {"cache_seqlens": None}, ValueError, "^cache_seqlens: needed"),
    "lengths-sparse": (lambda: sparse() | {"cache_seqlens": dense()["cache_seqlens"]}, ValueError, "^cache_seqlens: "),
    "indices-shape": (
        lambda: sparse() | {"indices": torch.zeros(2, 64, dtype=torch.int64)},
        ValueError,
        r"^indices: expected int32 of shape \[b=2, s_q=1, topk\], got int64 \[2, 64\]",
    ),
    "topk_length-dense": (lambda: dense() | {"topk_length": dense()["cache_seqlens"]}, ValueError, "^topk_length: "),
    "topk_length-shape": (lambda: sparse() | {"topk_length": torch.zeros(1, dtype=torch.int32)}, ValueError, "^topk_length: "),
    "extra-alone": (lambda: sparse() | {"extra_kv_cache": sparse()["kv_cache"]}, ValueError, "^extra_indices: needed"),
    "extra_indices-alone": (lambda: sparse() | {"extra_indices": sparse()["indices"]}, ValueError, "^extra_kv_cache: needed"),
    "extra_topk_length-alone": (
        lambda: sparse() | {"extra_topk_length": sparse()["topk_length"]},
        ValueError,
        "^extra_topk_length: ",
    ),
    "sink-dtype": (lambda: dense() | {"attn_sink": torch.zeros(4, dtype=torch.bfloat16)}, ValueError, "^attn_sink: .*float32"),
    "sink-shape": (lambda: dense() | {"attn_sink": torch.zeros(5)}, ValueError, r"^attn_sink: .*h_q=4"),
    "head_dim_v-large": (lambda: dense() | {"head_dim_v": 577}, ValueError, "^head_dim_v: "),
    "head_dim_v-type": (lambda: dense() | {"head_dim_v": 512.0}, ValueError, "^head_dim_v: "),
    "head_dim_v-needed": (lambda: dense(d_qk=320), ValueError, "^head_dim_v: must be given"),
    "causal-type": (lambda: dense() | {"causal": 1}, ValueError, "^causal: expected a bool"),
    "causal-sparse": (lambda: sparse() | {"causal": True}, ValueError, "^causal: "),
    "format-unknown": (lambda: dense() | {"cache_format": "fp4"}, ValueError, "^cache_format: expected one of"),
    "format-reserved": (lambda: dense() | {"cache_format": "v41_fp8"}, NotImplementedError, "^cache_format: 'v41_fp8'"),
    "page_size": (lambda: dense() | {"page_size": 32}, ValueError, "^page_size: "),
    "page_size-list": (lambda: dense() | {"page_size": [16]}, ValueError, "^page_size: "),
    "num_splits-zero": (lambda: dense() | {"num_splits": 0}, ValueError, "^num_splits: "),
    "num_splits-bool": (lambda: dense() | {"num_splits": True}, ValueError, "^num_splits: "),
    "num_splits-list": (lambda: dense() | {"num_splits": [1]}, ValueError, "^num_splits: "),
    "out-shape": (lambda: dense() | {"out": torch.zeros(2, 1, 4, 576, dtype=torch.bfloat16)}, ValueError, "^out: expected"),
    "out-dtype": (lambda: dense() | {"out": torch.zeros(2, 1, 4, 512)}, ValueError, "^out: expected bfloat16"),
    "out-repeated": (
        lambda: dense() | {"out": torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16).expand(2, 1, 4, 512)},
        ValueError,
        "^out: ",
    ),
    "fp16-queries": (
        lambda: sparse("v32_fp8") | {"q": sparse()["q"].half()},
        NotImplementedError,
        "^q: a v32_fp8 cache takes bfloat16 queries",
    ),
    "sparse-layout": (
        lambda: dense() | {"q": torch.zeros(2, 1, 4, 576).to_sparse()},
        ValueError,
        "^q: expected a strided tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_before_any_launch(case, monkeypatch):
    kernel = recording(monkeypatch)
    monkeypatch.setattr(launcher, "allocate", None)
    call, error, message = WRONG[case]
    call = call()
    with pytest.raises(error, match=message):
        mla_torch.decode(**call)
    with pytest.raises(error, match=message):
        mla_torch.explain(**call)
    assert kernel.launches == []


def test_a_kept_call_does_not_let_a_wrong_one_pass(monkeypatch):
    recording(monkeypatch)
    mla_torch.decode(**dense(), num_splits=1, causal=True)
    with pytest.raises(ValueError, match=r"^num_splits: "):
        mla_torch.decode(**dense(), num_splits=True, causal=True)
    with pytest.raises(ValueError, match=r"^causal: "):
        mla_torch.decode(**dense(), num_splits=1, causal=1)


# Keeping


def test_only_what_shapes_a_call_plans_it_anew(monkeypatch):
    kernel = recording(monkeypatch)
    call = dense()
    mla_torch.decode(**call)
    mla_torch.decode(**call | {"q": call["q"] * 2, "cache_seqlens": call["cache_seqlens"] + 1}, softmax_scale=0.3)
    mla_torch.decode(**call, softmax_scale=torch.tensor(0.7))
    assert len(kernel.plans) == 1
    mla_torch.decode(**call | {"q": call["q"].repeat(1, 1, 2, 1)[:, :, ::2]})
    assert len(kernel.plans) == 2
    mla_torch.decode(**call, num_splits=2)
    assert len(kernel.plans) == 3
    assert len(kernel.launches) == 5


def test_threads_share_all_that_is_kept(monkeypatch):
    recording(monkeypatch)
    monkeypatch.setattr(launcher, "scales", launcher.Scales(kept=3))
    calls = [dense(h_q=h) for h in range(1, 9)]
    barrier = threading.Barrier(4)

    def work(seed):
        barrier.wait()
        for i in range(100):
            call = calls[(i * seed) % 8]
            out, _ = mla_torch.decode(**call, softmax_scale=float(i % 7))
            assert out.shape == (2, 1, call["q"].shape[2], 512)
            assert (out == 1).all()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in (1, 3, 5, 7)]:
            done.result()


def test_threads_share_the_kernels():
    calls = [dense(b=1, h_q=h) for h in (1, 2)] * 2
    expected = [mla_torch.decode(**call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda call: mla_torch.decode(**call), calls))
    for (out, lse), (out_found, lse_found) in zip(expected, found, strict=True):
        torch.testing.assert_close(out, out_found, rtol=0, atol=0)
        torch.testing.assert_close(lse, lse_found, rtol=0, atol=0)


def test_device_facts_come_from_the_device(monkeypatch):
    properties = type("Properties", (), {})()
    properties.name, properties.major, properties.minor = "Some GPU", 9, 0
    properties.multi_processor_count, properties.shared_memory_per_block = 42, 49152
    properties.shared_memory_per_block_optin = 232448
    asked = []
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or properties)
    launcher._cuda_facts.cache_clear()
    try:
        facts = launcher.device_facts(torch.device("cuda", 3))
        assert launcher.device_facts(torch.device("cuda", 3)) is facts
    finally:
        launcher._cuda_facts.cache_clear()
    assert asked == [3]
    assert (facts.name, facts.capability, facts.multiprocessors, facts.shared_memory) == ("Some GPU", (9, 0), 42, 232448)
    assert not facts.interpreted
    assert launcher.device_facts(torch.device("cpu")) is None
    assert launcher.device_facts(torch.device("meta")) is None


# A process of its own: what an import does


def python(code, **environment):
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


CALL = """
import torch, mla_torch
q = torch.ones(1, 1, 1, 576, dtype=torch.bfloat16)
table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
call = (q, q.view(1, 1, 1, 576), table, lengths)
out, lse = mla_torch.decode(*call)
assert (out == 1).all() and abs(lse.item() - 24) < 1e-4
print(mla_torch.explain(*call).implementation)
"""


@pytest.mark.parametrize(("interpret", "chosen"), [("0", "reference"), ("1", "triton")])
def test_the_environment_decides_on_a_cpu(interpret, chosen):
    code, stdout, stderr = python(CALL, TRITON_INTERPRET=interpret)
    assert (code, stdout) == (0, chosen), stderr


def test_importing_needs_no_jax():
    forbid = "import sys; sys.modules['jax'] = sys.modules['jax_triton'] = None; import mla_torch, mla_torch.flash_mla"
    code, _, stderr = python(forbid)
    assert code == 0, stderr


def test_without_torch_one_sentence_says_so():
    code, _, stderr = python("import sys; sys.modules['torch'] = None; import mla_torch")
    assert code != 0
    assert stderr.splitlines()[-1] == "ImportError: mla_torch needs PyTorch: pip install 'mla-decode[torch]'"


# On a GPU


def cuda(call, device="cuda"):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


@pytest.mark.gpu
def test_a_call_never_waits_for_the_device():
    call = cuda(dense()) | {"softmax_scale": torch.tensor(0.1, dtype=torch.float64, device="cuda")}
    mla_torch.decode(**call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mla_torch.decode(**call)
        mla_torch.decode(**call | {"softmax_scale": 0.1234})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True], ids=["new-scale", "known-scale"])
def test_a_graph_keeps_its_scale(warm):
    scale = 0.0312 if warm else 0.0412
    call = cuda(dense())
    expected, _ = mla_torch.decode(**call, softmax_scale=torch.tensor(scale, device="cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mla_torch.decode(**call, softmax_scale=scale if warm else 0.5)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, _ = mla_torch.decode(**call, softmax_scale=scale)
    for value in range(2 * launcher.SCALES_KEPT):
        mla_torch.decode(**call, softmax_scale=1.0 + value)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, expected)
    again, _ = mla_torch.decode(**call, softmax_scale=scale)
    assert_same_bits(again, expected)


@pytest.mark.gpu
def test_a_second_device_need_not_be_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    expected, _ = mla_torch.decode(**cuda(dense(), "cuda:0"))
    with torch.cuda.device(0):
        out, lse = mla_torch.decode(**cuda(dense(), "cuda:1"))
        assert torch.cuda.current_device() == 0
    assert out.device == lse.device == torch.device("cuda:1")
    assert_same_bits(out.cpu(), expected.cpu())
    with pytest.raises(ValueError, match=r"^kv_cache: expected device cuda:0, as q has, got cuda:1"):
        mla_torch.decode(**cuda(dense(), "cuda:0") | {"kv_cache": dense()["kv_cache"].to("cuda:1")})


@pytest.mark.gpu
def test_tensors_on_the_cpu_do_not_go_with_a_gpu():
    with pytest.raises(ValueError, match=r"^cache_seqlens: expected device cuda:0, as q has, got cpu"):
        mla_torch.decode(**cuda(dense()) | {"cache_seqlens": dense()["cache_seqlens"]})
