"""What the compiler makes of the Hopper kernels: registers, shared memory, warps, and main loops that touch no local memory."""

from __future__ import annotations

import re
import warnings
from functools import cache
from typing import Any

import pytest
import triton

from mla_kernels.hopper import plan as hopper
from mla_kernels.hopper import sizes
from mla_kernels.launch import Plan
from mla_kernels.problem import TensorSpec
from tests.compiling import Compilation, Compiled, compile_launch, cuobjdump, innermost_loops, instructions
from tests.hopper_calls import H200, attend_launch, dense_problem, sparse_problem
from tests.test_compile import TILES_CHOSEN_FOR_THIS_TRITON, check

pytestmark = pytest.mark.compile

THREADS_OF_A_WARPGROUP = 128

# Every value of what selects other code, and the pairs that share registers: rows beyond the tile with a causal mask, the
# sink with whole and split items, the width of the key with either dtype.
CALLS: dict[str, dict[str, Any]] = {
    "h128": {},
    "h16-sink": {"h_q": 16, "sink": True},
    "h64-p256": {"h_q": 64, "page_size": 256},
    "h40-p16-causal-sink": {"h_q": 40, "s_q": 3, "page_size": 16, "causal": True, "sink": True},
    "h16-s4-causal-splits-p32": {"h_q": 16, "s_q": 4, "page_size": 32, "causal": True, "num_splits": 4},
    "h100-s3-causal-sink": {"batch": 4, "h_q": 100, "s_q": 3, "causal": True, "sink": True},
    "h128-splits-sink": {"num_splits": 7, "sink": True},
    "h128-d512": {"d_qk": 512},
    "h128-d512-fp16-causal-splits-p16": {
        "d_qk": 512, "dtype": "float16", "s_q": 2, "causal": True, "num_splits": 2, "page_size": 16,
    },
    "h16-fp16-p16": {"h_q": 16, "dtype": "float16", "page_size": 16},
    "h64-fp16-p32-sink-causal": {"h_q": 64, "s_q": 2, "dtype": "float16", "page_size": 32, "sink": True, "causal": True},
}  # fmt: skip
SPARSE_CALLS: dict[str, dict[str, Any]] = {
    "v32-h128-s2-sink": {"s_q": 2, "sink": True},
    "v32-h20-p53-length-splits": {"h_q": 20, "page_size": 53, "length": True, "num_splits": 3},
    "v32-padded-extra-sink": {"page_stride": 64 * 656 + 16, "extra": 100, "extra_length": True, "sink": True},
    "v32-pages-beyond-2**31-words": {"page_size": 210_000, "page_stride": 64 * 210_000 * 656, "pages": 1},
    "model1-pages-beyond-2**31-words": {"cache_format": "model1_fp8", "page_size": 16_000_000, "pages": 1},
    "model1-h64": {"cache_format": "model1_fp8", "h_q": 64, "page_size": 256},
    "model1-h128-s2-extra-sink": {"cache_format": "model1_fp8", "s_q": 2, "page_size": 256, "extra": 512, "sink": True},
    "model1-h16-extra-lengths": {
        "cache_format": "model1_fp8", "h_q": 16, "extra": 512, "extra_page_size": 2, "length": True, "extra_length": True,
    },
}  # fmt: skip
ALL_CALLS = (*CALLS, *SPARSE_CALLS)


@cache
def plan(call: str) -> Plan:
    problem = dense_problem(**CALLS[call]) if call in CALLS else sparse_problem(**SPARSE_CALLS[call])
    return hopper.plan_decode(problem, H200)


@cache
def compiled(call: str) -> Compiled:
    return check(Compilation(call, H200, plan(call), attend_launch(plan(call))))


@cache
def texts(call: str) -> list[tuple[int, str]]:
    if cuobjdump() is None:
        pytest.skip("Triton's wheel has no cuobjdump here")
    return instructions(compiled(call).cubin)


@cache
def inner_loops(call: str, word: str) -> list[list[str]]:
    return innermost_loops(texts(call), word)


@pytest.mark.parametrize("call", ALL_CALLS)
def test_resources(call):
    result = compiled(call)
    assert result.threads == 32 * result.num_warps
    assert result.shared_memory <= hopper.shared_memory(plan(call).problem) <= H200.shared_memory
    assert "wgmma.mma_async" in result.ptx
    assert "cp.async.bulk.tensor.2d" in result.ptx


@pytest.mark.parametrize("call", CALLS)
def test_every_partition_gets_its_registers(call):
    """Requests beyond the budget are dropped in silence, by Triton all of them and by ptxas each."""
    result = compiled(call)
    entries = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", result.ptx)]
    warpgroups = result.threads // THREADS_OF_A_WARPGROUP
    base = 65_536 // result.threads // 8 * 8
    below, above = {n for n in entries if n < base}, {n for n in entries if n >= base}
    assert above and below, entries  # the products' partitions take what the fetching one gives up
    # Entering the partitions: two that multiply, and one or more that fetch, within what the block was launched with.
    largest = min(n for n in above)
    assert 2 * largest + (warpgroups - 2) * min(below) <= base * warpgroups
    assert result.registers <= base
    assert "setmaxnreg" not in result.log
    if cuobjdump() is not None:
        assert sum("USETMAXREG" in text for _, text in texts(call)) == len(entries)


