"""`mla_torch.decode` and `explain` as an interface: results, the choice of an implementation, accounts and imports."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mla_torch
from mla_kernels.device import INTERPRETER, KNOWN_DEVICES
from mla_kernels.launch import Refusal
from mla_torch import api, launcher
from tests.torch_calls import assert_same_bits, dense, fresh_cache, recording, sparse

H200, A100 = KNOWN_DEVICES["NVIDIA H200"], KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"]
BOTH = [pytest.param("triton", marks=pytest.mark.interpret), "reference"]
BF16_BOUND = 2**-7  # outputs of order 1, rounded to bf16 twice (P and out)


# Results


@pytest.mark.parametrize("implementation", BOTH)
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


@pytest.mark.parametrize("implementation", BOTH)
def test_out_is_written_in_place_through_its_strides(implementation):
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
    for interpreted, facts, for_dense, for_sparse in (
        (False, None, "reference", "reference"),
        (True, INTERPRETER, "triton", "triton"),
        (False, H200, "hopper", "triton"),
        (False, A100, "triton", "triton"),
    ):
        fresh_cache(monkeypatch)
        monkeypatch.setattr(launcher, "INTERPRETED", interpreted)
        if facts in (H200, A100):
            monkeypatch.setattr(launcher, "device_facts", lambda device, facts=facts: facts)
        for call, chosen in ((dense(), for_dense), (dense(d_qk=320) | {"head_dim_v": 256}, for_sparse), (sparse(), for_sparse)):
            explanation = mla_torch.explain(**call)
            assert explanation.implementation == chosen
            assert explanation.facts == facts
            assert chosen not in explanation.refused


def test_a_cache_that_tma_cannot_read_is_left_to_the_portable_kernels(monkeypatch):
    """The same shapes and strides, another address: the choice is made anew."""
    fresh_cache(monkeypatch)
    monkeypatch.setattr(launcher, "device_facts", lambda device: H200)
    call = dense()
    assert mla_torch.explain(**call).implementation == "hopper"
    cache = call["kv_cache"]
    flat = cache.new_empty(cache.numel() + 1)
    explanation = mla_torch.explain(**call | {"kv_cache": flat[1:].view(cache.shape)})
    assert explanation.implementation == "triton"
    assert "16 bytes" in str(explanation.refused["hopper"][0])
    assert mla_torch.explain(**call).implementation == "hopper"


def test_a_name_forces_an_implementation_and_a_sequence_is_an_order(monkeypatch):
    fresh_cache(monkeypatch)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    call = dense()
    assert mla_torch.explain(**call, implementation="reference").implementation == "reference"
    for names in (["triton", "reference"], ("triton", "reference")):
        assert mla_torch.explain(**call, implementation=names).implementation == "reference"
    with pytest.raises(NotImplementedError, match=r"(?s)no implementation serves this call.*triton: q: .*TRITON_INTERPRET=1"):
        mla_torch.decode(**call, implementation="triton")
    monkeypatch.setattr(launcher, "INTERPRETED", True)
    fresh_cache(monkeypatch)
    assert mla_torch.explain(**call, implementation=["reference", "triton"]).implementation == "reference"


def test_one_error_lists_every_refusal_of_every_implementation(monkeypatch):
    fresh_cache(monkeypatch)
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
    assert explanation.refused["fast"] == (Refusal("q", "16 heads or more"),)
    assert set(explanation.refused) == {"fast", "hopper"}
    assert "refused fast: q: 16 heads or more" in str(explanation)
    assert len(kernel.launches) == 1


@pytest.mark.parametrize("implementation", ["cuda", "", ["triton", "cuda"], [], (), 3, {"triton": 1}, [None]])
def test_unknown_implementations_are_named(implementation):
    with pytest.raises(ValueError, match=r"implementation: expected .*'hopper', 'triton', 'reference'"):
        mla_torch.decode(**dense(), implementation=implementation)


# Explaining


@pytest.mark.parametrize(("implementation", "kernel"), [("hopper", "dense_kernel"), ("triton", "attend_kernel")])
def test_explain_accounts_for_a_plan(implementation, kernel, monkeypatch):
    fresh_cache(monkeypatch)
    monkeypatch.setattr(launcher, "device_facts", lambda device: H200)
    call = dense(b=4, h_q=128, page_size=64)
    explanation = mla_torch.explain(**call, implementation=implementation)
    assert explanation.implementation == implementation
    assert explanation.plan.problem.h_q == 128
    assert explanation.plan.details
    scratch = {name: b for name, b in explanation.plan.buffers.items() if name not in ("out", "lse")}
    assert explanation.scratch_bytes == sum(int(np.prod(b.shape)) * np.dtype(b.dtype).itemsize for b in scratch.values())
    keys = 4 * 3 * 64
    assert explanation.max_keys == (keys, 0)
    text = str(explanation)
    for piece in (f"implementation: {implementation}", "b=4", "h_q=128", "NVIDIA H200", kernel, "num_splits", "scratch"):
        assert piece in text
    assert f"{keys * 2 * 128 * (576 + 512) / 1e6:.4g} MFLOP" in text


def test_explain_says_why_the_kernels_do_not_run(monkeypatch):
    fresh_cache(monkeypatch)
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
