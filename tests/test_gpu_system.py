"""Sizes that only a GPU has: caches beyond 4 GiB and beyond half of the card, many rows, much scratch, a second device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import mla_torch
from mla_kernels import direct
from mla_torch import launcher
from tests import gpu_tools
from tests.arg_specs import ArgSpec, spec_id
from tests.gpu_tools import assert_right, assert_same_bits, judge, much_memory, skip_where_refused, torch_call
from tests.hopper_calls import by_implementation

pytestmark = pytest.mark.gpu

LARGE = 2**33 + 2**31  # bytes of a large cache: offsets pass 2**31 and 2**32, in bytes and in elements
SLACK = 2**26  # bytes that a small call may take besides its results


def elements(num_bytes: int, dtype: torch.dtype) -> int:
    return num_bytes // torch.empty(0, dtype=dtype).element_size()


def spread_out(small: torch.Tensor, num_pages: int, page_stride: int, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    """A cache of `num_pages` pages, uninitialised but for the pages `ids`, which are those of `small`."""
    flat = torch.empty(num_pages * page_stride, dtype=small.dtype, device=small.device)
    cache = flat.as_strided((num_pages, *small.shape[1:]), (page_stride, *small.stride()[1:]), start)
    width = small.stride(0)
    pages = small.as_strided((len(small), width), (width, 1))
    flat.as_strided((num_pages, width), (page_stride, 1), start)[ids] = pages
    return cache


def far_ids(small: torch.Tensor, num_pages: int) -> torch.Tensor:
    """A new page id for each page of a small cache: spread from the first to the last page."""
    spread = torch.linspace(0, num_pages - 1, len(small), dtype=torch.float64).round().long()
    assert len(spread.unique()) == len(small)
    return spread[torch.randperm(len(small), generator=torch.Generator().manual_seed(0))].to(small.device)


def moved(call: dict, prefix: str, cache: torch.Tensor, ids: torch.Tensor) -> dict:
    """The call on a cache to which the pages of its own one have been moved."""
    page_size = cache.shape[1]
    name = f"{prefix}indices" if f"{prefix}indices" in call else "block_table"
    table = call[name].long()
    unit = page_size if name.endswith("indices") else 1
    known = (table >= 0) & (table < len(ids) * unit)
    inside = table.clamp(0, len(ids) * unit - 1)
    new = torch.where(known, ids[inside // unit] * unit + inside % unit, table)
    return call | {f"{prefix}kv_cache": cache, name: new.int()}


LARGE_SPECS = (
    ArgSpec(batch=3, h_q=16, length=700, lengths="ragged"),
    ArgSpec(batch=2, h_q=16, length=700, page_size=480, topk=300),
    ArgSpec(format="v32_fp8", batch=3, h_q=16, length=700),
    ArgSpec(format="v32_fp8", batch=2, s_q=2, h_q=128, length=700, topk=512),
    ArgSpec(format="model1_fp8", d_qk=512, batch=3, h_q=16, length=700),
    ArgSpec(format="model1_fp8", d_qk=512, batch=2, h_q=64, length=700, topk=128, extra=(64, 512, True)),
)


@by_implementation(LARGE_SPECS)
def test_a_cache_beyond_4_gib(spec, implementation):
    """Pages moved to the far ends of a large cache give the bits that they gave in a small one."""
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    call["implementation"] = implementation
    expected = mla_torch.decode(**call)
    assert_right(expected, judge(call, spec), spec)
    prefixes = [""] + ["extra_"] * ("extra_kv_cache" in call)
    with much_memory(LARGE * len(prefixes)):
        for prefix in prefixes:
            small = call[f"{prefix}kv_cache"]
            stride = small.stride(0)
            num_pages = elements(LARGE, small.dtype) // stride
            ids = far_ids(small, num_pages)
            call = moved(call, prefix, spread_out(small, num_pages, stride, ids), ids)
        assert_same_bits(mla_torch.decode(**call), expected)
        del call


@by_implementation([LARGE_SPECS[0], LARGE_SPECS[3], LARGE_SPECS[4]])
def test_an_interleaved_cache_of_half_the_card_is_not_copied(spec, implementation):
    """Every second page of a buffer that takes more than half of the GPU's memory."""
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    call["implementation"] = implementation
    expected = mla_torch.decode(**call)
    small = call["kv_cache"]
    step = 2 * small.stride(0)
    size = int(0.52 * torch.cuda.mem_get_info()[1])
    num_pages = elements(size, small.dtype) // step
    with much_memory(size):
        ids = far_ids(small, num_pages)
        call = moved(call, "", spread_out(small, num_pages, step, ids, small.stride(0)), ids)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = mla_torch.decode(**call)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < SLACK
        assert_same_bits(result, expected)
        del call


