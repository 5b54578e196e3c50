"""The PyTorch front end on a GPU: graphs, streams, memory, batch invariance, and what the kernels are compiled for."""

from __future__ import annotations

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import mla_torch
from mla_torch import flash_mla, launcher
from tests import gpu_tools
from tests.arg_specs import ArgSpec, spec_id
from tests.gpu_tools import (
    Allocations,
    assert_right,
    assert_same_bits,
    capture,
    compiled_kernels,
    judge,
    plan_of,
    skip_where_refused,
    torch_call,
)
from tests.hopper_calls import by_implementation

pytestmark = pytest.mark.gpu

DENSE = ArgSpec(batch=6, h_q=16, length=1000)
V32 = ArgSpec(format="v32_fp8", batch=3, s_q=2, h_q=128, length=900, topk=512, topk_length=True, scales="arbitrary")
MODEL1 = ArgSpec(
    format="model1_fp8", d_qk=512, batch=3, h_q=64, length=600, topk=128, topk_length=True, extra=(64, 512, True), sink="finite"
)
SPECS = (DENSE, V32, MODEL1)

needs_flash_mla = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("flash_mla", "sgl_flash_mla")), reason="FlashMLA is not installed"
)


def some_rows(call, rows):
    """The call for some of its requests."""
    shared = ("kv_cache", "extra_kv_cache", "attn_sink")
    return {
        name: value[rows].clone() if isinstance(value, torch.Tensor) and name not in shared else value
        for name, value in call.items()
    }


def test_the_judge_and_the_reference_agree():
    for spec in SPECS:
        call = torch_call(spec)
        reference = {name: value for name, value in call.items() if name != "num_splits"}
        out, lse = mla_torch.decode_reference(**reference, dtype=torch.float64)
        expected = judge(call)
        gpu_tools.assert_close(out, lse, expected, dtype="float64")
        assert_right(mla_torch.decode(**call, implementation="reference"), expected, spec)


