"""What the Hopper path serves, what it refuses in words, and that its plans describe the arrays of the call."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from mla_kernels.choose import choose
from mla_kernels.device import INTERPRETER, KNOWN_DEVICES
from mla_kernels.hopper import plan as hopper
from mla_kernels.launch import Buffer, TileDescriptor
from mla_kernels.plan import plan_decode
from mla_kernels.plan import refusals as portable_refusals
from mla_kernels.problem import INT32_MAX, Problem, TensorSpec, make_problem
from mla_kernels.schedule import num_slots, schedule_size
from tests.arg_specs import HOPPER_FACTORS, ArgSpec, real_specs, small_specs, spec_id
from tests.hopper_calls import H200, PAGES, attend_launch, dense_problem, interleaved, scalars_of, served, sparse_problem
from tests.inputs import make_inputs

HAS_TORCH = importlib.util.find_spec("torch") is not None
FEW_SMS = replace(H200, name="a small Hopper", multiprocessors=3)


def sparse_bf16_problem() -> Problem:
    q, cache = TensorSpec((4, 1, 128, 576), "bfloat16"), TensorSpec((PAGES, 64, 1, 576), "bfloat16")
    return make_problem(q, cache, indices=TensorSpec((4, 1, 512), "int32"))


def quantised_problem(width: int, d_qk: int) -> Problem:
    return make_problem(
        TensorSpec((4, 1, 128, d_qk), "bfloat16"),
        TensorSpec((PAGES, 64, 1, width), "uint8"),
        TensorSpec((4, 512), "int32"),
        TensorSpec((4,), "int32"),
    )


SERVED = {
    **{f"page-{n}": {"page_size": n} for n in (16, 32, 64, 128, 192, 256)},
    **{f"page-{n}-interleaved": {"page_size": n, "cache_strides": interleaved(n)} for n in (16, 64, 192)},
    **{f"s{s}-h{h}": {"s_q": s, "h_q": h, "causal": s > 1} for s in (1, 4) for h in (16, 40, 128)},
    "one-head": {"h_q": 1},
    "one-of-everything": {"batch": 1, "h_q": 1, "pages": 1, "width": 1},
    "fp16": {"dtype": "float16"},
    "d512": {"d_qk": 512},
    "fp16-d512-interleaved": {"dtype": "float16", "d_qk": 512, "cache_strides": interleaved(64, 512)},
    "sink-splits": {"sink": True, "num_splits": 7},
    "rows-apart": {"q_strides": (128 * 640, 128 * 640, 640, 1)},
    "tokens-apart": {"cache_strides": (64 * 584, 584, 584, 1)},
    "one-request-of-many": {"batch": 1, "q_strides": (7, 128 * 576, 576, 1)},
    "one-page-of-many": {"pages": 1, "cache_strides": (1001, 576, 576, 1)},
    "table-of-a-view": {"table_strides": (1024, 1)},
}

REFUSED: dict[str, tuple[Any, Any, str, str]] = {  # call, device, argument, what the reason says
    "interpreter": ({}, INTERPRETER, "q", "interpreted"),
    "A100": ({}, KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"], "q", r"9\.0, NVIDIA A100-SXM4-80GB has \(8, 0\)"),
    "B200": ({}, KNOWN_DEVICES["NVIDIA B200"], "q", r"9\.0, NVIDIA B200 has \(10, 0\)"),
    "little-shared-memory": ({}, replace(H200, shared_memory=200_000), "q", "200000"),
    "sparse-bf16": (sparse_bf16_problem, H200, "indices", "got bf16"),
    "v32_fp8": (lambda: quantised_problem(656, 576), H200, "kv_cache", "v32_fp8"),
    "model1_fp8": (lambda: quantised_problem(584, 512), H200, "kv_cache", "model1_fp8"),
    "d320": ({"d_qk": 320, "head_dim_v": 256}, H200, "q", "320 with 256"),
    "d_v-256": ({"head_dim_v": 256}, H200, "q", "576 with 256"),
    "two-kv-heads": ({"h_kv": 2}, H200, "kv_cache", "2"),
    **{f"page-{n}": ({"page_size": n}, H200, "kv_cache", f"got {n}$") for n in (1, 2, 8, 24, 48, 53, 80, 96, 576 + 32)},
    "no-pages": ({"pages": 0}, H200, "kv_cache", "at least one page"),
    "q-unaligned": ({"aligned": (False, True)}, H200, "q", "16 bytes"),
    "cache-unaligned": ({"aligned": (True, False)}, H200, "q", "caches to start at multiples of 16 bytes"),
    "heads-at-odd-strides": ({"q_strides": (128 * 580, 128 * 580, 580, 1)}, H200, "q", "strides .*580"),
    "one-row-for-all-requests": ({"h_q": 1, "q_strides": (0, 576, 576, 1)}, H200, "q", r"\[0, 576, 576\]"),
    "one-row-for-all-heads": ({"batch": 1, "h_q": 16, "q_strides": (576, 576, 0, 1)}, H200, "q", r"\[576, 576, 0\]"),
    "rows-that-overlap": ({"q_strides": (128 * 8, 128 * 8, 8, 1)}, H200, "q", "strides"),
    "requests-apart": ({"q_strides": (129 * 576, 129 * 576, 576, 1)}, H200, "q", "equal distances"),
    "one-request-apart": (
        {"batch": 1, "num_splits": 4, "q_strides": (129 * 576, 129 * 576, 576, 1)},
        H200,
        "q",
        "equal distances",
    ),
    "queries-apart": ({"s_q": 2, "q_strides": (256 * 576, 64 * 576, 576, 1)}, H200, "q", "equal distances"),
    "queries-before-requests": ({"s_q": 2, "q_strides": (128 * 576, 512 * 576, 576, 1)}, H200, "q", "equal distances"),
    "tokens-at-odd-strides": ({"cache_strides": (64 * 580, 580, 580, 1)}, H200, "kv_cache", "580"),
    "tokens-that-overlap": ({"cache_strides": (64 * 512, 512, 512, 1)}, H200, "kv_cache", "512"),
    "pages-between-tokens": ({"cache_strides": (64 * 576 + 8, 576, 576, 1)}, H200, "kv_cache", str(64 * 576 + 8)),
    "2**31-rows": ({"pages": 2**25 + 1}, H200, "kv_cache", "2\\*\\*31 rows"),
    "2**31-rows-apart": ({"pages": 2**24 + 2, "cache_strides": interleaved(64)}, H200, "kv_cache", "2\\*\\*31 rows"),
    "2**31-keys": ({"width": 2**25}, H200, "block_table", "2\\*\\*31 keys"),
    "table-strides": ({"table_strides": (2**31, 1)}, H200, "block_table", "strides"),
    "2**31-programs": ({"batch": 2**21, "h_q": 16, "num_splits": 2**10}, H200, "num_splits", "2\\*\\*31 programs"),
    "many-keys-in-all": ({"batch": 65, "width": 2**25 - 64}, H200, "block_table", "keys in all"),
    "2**31-rows-of-q": ({"batch": 2**24, "h_q": 128, "width": 1}, H200, "q", "2\\*\\*31"),
}

MODEL1: dict[str, Any] = {"cache_format": "model1_fp8", "page_size": 256}
SPARSE_SERVED: dict[str, dict[str, Any]] = {
    **{f"{fmt}-h{h}": {"cache_format": fmt, "h_q": h} for fmt in ("v32_fp8", "model1_fp8") for h in (1, 16, 64, 100, 128)},
    **{f"page-{n}": {"page_size": n} for n in (1, 2, 53, 64, 576)},
    "one-index": {"topk": 1},
    "lengths": {"length": True, "s_q": 3},
    "extra": {**MODEL1, "extra": 512, "h_q": 64, "s_q": 2},
    "extra-lengths": {**MODEL1, "extra": 100, "extra_page_size": 2, "length": True, "extra_length": True, "sink": True},
    "v32-extra-splits": {"extra": 65, "num_splits": 5, "sink": True},
    "padded-pages": {"page_stride": 64 * 656 + 16},
    "no-pages": {"pages": 0},
}
SPARSE_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "pages-at-odd-strides": ({"page_stride": 64 * 656 + 8}, "kv_cache", str(64 * 656 + 8)),
    "q-unaligned": ({"aligned": (False, True)}, "q", "16 bytes"),
    "cache-unaligned": ({"aligned": (True, False)}, "q", "caches to start at multiples of 16 bytes"),
    "2**31-keys": ({"topk": 2**31 - 1}, "indices", "2\\*\\*31 keys"),
    "2**31-extra-keys": ({"extra": 2**31 - 4096}, "extra_indices", "2\\*\\*31 keys"),
    "many-keys-in-all": ({"topk": 2**31 - 4096, "batch": 65}, "indices", "keys in all"),
    "2**31-programs": ({"batch": 2**21, "h_q": 16, "num_splits": 2**10}, "num_splits", "2\\*\\*31 programs"),
}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setattr(hopper, "TURNED_OFF", False)


@pytest.mark.parametrize("call", SERVED.values(), ids=SERVED)
def test_served(call):
    problem = dense_problem(**call)
    assert hopper.refusals(problem, H200) == ()
    plan = hopper.plan_dense(problem, H200)
    assert plan.implementation == "hopper"
    assert plan.problem is problem


@pytest.mark.parametrize("call", SPARSE_SERVED.values(), ids=SPARSE_SERVED)
def test_sparse_calls_are_served(call):
    problem = sparse_problem(**call)
    assert hopper.refusals(problem, H200) == ()
    plan = hopper.plan_decode(problem, H200)
    attend = attend_launch(plan)
    assert (plan.implementation, attend.name) == ("hopper", "sparse_kernel")
    tiles = -(-problem.h_q // 64)
    items = problem.batch * problem.s_q
    programs = items * problem.num_splits if problem.num_splits else H200.multiprocessors // tiles
    assert attend.grid == (programs * tiles, 1, 1)
    assert scalars_of(attend)["items"] == items
    assert hopper.shared_memory(problem) <= H200.shared_memory
    slots = {name for name in ("table", "extra_table") if name in attend.input_arrays}
    assert slots == ({"table", "extra_table"} if problem.extra else {"table"})


@pytest.mark.parametrize(("call", "argument", "words"), SPARSE_REFUSED.values(), ids=SPARSE_REFUSED)
def test_sparse_calls_are_refused(call, argument, words):
    reasons = hopper.refusals(sparse_problem(**call), H200)
    assert [reason.argument for reason in reasons] == [argument]
    assert re.search(words, reasons[0].reason), reasons[0].reason


@pytest.mark.parametrize(("call", "facts", "argument", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call, facts, argument, words):
    problem = call() if callable(call) else dense_problem(**call)
    reasons = hopper.refusals(problem, facts)
    assert [reason.argument for reason in reasons] == [argument]
    assert re.search(words, reasons[0].reason), reasons[0].reason


def test_all_reasons_are_given_at_once():
    problem = dense_problem(page_size=53, h_kv=2, d_qk=320, head_dim_v=256, aligned=(False, True))
    found = [refusal.argument for refusal in hopper.refusals(problem, KNOWN_DEVICES["NVIDIA L40S"])]
    assert sorted(found) == ["kv_cache", "kv_cache", "q", "q", "q"]


@pytest.mark.parametrize(
    ("value", "reasons"), [("0", ["implementation: turned off by MLA_DECODE_HOPPER=0"]), ("1", []), ("", [])]
)
def test_the_switch(value, reasons):
    """It is read once: what a call was found to be served by is kept."""
    code = """