@by_implementation(
    [
        ArgSpec(batch=7, h_q=8, length=20),
        ArgSpec(batch=7, s_q=3, h_q=8, length=20, causal=True),
        ArgSpec(format="v32_fp8", batch=7, s_q=2, h_q=8, length=60, topk=40),
    ]
)
def test_more_rows_than_a_grid_dimension_holds(spec, implementation, monkeypatch):
    """b * s_q above 65,536: seven requests over and over, and every copy gives the same bits."""
    copies = 65_536 // spec.batch // spec.s_q + 3
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    call["implementation"] = implementation
    rows = torch.arange(copies * spec.batch, device=gpu_tools.DEVICE) % spec.batch
    many = {
        name: value[rows] if isinstance(value, torch.Tensor) and not name.endswith("kv_cache") else value
        for name, value in call.items()
    }
    if not spec.sparse:
        # Different lengths, too; and one empty request.
        lengths = torch.tensor([20, 1, 13, 0, 20, 7, 2], dtype=torch.int32, device=gpu_tools.DEVICE)
        call["cache_seqlens"], many["cache_seqlens"] = lengths, lengths[rows]
    assert len(rows) * spec.s_q > 65_536
    with much_memory(2**32):
        monkeypatch.setattr(launcher, "allocate", gpu_tools.poisoned)
        # Whole requests in both, so that the same sums are made in the same order.
        out, lse = mla_torch.decode(**many | {"num_splits": 1})
        few = mla_torch.decode(**call | {"num_splits": 1})
        for found, expected in ((out, few[0]), (lse, few[1])):
            assert (found.unflatten(0, (copies, spec.batch)) == expected).all()
        assert_right(few, judge(call, spec), spec)
        out, lse = mla_torch.decode(**many)
        for found, expected in ((out, few[0]), (lse, few[1])):
            assert (found.unflatten(0, (copies, spec.batch)) == expected).all()


@by_implementation([ArgSpec(batch=40, h_q=128, length=300, lengths="ragged", num_splits=900, sink="finite")])
def test_scratch_beyond_2_31_elements(spec, implementation):
    """batch * heads * splits * d_v above 2**31; most of the splits are empty."""
    assert spec.batch * spec.h_q * spec.num_splits * 512 > 2**31
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    with much_memory(4 * spec.batch * spec.h_q * spec.num_splits * 513):
        assert_right(mla_torch.decode(**call, implementation=implementation), judge(call, spec), spec)


@pytest.mark.parametrize(
    "spec",
    [ArgSpec(format="v32_fp8", batch=3, h_q=16, length=500, topk=100), ArgSpec(batch=3, h_q=16, length=500)],
    ids=spec_id,
)
def test_a_second_device(spec):
    """A device that is not the current one, in both frameworks."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    from tests.inputs import make_inputs

    inputs = make_inputs(spec)
    expected = mla_torch.decode(**inputs.to_torch("cuda:0"))
    found = mla_torch.decode(**inputs.to_torch("cuda:1"))
    assert found[0].device == found[1].device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_same_bits(found, expected)
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import mla_jax
    from mla_jax import jax_triton_compat

    if mla_torch.explain(**inputs.to_torch("cuda:1")).implementation == "hopper" and not jax_triton_compat.gluon_supported():
        pytest.skip("PyTorch agrees with itself; JAX needs jax-triton 0.4 for Gluon kernels")
    call = {name: jax.device_put(x, jax.devices()[1]) if hasattr(x, "shape") else x for name, x in inputs.to_jax().items()}
    found = mla_jax.decode(**call)
    assert found[0].devices() == {jax.devices()[1]}
    assert_same_bits(found, expected)


@by_implementation([ArgSpec(format="v32_fp8", s_q=5, h_q=64, length=900, topk=512)])
def test_queries_far_apart_in_out(spec, implementation):
    """2**29 elements, so that their places need more than 32 bits."""
    call = torch_call(spec)
    with much_memory(2**33):
        out = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda").as_strided(
            (1, 5, 64, 512), (2**31, 2**29, 512, 1)
        )
        skip_where_refused(call | {"out": out}, implementation)
        expected = mla_torch.decode(**call, implementation=implementation)
        assert_same_bits(mla_torch.decode(**call, implementation=implementation, out=out), expected)
        del out


def test_kernels_are_launched_directly(monkeypatch):
    """Not by Triton's launcher, which would be slower without a word."""
    launched = []
    launch = direct.DirectLaunch.__call__
    monkeypatch.setattr(direct.DirectLaunch, "__call__", lambda *given: launched.append(given) or launch(*given))
    for format_ in ("bf16", "v32_fp8"):
        call = torch_call(ArgSpec(format=format_, h_q=64, length=900, topk=0 if format_ == "bf16" else 512))
        for implementation in ("hopper", "triton"):
            if mla_torch.explain(**call, implementation=(implementation, "reference")).plan is not None:
                plan = mla_torch.explain(**call, implementation=implementation).plan
                mla_torch.decode(**call, implementation=implementation)  # which may compile
                launched.clear()
                mla_torch.decode(**call, implementation=implementation)
                assert len(launched) == len(plan.launches)


@by_implementation([ArgSpec(batch=32, h_q=16, length=4096)])
def test_some_requests_wait_for_no_one(spec, implementation):
    """One long request among short ones takes little longer than if all keys were spread evenly."""
    call = torch_call(spec)
    skip_where_refused(call, implementation)
    call["implementation"] = implementation
    long_table = call["block_table"][:, :64].reshape(1, -1).repeat(32, 1)  # 32 * 64 pages: what one request may own
    call["block_table"] = long_table.contiguous()
    replay, _ = gpu_tools.capture(lambda: mla_torch.decode(**call))

    def time_of(lengths: list[int]) -> float:
        call["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        times = []
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[0]

    even = time_of([4096] * 32)
    one_long = time_of([32 * 4096 - 31 * 64] + [64] * 31)
    # The same number of keys; left whole, the long request would take 32 times as long.
    assert one_long < 3 * even, f"{one_long * 1e3:.0f} us, {even * 1e3:.0f} us with equal lengths"