@pytest.mark.parametrize("power", [100, -90])
@pytest.mark.parametrize("num_splits", [None, 5])
@by_implementation([DENSE, replace(DENSE, batch=1, h_q=128, length=9000)])
def test_values_of_any_size_are_merged(spec, implementation, num_splits, power):
    """Keys larger by a power of two, queries smaller by as much: the scores are the same, the pieces differ in size."""
    call = torch_call(spec) | {"num_splits": num_splits}
    skip_where_refused(call, implementation)
    call["kv_cache"] = call["kv_cache"] * 2.0**power
    call["kv_cache"][..., spec.d_v // 2 : spec.d_v] *= 2.0**-16  # the halves of a row have scales of their own
    call["q"] = call["q"] * 2.0**-power
    call["q"][..., spec.d_v // 2 : spec.d_v] *= 2.0**16
    result = mla_torch.decode(**call, implementation=implementation)
    assert_right(result, judge(call, spec), spec)


@pytest.mark.parametrize("num_splits", [None, 5])
@by_implementation([replace(DENSE, batch=1, h_q=128, length=9000)])
def test_an_infinite_value_spoils_its_own_column_alone(spec, implementation, num_splits):
    """A key that scores -inf has no weight, and no weight times -inf is NaN."""
    call = torch_call(spec) | {"num_splits": num_splits}
    skip_where_refused(call, implementation)
    column = 300
    call["q"][..., column] = 1
    call["kv_cache"][call["block_table"][0, 3].item(), 5, 0, column] = -torch.inf
    reference = {name: value for name, value in call.items() if name != "num_splits"}
    expected, expected_lse = mla_torch.decode_reference(**reference, dtype=torch.float64)
    out, lse = mla_torch.decode(**call, implementation=implementation)
    others = torch.arange(spec.d_v, device=out.device) != column
    assert out[..., column].isnan().all() and expected[..., column].isnan().all()
    difference = (out.double() - expected)[..., others].abs().max()
    assert difference <= 2.0**-7 * expected[..., others].abs().max()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-2)


@by_implementation([replace(DENSE, batch=1, s_q=2, length=17, page_size=16, causal=True, num_splits=2)])
def test_a_piece_without_keys_beside_a_key_that_is_nan(spec, implementation):
    """The last piece has the newest token alone, which is NaN and the last query's."""
    call = torch_call(spec)
    expected = judge(call, spec)
    call["kv_cache"][call["block_table"][0, 1].item(), 0] = torch.nan
    out, lse = mla_torch.decode(**call, implementation=implementation)
    assert out[0, 1].isnan().all()
    assert_right((out[:, :1], lse[..., :1]), replace(expected, **{
        name: getattr(expected, name)[:, :1] for name in ("out", "spread")
    }, **{name: getattr(expected, name)[..., :1] for name in ("lse", "score_norm")}), spec)  # fmt: skip


@pytest.mark.parametrize("num_splits", [3, 8])
@by_implementation(SPECS)
def test_with_num_splits_a_row_is_the_same_in_every_batch(spec, implementation, num_splits):
    call = torch_call(spec) | {"num_splits": num_splits}
    skip_where_refused(call, implementation)
    call["implementation"] = implementation
    result = mla_torch.decode(**call)
    for rows in (slice(0, 1), slice(spec.batch - 1, spec.batch), slice(1, spec.batch), [2, 0, 2, 1]):
        part = mla_torch.decode(**some_rows(call, rows))
        assert_same_bits(part, tuple(x[rows] for x in result))


@by_implementation(SPECS)
def test_arguments_out_of_alignment(spec, implementation):
    """Tables, lengths, sinks and scales that start anywhere give the same bits; queries too, but where TMA fetches them."""
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    expected = mla_torch.decode(**call, implementation=implementation)
    lists = ("block_table", "cache_seqlens", "indices", "topk_length", "extra_indices", "extra_topk_length", "attn_sink")
    for name in lists if implementation == "hopper" else ("q", *lists):
        if name in call:
            flat = call[name].new_empty(call[name].numel() + 1)
            call[name] = flat[1:].view(call[name].shape).copy_(call[name])
    out = call["q"].new_empty(expected[0].numel() + 1)[1:].view(expected[0].shape)
    scale = torch.full((2,), spec.d_qk**-0.5, device=gpu_tools.DEVICE)[1:]
    found = mla_torch.decode(**call, out=out, softmax_scale=scale, implementation=implementation)
    assert_same_bits(found, expected)


def test_queries_out_of_alignment_are_left_to_the_portable_kernels():
    call = torch_call(DENSE)
    expected = mla_torch.decode(**call, implementation="triton")
    call["q"] = call["q"].new_empty(call["q"].numel() + 1)[1:].view(call["q"].shape).copy_(call["q"])
    with pytest.raises(NotImplementedError, match="hopper: q: "):
        mla_torch.decode(**call, implementation="hopper")
    assert_same_bits(mla_torch.decode(**call), expected)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_a_cache_out_of_alignment_is_right_or_refused(spec):
    call = torch_call(spec)
    expected = mla_torch.decode(**call, implementation="triton")
    cache = call["kv_cache"]
    flat = cache.new_empty(cache.stride(0) * cache.shape[0] + 2)
    shifted = flat.as_strided(cache.shape, cache.stride(), 2)
    whole = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
    flat[2:].view(whole.shape).copy_(whole)
    try:
        result = mla_torch.decode(**call | {"kv_cache": shifted})
    except ValueError as error:
        assert str(error).startswith("kv_cache: ")  # noqa: PT017
    else:
        assert_same_bits(result, expected)


@pytest.mark.parametrize("spec", [V32, MODEL1], ids=spec_id)
def test_both_ways_to_decode_e4m3_give_the_same_bits(spec, monkeypatch):
    """Every code, NaN apart, in every tile of a row."""
    call = torch_call(spec) | {"implementation": "triton"}
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=gpu_tools.DEVICE)
    for name in ("kv_cache", "extra_kv_cache"):
        if name in call:
            cache = call[name]
            width, step = (512, 656) if spec.format == "v32_fp8" else (448, 576)
            data = gpu_tools.page_bytes(cache, width, step)
            n = data.shape[0] * data.shape[1]
            every = (torch.arange(n * width, device=gpu_tools.DEVICE) * 7 + 1) % len(codes)
            data.copy_(codes[every].view(data.shape))
    expected = mla_torch.decode(**call)
    assert torch.isfinite(expected[0]).all()
    gpu_tools.change_plans(monkeypatch, lambda plan: gpu_tools.with_constants(plan, "attend_kernel", NATIVE_FP8=False))
    assert [launch.constexprs["NATIVE_FP8"] for launch in plan_of(call).launches if launch.name == "attend_kernel"] == [False]
    assert_same_bits(mla_torch.decode(**call), expected)