from mla_kernels.hopper import plan
from tests.hopper_calls import H200, dense_problem
print([str(reason) for reason in plan.refusals(dense_problem(), H200)])
"""
    environment = {**os.environ, "MLA_DECODE_HOPPER": value, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.strip() == str(reasons), done.stderr


def implementations() -> list[Any]:
    found = []
    if HAS_TORCH:
        from mla_torch import api

        found.append(pytest.param(api.IMPLEMENTATIONS, id="torch"))
    if importlib.util.find_spec("jax") is not None:
        from mla_jax import choice, jax_triton_compat

        why = f"Gluon kernels cannot be lowered here: {jax_triton_compat.reason() or 'jax-triton is older than 0.4'}"
        old = pytest.mark.skipif(not jax_triton_compat.gluon_supported(), reason=why)
        found.append(pytest.param(choice.IMPLEMENTATIONS, id="jax", marks=old))
    return found


@pytest.mark.parametrize("known", implementations())
def test_what_is_chosen_on_an_h200(known):
    """The front ends' own tests go through `explain`; here it is every call of this file."""
    calls = [(call, H200) for call in SERVED.values()] + [(call, facts) for call, facts, *_ in REFUSED.values()]
    chosen = set()
    for call, facts in calls:
        problem = call() if callable(call) else dense_problem(**call)
        reasons = {name: entry.refusals(problem, facts) for name, entry in known.items()}
        served = not hopper.refusals(problem, facts)
        portable = not portable_refusals(problem, facts)
        assert choose(tuple(known), reasons) == ("hopper" if served else "triton" if portable else "reference")
        chosen.add(choose(tuple(known), reasons))
    assert {"hopper", "triton"} <= chosen
    assert known["hopper"].automatic(H200) and not known["hopper"].automatic(None)