@pytest.mark.parametrize("call", ALL_CALLS)
def test_products_run_on_tensor_cores_side_by_side(call):
    """Both warpgroups have a loop of their own, and ptxas did not serialise what is asynchronous in it."""
    products = [sum("HGMMA" in text for text in loop) for loop in inner_loops(call, "HGMMA")]
    # Of a block of 64 keys: QK by columns of 16 into 64 x 64, and P.V of both blocks by keys of 16 into 64 x 256, at once or
    # in two halves.
    halves = 2 if call in SPARSE_CALLS else 1
    assert products == [plan(call).problem.d_qk // 16 + halves * 2 * 64 // 16] * 2
    assert "serialized" not in compiled(call).log


def local_accesses(call: str, word: str) -> list[int]:
    """Loads and stores of local memory in each innermost loop that has `word` in it."""
    return [sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in loop) for loop in inner_loops(call, word)]


@pytest.mark.parametrize("call", CALLS)
def test_the_main_loops_use_no_local_memory(call):
    assert local_accesses(call, "HGMMA") == [0, 0]


@pytest.mark.parametrize("call", CALLS)
def test_the_loop_that_fetches_uses_little_local_memory(call):
    """Its partition has the fewest registers; of pages of 16 tokens it holds the places of eight at a time."""
    (accesses,) = local_accesses(call, "UTMALDG")
    small_pages = plan(call).problem.cache.page_size < 32
    assert accesses <= (16 if small_pages else 0)


@pytest.mark.parametrize("call", CALLS)
def test_little_is_spilled_around_the_loops(call):
    result = compiled(call)
    if result.spill_stores:
        warnings.warn(f"{call}: spills {result.spill_stores} bytes with Triton {triton.__version__}", stacklevel=2)
    small_pages = plan(call).problem.cache.page_size < 64
    if TILES_CHOSEN_FOR_THIS_TRITON:
        assert result.spill_stores <= (96 if small_pages else 0)
    else:
        assert result.spill_stores <= 192


@pytest.mark.parametrize("call", SPARSE_CALLS)
def test_registers_of_the_sparse_kernel(call):
    """The gathering partitions take what the products' can spare: 64 and 192 of a thread."""
    result = compiled(call)
    entries = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", result.ptx)]
    assert {sizes.GATHER_REGISTERS, sizes.GATHER_CONSUMER_REGISTERS} <= set(entries)
    assert 2 * sizes.GATHER_CONSUMER_REGISTERS + 2 * sizes.GATHER_REGISTERS <= 512
    assert "setmaxnreg" not in result.log
    assert result.registers <= 128
    # What is kept across items is spilled; in the products' loops a few words of a pair are.
    assert result.spill_stores <= (400 if TILES_CHOSEN_FOR_THIS_TRITON else 480)
    assert max(local_accesses(call, "HGMMA")) <= 24


@pytest.mark.parametrize("call", SPARSE_CALLS)
def test_rows_are_loaded_by_sixteen_bytes(call):
    """Whatever the pages: narrower loads would take four times as many instructions."""
    loads = [text for _, text in texts(call) if "LDG.E" in text]
    assert sum("LDG.E.128" in text for text in loads) >= 24
    assert any("STS.128" in text for _, text in texts(call))


def test_merging_that_overlaps_waits_before_it_reads():
    plan = hopper.plan_dense(dense_problem(batch=1, h_q=128), H200)
    attend, merge = plan.launches
    assert merge.overlaps
    ptx = compile_launch(plan, merge).ptx
    body = ptx[ptx.index(".entry") :]
    assert body.index("griddepcontrol.wait") < re.search(r"\b(ld|st|red|atom)\.global", body).start()
    assert "griddepcontrol.launch_dependents" in compile_launch(plan, attend).ptx


def test_places_in_out_need_64_bits():
    """The queries of a sparse call may lie 2**29 elements apart."""
    out = TensorSpec((1, 5, 64, 512), "bfloat16", (2**32, 2**29, 512, 1))
    plan = hopper.plan_sparse(sparse_problem(batch=1, s_q=5, h_q=64, topk=128, out=out), H200)
    ptx = compile_launch(plan, attend_launch(plan)).ptx
    assert not re.findall(r"(?:mul\.lo\.[su]32|mad\.lo\.[su]32|shl\.b32)[^;]*\b(?:536870912|29)\b", ptx)
    assert re.findall(
        r"(?:(?:mul|mad)\.wide\.[su]32|(?:mul|mad)\.lo\.s64)[^;]*\b(?:536870912|1073741824)\b|shl\.b64[^;]*, (?:29|30);", ptx
    )