def test_streams_and_threads_give_the_same_bits():
    calls = [torch_call(spec) for spec in SPECS]
    calls.append(calls[0] | {"implementation": "triton"})
    expected = [mla_torch.decode(**call) for call in calls]
    torch.cuda.synchronize()
    barrier = threading.Barrier(4)

    def work(seed):
        stream = torch.cuda.Stream()
        found = []
        barrier.wait()
        with torch.cuda.stream(stream):
            for i in range(12):
                which = (i + seed) % len(calls)
                found.append((which, mla_torch.decode(**calls[which], softmax_scale=512**-0.5 if which == 2 else 576**-0.5)))
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            for which, result in found:
                assert_same_bits(result, expected[which])


def units_of_programs(schedule, programs, units):
    """Units of keys per program of a schedule; `units` are those of each item."""
    fields = schedule[: 6 * programs].view(programs, 6).tolist()
    found = []
    covered = [0] * len(units)
    for first, last, lo, hi, *_ in fields:
        own = 0
        for item in range(first, last + 1):
            count = (hi if item == last else units[item]) - (lo if item == first else 0)
            covered[item] += count
            own += count
        found.append(own)
    assert covered == units
    return found


@by_implementation([ArgSpec(batch=8, h_q=16, length=8192, sink="finite")])
def test_a_graph_stays_right_and_balanced(spec, implementation, monkeypatch):
    """Captured once, replayed after lengths, tables and the number of live requests changed."""
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    call["implementation"] = implementation
    full_table = call["block_table"].clone()
    allocations = Allocations()
    monkeypatch.setattr(launcher, "allocate", allocations)
    replay, result = capture(lambda: mla_torch.decode(**call))
    schedule, details = allocations.schedule(plan_of(call)), plan_of(call).details
    for lengths, live in (
        ([8192] * 8, 8),
        ([64] * 8, 8),
        ([8192] + [20] * 7, 8),
        ([20] * 7 + [8192], 8),
        ([8192, 1, 65, 4096, 0, 0, 0, 0], 4),
        ([5000, -3, 8192, 100000, 0, 77, 1, 0], 7),
    ):
        table = full_table[torch.randperm(8, generator=torch.Generator().manual_seed(lengths[0])).to(full_table.device)]
        table[live:] = 2147480000
        if max(lengths) > 8192:  # clamped to the whole table, whose last two pages are garbage
            table[:, -2:] = full_table[0, :2]
        call["block_table"].copy_(table)
        call["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        result[0].fill_(float("nan"))
        result[1].fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        assert_right(result, judge(call, spec), spec)
        assert_same_bits(mla_torch.decode(**call), result)
        if implementation == "hopper":  # writes no schedule: tests/test_schedule.py sees what each program makes for itself
            continue
        programs, block, fixed = details["programs"], details["block_n"], details["fixed_cost"]
        tokens = [min(max(n, 0), full_table.shape[1] * 64) for n in lengths]
        units = [max(-(-n // block), 1) for n in tokens]
        work = units_of_programs(schedule.cpu(), max(programs, len(units)), units)
        most = max(work)
        even = -(-(sum(units) + fixed * len(units)) // programs)
        # Whole requests are left whole only where splitting them would cost more than it saves.
        assert most <= even + fixed + details["split_cost"], f"{lengths}: {most} blocks in one program, {even} if even"


@pytest.mark.parametrize("spec", [V32, MODEL1], ids=spec_id)
def test_a_sparse_graph_stays_right(spec):
    call = torch_call(spec)
    replay, result = capture(lambda: mla_torch.decode(**call))
    before = {name: value.clone() for name, value in call.items() if "indices" in name or name.endswith("length")}
    for rotation in range(3):
        for name, value in before.items():
            call[name].copy_(value.roll(rotation, 0))
        if rotation == 2:
            call["topk_length"][0] = 0
            call["indices"][1] = -1
        result[0].fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        assert_right(result, judge(call, spec), spec)
        assert_same_bits(mla_torch.decode(**call), result)


@by_implementation(SPECS)
def test_nothing_is_compiled_twice(spec, implementation):
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    call["implementation"] = implementation
    mla_torch.decode(**call)
    plan = plan_of(call)
    before = compiled_kernels(plan)
    assert before > 0
    lengths = call["topk_length" if spec.sparse else "cache_seqlens"]
    table = call["indices" if spec.sparse else "block_table"]
    for i in range(3):
        lengths.copy_(torch.randint(0, 500, lengths.shape, dtype=torch.int32))
        lengths[i:] = 0
        table.copy_(table.roll(1, 0))
        mla_torch.decode(**call, softmax_scale=0.01 + i)
        mla_torch.decode(**call, softmax_scale=torch.tensor(0.5 + i, device=gpu_tools.DEVICE))
    # Batch, table width and pages in the cache differ from step to step of a server, too.
    mla_torch.decode(**some_rows(call, slice(0, 2)))
    mla_torch.decode(**call | {"indices" if spec.sparse else "block_table": table[..., : table.shape[-1] // 2].contiguous()})
    mla_torch.decode(**call | {"kv_cache": call["kv_cache"][:-1]})
    assert compiled_kernels(plan) == before


def test_the_host_does_little(capsys):
    """Time of a call on the host where shapes were seen before."""
    lines = []
    for spec in SPECS:
        call = torch_call(spec)
        name = mla_torch.explain(**call).implementation
        mla_torch.decode(**call)
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(20):
                mla_torch.decode(**call)
            best = min(best, (time.perf_counter() - start) / 20)
            torch.cuda.synchronize()
        lines.append(f"{best * 1e6:.0f} us for {spec.id} by {name}")
        assert best < 2e-3
    with capsys.disabled():
        print(f"\nhost time of an eager call: {', '.join(lines)}")


def test_the_entry_for_callers_of_flash_mla():
    for spec in SPECS:
        call = torch_call(spec)
        meta, _ = flash_mla.get_mla_metadata()
        found = flash_mla.flash_mla_with_kvcache(
            call["q"],
            call["kv_cache"],
            call.get("block_table"),
            call.get("cache_seqlens"),
            512,
            meta,
            indices=call.get("indices"),
            topk_length=call.get("topk_length"),
            attn_sink=call.get("attn_sink"),
            extra_k_cache=call.get("extra_kv_cache"),
            extra_indices_in_kvcache=call.get("extra_indices"),
            extra_topk_length=call.get("extra_topk_length"),
        )
        assert_same_bits(found, mla_torch.decode(**call))


@needs_flash_mla
@pytest.mark.parametrize(
    "spec",
    [
        ArgSpec(batch=4, h_q=128, length=4096),
        ArgSpec(batch=4, s_q=2, h_q=16, length=1000, causal=True),
        ArgSpec(format="v32_fp8", batch=2, s_q=2, h_q=128, length=4096, topk=2048),
    ],
    ids=spec_id,
)
def test_flash_mla_agrees(spec):
    """The same call to FlashMLA's kernels: both are held to the same bounds."""
    from benchmarks.flash_mla_provider import FlashMLA

    try:
        theirs = FlashMLA()
    except ImportError as error:
        pytest.skip(f"FlashMLA does not load here: {error}")
    call = torch_call(spec)
    expected = judge(call)
    for implementation in (None, "triton"):
        assert_right(mla_torch.decode(**call, implementation=implementation), expected, spec)
    given = {
        name: call[name] for name in ("q", "kv_cache", "block_table", "cache_seqlens", "indices", "causal") if name in call
    }
    out, lse = theirs.decode(**given)
    # Its lse has no entry to compare where no key is attended; none of these calls has such a row.
    gpu_tools.assert_close(out, lse, expected)


@pytest.mark.parametrize("cache_format", ["v32_fp8", "model1_fp8"])
def test_caches_quantise_alike_on_both_devices(cache_format):
    d_qk = 512 if cache_format == "model1_fp8" else 576
    cache = torch.randn(5, 64, 1, d_qk, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = mla_torch.quantize_cache(cache, cache_format)
    found = mla_torch.quantize_cache(cache.to(gpu_tools.DEVICE), cache_format)
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)
    back = mla_torch.dequantize_cache(found, cache_format)
    assert torch.equal(back.cpu(), mla_torch.dequantize_cache(expected, cache_format))
