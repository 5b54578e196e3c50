"""What `mla_torch` hands to the kernels, where it runs them and what it keeps between calls."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mla_torch
from mla_kernels.device import KNOWN_DEVICES
from mla_torch import launcher
from tests.torch_calls import assert_same_bits, dense, recording, sparse, to_cuda

H200 = KNOWN_DEVICES["NVIDIA H200"]
BF16_BOUND = 2**-7  # outputs of order 1, rounded to bf16 twice (P and out)


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


def test_compiled_code_calls_decode_as_it_is(monkeypatch):
    kernel = recording(monkeypatch)
    call = dense()

    def step(q):
        return mla_torch.decode(**call | {"q": q * 2})[0] + 1

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        assert (compiled(call["q"]) == 2).all()
    assert len(kernel.launches) == 3
    assert len(kernel.plans) == 1


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


# On a GPU


@pytest.mark.gpu
def test_a_call_never_waits_for_the_device():
    call = to_cuda(dense()) | {"softmax_scale": torch.tensor(0.1, dtype=torch.float64, device="cuda")}
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
    call = to_cuda(dense())
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
    expected, _ = mla_torch.decode(**to_cuda(dense(), "cuda:0"))
    with torch.cuda.device(0):
        out, lse = mla_torch.decode(**to_cuda(dense(), "cuda:1"))
        assert torch.cuda.current_device() == 0
    assert out.device == lse.device == torch.device("cuda:1")
    assert_same_bits(out.cpu(), expected.cpu())
    with pytest.raises(ValueError, match=r"^kv_cache: expected device cuda:0, as q has, got cuda:1"):
        mla_torch.decode(**to_cuda(dense(), "cuda:0") | {"kv_cache": dense()["kv_cache"].to("cuda:1")})


@pytest.mark.gpu
def test_tensors_on_the_cpu_do_not_go_with_a_gpu():
    with pytest.raises(ValueError, match=r"^cache_seqlens: expected device cuda:0, as q has, got cpu"):
        mla_torch.decode(**to_cuda(dense()) | {"cache_seqlens": dense()["cache_seqlens"]})
