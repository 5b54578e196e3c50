"""Cases that have broken other kernels: addresses and counts beyond 32 bits, interpreted on files that are mostly holes.

What needs that much memory for real is in tests/test_gpu_system.py: `test_a_cache_beyond_4_gib`,
`test_scratch_beyond_2_31_elements` and `test_more_rows_than_a_grid_dimension_holds`.
"""

import tempfile
from dataclasses import replace

import numpy as np
import pytest

# PyTorch tensors would be copied onto themselves by the interpreter, holes included; JAX's numpy adapter copies nothing.
pytest.importorskip("jax")

from mla_kernels.attend import attend_kernel
from mla_kernels.combine import combine_kernel
from mla_kernels.device import INTERPRETER
from mla_kernels.plan import refusals
from mla_kernels.schedule import WORK_FIELDS
from tests.arg_specs import ArgSpec, spec_id
from tests.inputs import make_inputs
from tests.judge import assert_close, judge
from tests.kernel_runs import INTERPRET, Memory, arrays_of, launch, move_pages, plan_of

pytestmark = INTERPRET

FIELDS = WORK_FIELDS.value
LARGE = 2**32 + 2**30  # bytes of a cache: its offsets pass 2**31 elements and 2**32 bytes


def holes(shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Zeros that take no memory until they are written, in a file that is gone with the array."""
    dtype = np.dtype(dtype)
    with tempfile.TemporaryFile() as file:
        file.truncate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return np.memmap(file, dtype, "r+", shape=shape)


def run(plan, arrays, made=None):
    """All launches of a plan in poisoned memory; `made` holds buffers, and the schedule in place of its launch."""
    memory = Memory()
    made = made or {}
    live = arrays | {name: memory.array(b.shape, b.dtype) for name, b in plan.buffers.items() if name not in made} | made
    for step in plan.launches:
        if "schedule" not in made or step.kernel in (attend_kernel, combine_kernel):
            launch(step, live)
    memory.assert_guards_hold()
    return live["out"], live["lse"]


def in_16_bits(out, spec):
    return out.astype("float16" if spec.format == "fp16" else "bfloat16")


def attend_of(plan):
    return next(step for step in plan.launches if step.kernel is attend_kernel)


def by_hand(plan, programs, splits=()):
    """A schedule: six numbers for each program, and (item, first slot, number of pieces) of split items."""
    entries = attend_of(plan).grid[0] // plan.details["tiles_per_item"]
    schedule = np.zeros(plan.buffers["schedule"].shape, np.int32)
    work = schedule[: FIELDS * entries].reshape(entries, FIELDS)
    work[:, 1] = -1
    for program, numbers in enumerate(programs):
        work[program] = numbers
    schedule[FIELDS * entries] = len(splits)
    for i, split in enumerate(splits):
        schedule[FIELDS * entries + 1 + 3 * i :][:3] = split
    return schedule


CACHES = [
    ArgSpec(format=f, d_qk=512 if f == "model1_fp8" else 576, batch=2, h_q=3, length=100, page_size=p, topk=topk, layout=layout)
    for f, p, layout in (
        ("bf16", 480, "contiguous"),
        ("fp16", 16, "skewed"),
        ("v32_fp8", 64, "padded"),
        ("model1_fp8", 64, "contiguous"),
    )
    for topk in (0, 40)
] + [ArgSpec(format="model1_fp8", d_qk=512, batch=1, h_q=3, length=100, topk=40, extra=(2, 70, True), page_size=256)]


@pytest.mark.parametrize("spec", CACHES, ids=spec_id)
def test_case_01_a_cache_beyond_4_gib(spec):
    inputs = make_inputs(spec)
    small = run(plan_of(inputs), arrays_of(inputs))

    def spread(scope):
        stride = scope.cache.page_stride
        # All the way to the last page, which wraps to the front in 32 bits, where only zeros are.
        place = np.linspace(LARGE // stride // 3, LARGE // stride - 1, scope.cache.num_pages).astype(np.int64)[::-1]
        return move_pages(scope, place, holes((LARGE // stride, stride), np.uint8))

    large = replace(inputs, main=spread(inputs.main), extra=None if inputs.extra is None else spread(inputs.extra))
    assert int(large.main.table.max()) * (1 if spec.sparse else spec.page_size) > large.main.cache.num_pages // 4
    out, lse = run(plan_of(large), arrays_of(large))
    np.testing.assert_array_equal(out, small[0])
    np.testing.assert_array_equal(lse, small[1])
    assert_close(in_16_bits(out, spec), lse, judge(inputs.as_call()), power_of_two_scales=spec.scales == "pow2")


def test_case_01_scratch_beyond_2_31_elements():
    spec = ArgSpec(batch=1, h_q=128, length=200, sink="finite")
    inputs = make_inputs(spec)
    plan = plan_of(inputs)
    slot = 2**31 // (spec.h_q * spec.d_v) + 7
    schedule = by_hand(plan, [(0, 0, 0, 1, slot, -1), (0, 0, 1, 3, slot + 1, -1), (0, 0, 3, 4, slot + 2, -1)], [(0, slot, 3)])
    made = {
        "schedule": schedule,
        "partial_out": holes(((slot + 3) * spec.h_q, spec.d_v), np.float32),
        "partial_lse": holes(((slot + 3) * spec.h_q,), np.float32),
    }
    out, lse = run(plan, arrays_of(inputs), made)
    assert_close(in_16_bits(out, spec), lse, judge(inputs.as_call()))
    for name in ("partial_out", "partial_lse"):  # and nothing was written where 32 bits would lead
        assert not made[name][: 4 * spec.h_q].any()
        assert made[name][slot * spec.h_q :].all()


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("topk", [0, 70])
def test_case_15_the_last_of_70000_requests_of_128_heads(s_q, topk):
    """q and out beyond 2**31 elements."""
    spec = ArgSpec(batch=1, s_q=s_q, h_q=128, length=90, topk=topk, topk_length=topk > 0, causal=topk == 0 and s_q > 1)
    inputs = make_inputs(spec)
    batch = 70_000

    def many(array):
        last = holes((batch, *array.shape[1:]), array.dtype)
        last[-1] = array[0]
        return last

    scope = replace(inputs.main, table=many(inputs.main.table), lengths=many(inputs.main.lengths))
    large = replace(inputs, q=many(inputs.q), main=scope)
    plan = plan_of(large)
    assert all(step.grid[1:] == (1, 1) for step in plan.launches)
    item = batch * (s_q if topk else 1) - 1
    first = item - (s_q - 1 if topk else 0)
    made = {
        "schedule": by_hand(plan, [(first, item, 0, 2**30, -1, -1)]),
        "out": holes(plan.buffers["out"].shape, np.float32),
        "lse": holes(plan.buffers["lse"].shape, np.float32),
    }
    memory = Memory()
    scratch = {name: memory.array(plan.buffers[name].shape, "float32") for name in ("partial_out", "partial_lse")}
    launch(attend_of(plan), arrays_of(large) | scratch | made, grid=(plan.details["tiles_per_item"], 1, 1))
    memory.assert_guards_hold()
    assert_close(in_16_bits(made["out"][-1:], spec), made["lse"][-1:], judge(inputs.as_call()))
    assert not made["out"][:8].any()


def large_table(pages):
    """A call of one request with a table of so many pages of 64 tokens, all the same page, and every token of them."""
    spec = ArgSpec(batch=1, h_q=2, d_qk=80, d_v=64, length=64)
    inputs = make_inputs(spec)
    page = int(inputs.main.table[0, 0])
    table = np.full((1, pages), page, np.int32)
    huge = replace(inputs, main=replace(inputs.main, table=table, lengths=np.array([2**31 - 1], np.int32)))
    return inputs, huge, page


def test_a_table_beyond_the_end_of_int32_is_refused():
    _, huge, _ = large_table(2**25 - 1)
    assert [refusal.argument for refusal in refusals(plan_of(huge).problem, INTERPRETER)] == ["block_table"]


def test_lengths_near_the_end_of_int32():
    """The last blocks of such a request alone."""
    inputs, huge, page = large_table(2**25 - 64)
    spec = inputs.spec
    plan = plan_of(huge)
    assert not refusals(plan.problem, INTERPRETER)
    unit = plan.details["block_n"]
    tokens = plan.problem.max_tokens
    units = -(-tokens // unit)
    made = {"schedule": by_hand(plan, [(0, 0, units - 2, units, -1, -1)])}
    out, lse = run(plan, arrays_of(huge), made)
    seen = tokens - (units - 2) * unit
    few = replace(inputs, main=replace(inputs.main, table=np.full((1, 2), page, np.int32), lengths=np.array([seen], np.int32)))
    assert_close(in_16_bits(out, spec), lse, judge(few.as_call()))
    del made["schedule"]
    memory = Memory()
    schedule = memory.array(plan.buffers["schedule"].shape, "int32")
    launch(plan.launches[0], arrays_of(huge) | {"schedule": schedule})
    work = schedule[: FIELDS * (len(schedule) // FIELDS)].reshape(-1, FIELDS)
    ends = [int(row[3]) for row in work if row[0] <= row[1]]
    assert max(ends) == units