def problem_of(spec: ArgSpec) -> Problem:
    """With PyTorch's strides where it is installed; numpy's arrays are no views of q."""
    call = make_inputs(spec).to_torch() if HAS_TORCH else make_inputs(spec).as_call()
    arrays, options = {}, {}
    for name, x in call.items():
        if not hasattr(x, "shape"):
            options[name] = x
        elif HAS_TORCH:
            arrays[name] = TensorSpec(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.stride(), x.data_ptr() % 16 == 0)
        else:
            arrays[name] = TensorSpec(x.shape, x.dtype.name, tuple(stride // x.itemsize for stride in x.strides))
    return make_problem(**arrays, **options)


@pytest.mark.once
@pytest.mark.parametrize("spec", [*real_specs(), *small_specs()], ids=spec_id)
def test_shared_specs(spec):
    """The tests on a GPU choose by `served`, which needs no arrays."""
    if spec.views and not HAS_TORCH:
        pytest.skip("views need PyTorch, which is not installed")
    assert (hopper.refusals(problem_of(spec), H200) == ()) == served(spec)


def test_many_shared_specs_are_served():
    specs = [spec for spec in real_specs() if served(spec) and not spec.sparse]
    for name, values in HOPPER_FACTORS.items():
        if name not in ("addressing", "widths"):
            assert {getattr(spec, name) for spec in specs} >= set(values), name
    assert {spec.d_qk for spec in specs} == {512, 576}


def descriptors(plan: Any) -> dict[str, TileDescriptor]:
    return {x.array: x for x in attend_launch(plan).inputs if isinstance(x, TileDescriptor)}


@pytest.mark.parametrize("call", SERVED.values(), ids=SERVED)
def test_the_descriptors_describe_the_arrays(call):
    problem = dense_problem(**call)
    plan = hopper.plan_dense(problem, H200)
    found = descriptors(plan)
    assert set(found) == {"q", "kv_cache"}
    for tile in found.values():
        assert all(extent <= 256 for extent in tile.block_shape)  # what TMA takes
        assert 2 * tile.block_shape[1] == 128  # the swizzle
        assert tile.row_stride % 8 == 0 and tile.row_stride >= tile.shape[1]
        assert tile.shape[1] % tile.block_shape[1] == 0
        assert max(tile.shape) <= INT32_MAX
    rows = problem.s_q * problem.h_q
    q, k = found["q"], found["kv_cache"]
    assert q.shape == (problem.batch * rows, problem.d_qk)
    assert k.shape[1] == problem.d_qk
    cache, constants = problem.cache, attend_launch(plan).constexprs
    assert constants["PAGE_SIZE"] == cache.page_size
    # Where an element lies in memory, by the array's strides and by the descriptor.
    for request in (0, problem.batch - 1):
        for query in (0, problem.s_q - 1):
            for head in (0, problem.h_q - 1):
                at = sum(i * s for i, s in zip((request, query, head), problem.q_strides, strict=True))
                at -= 0 if problem.batch > 1 else request * problem.q_strides[0]
                assert ((request * problem.s_q + query) * problem.h_q + head) * q.row_stride == at
    for page in (0, cache.num_pages - 1):
        for slot in (0, cache.page_size - 1):
            row = page * constants["PAGE_ROWS"] + slot
            assert row < k.shape[0]
            assert row * k.row_stride == page * cache.page_stride + slot * cache.token_stride
    assert k.shape[0] == (cache.num_pages - 1) * constants["PAGE_ROWS"] + cache.page_size  # not a row behind the array
    # Boxes do not cross pages, and a tile is whole boxes.
    assert cache.page_size % k.block_shape[0] == 0
    assert constants["UNIT"] % k.block_shape[0] == 0


@pytest.mark.parametrize("facts", [H200, FEW_SMS], ids=lambda facts: facts.name)
@pytest.mark.parametrize("s_q", [1, 4])
@pytest.mark.parametrize("h_q", [16, 40, 128])
@pytest.mark.parametrize("batch", [1, 3, 132, 1000])
def test_grid_schedule_and_scratch(batch, h_q, s_q, facts):
    """All programs run at once, however many requests there are: those that wait for a turn could not be balanced."""
    problem = dense_problem(batch=batch, h_q=h_q, s_q=s_q, sink=True)
    plan = hopper.plan_dense(problem, facts)
    attend, combine = attend_launch(plan), plan.launches[-1]
    rows = s_q * h_q
    tiles = -(-rows // 64)
    programs = plan.details["programs"]
    assert attend.constexprs["ROW_TILES"] == tiles
    launched, rest = divmod(attend.grid[0], tiles)
    assert attend.grid[1:] == (1, 1) and rest == 0
    assert launched == max(facts.multiprocessors // tiles, 1)
    assert attend.grid[0] <= max(facts.multiprocessors, tiles)
    assert programs == launched
    assert (scalars_of(attend)["items"], scalars_of(attend)["programs"]) == (batch, programs)
    assert plan.buffers["schedule"].shape == (schedule_size(programs, 0, batch),)  # the list of split items alone
    assert plan.launches[0] is attend  # each program makes the schedule for itself
    slots = num_slots(programs, batch) if programs > 1 else 0
    assert slots <= programs + batch
    if slots:
        # The log-sum-exp and the scale of each half: 2 * 512 + 16 bytes a row in all.
        assert plan.buffers["partial_out"] == Buffer((slots * rows, 512), "float16")
        assert plan.buffers["partial_lse"] == Buffer((slots * rows, 2, 2), "float32")
        assert combine.name == "combine_kernel"
        assert combine.inputs[0] == attend.outputs[-1] == "schedule"
        assert combine.scalars[:2] == (0, batch)
    else:
        assert combine is attend


@pytest.mark.parametrize("num_splits", [1, 2, 7, 1000])
def test_fixed_splits(num_splits):
    problem = dense_problem(batch=5, s_q=2, num_splits=num_splits, page_size=32)
    plan = hopper.plan_dense(problem, H200)
    attend = attend_launch(plan)
    assert attend.grid == (5 * num_splits * 4, 1, 1)
    assert attend.constexprs["UNIT"] == 32  # pages
    assert scalars_of(attend)["num_splits"] == num_splits
    assert [launch.name for launch in plan.launches] == ["dense_kernel"] + ["combine_kernel"] * (num_splits > 1)
    assert plan.buffers["schedule"].shape == (1,)
    assert plan.buffers["partial_out"].shape == ((5 * num_splits * 256, 512) if num_splits > 1 else (1, 512))


@pytest.mark.parametrize("d_qk", [512, 576])
def test_shared_memory_fits_a_hopper(d_qk):
    assert hopper.shared_memory(dense_problem(d_qk=d_qk)) <= H200.shared_memory


def test_results_are_those_of_the_portable_plan():
    """Shapes and dtypes of the results, and the strides of the caller's `out`."""
    out = TensorSpec((4, 2, 16, 512), "bfloat16", (16384, 8192, 512, 1))
    problem = dense_problem(s_q=2, h_q=16, out=out)
    plan, portable = hopper.plan_dense(problem, H200), plan_decode(problem, H200)
    for name in ("out", "lse"):
        assert plan.buffers[name] == portable.buffers[name]
    for name in ("S_Q", "H_Q", "HAS_SINK", "OUT_STRIDE_B", "OUT_STRIDE_S", "OUT_STRIDE_H"):
        assert attend_launch(plan).constexprs[name] == attend_launch(portable).constexprs[name]


def test_overrides_are_checked():
    for name in hopper.Tuning.__dataclass_fields__:
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            hopper.plan_dense(dense_problem(), H200, {name: -1})
    with pytest.raises(ValueError, match="no_such_field unknown, known are fixed_cost, split_cost"):
        hopper.plan_dense(dense_problem(), H200, {"no_such_field": 1})


@pytest.mark.parametrize("plan", [plan_decode, hopper.plan_dense])
@pytest.mark.parametrize("h_q", [16, 128])
def test_with_num_splits_pieces_are_merged_alike_in_every_batch(plan, h_q):
    """In the same order of sums, so that a row's bits do not depend on the rest of the batch."""
    merges = [plan(dense_problem(batch=batch, h_q=h_q, num_splits=7), H200).launches[-1] for batch in (1, 3, 300)]
    assert all(merge.name == "combine_kernel" for merge in merges)
    assert all(merge.constexprs == merges[0].constexprs for merge in merges)
    assert all(merge.scalars[2:] == merges[0].scalars[2:] for merge in merges)


@pytest.mark.parametrize(
    "of_batch",
    [
        pytest.param(lambda batch: dense_problem(batch=batch, h_q=128), id="dense"),
        pytest.param(lambda batch: sparse_problem(batch=batch, length=True), id="sparse-lengths"),
        pytest.param(lambda batch: sparse_problem(batch=batch), id="sparse"),
        pytest.param(lambda batch: sparse_problem(batch=batch, cache_format="model1_fp8", h_q=64, extra=512), id="model1"),
    ],
)
@pytest.mark.parametrize("make", [plan_decode, hopper.plan_decode], ids=["portable", "hopper"])
def test_the_same_binaries_serve_every_batch(make, of_batch):
    plans = [make(of_batch(batch), H200) for batch in (1, 2, 32, 33, 66, 67, 128, 129, 132, 133, 300)]
    constants: dict[str, list] = {}
    for plan in plans:
        for launch in plan.launches:
            constants.setdefault(launch.name, []).append(launch.constexprs)
    assert len(constants) >= 2
    for found in constants.values():
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize("facts", [H200, replace(H200, capability=(8, 0))], ids=["9.0", "8.0"])
@pytest.mark.parametrize("batch", [1, 66, 67, 300])
def test_merging_overlaps_where_it_waits_and_a_call_is_short(batch, facts):
    """The portable kernels tell nobody that their end is near, so there the launch begins when they have ended."""
    hopper_too = (hopper.plan_dense,) if facts is H200 else ()
    for make in (plan_decode, *hopper_too):
        plan = make(dense_problem(batch=batch, h_q=128), facts)
        *others, merge = plan.launches
        assert not any(launch.overlaps for launch in others)
        assert merge.constexprs["OVERLAPS"] == (facts is H200)
        assert merge.overlaps <= merge.constexprs["OVERLAPS"]
        assert merge.overlaps == (facts is H200 and batch <= plan.details["programs"])
