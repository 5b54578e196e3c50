"""Cases that have broken other kernels and that show over several calls, or before any.

On a GPU: 17 in `test_an_interleaved_cache_of_half_the_card_is_not_copied`, 18 in `test_a_graph_stays_right_and_balanced`,
15 in `test_more_rows_than_a_grid_dimension_holds`, 22 in `test_nothing_is_compiled_twice`, 23 in `test_a_second_device`
(which has no counterpart without a second GPU).
"""

from dataclasses import replace

import numpy as np
import pytest

from mla_kernels.device import KNOWN_DEVICES
from mla_kernels.plan import plan_decode
from mla_kernels.problem import TensorSpec, make_problem
from mla_kernels.schedule import WORK_FIELDS
from tests.arg_specs import ArgSpec, spec_id
from tests.inputs import Inputs, make_inputs
from tests.judge import to_numpy
from tests.kernel_runs import HAS_JAX, HAS_TORCH, INTERPRET, assert_judged, poisoned_memory

pytestmark = INTERPRET

FIELDS = WORK_FIELDS.value
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="JAX is not installed")

if HAS_TORCH:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import mla_torch
    from mla_torch import api, launcher
if HAS_JAX:
    import jax

    import mla_jax

    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
    )

SMALL = {"d_qk": 80, "d_v": 64, "h_q": 4, "page_size": 16}


# 15


@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=lambda device: device.name)
@pytest.mark.parametrize(("batch", "s_q"), [(70_000, 1), (3, 30_000), (2**21, 1)])
@pytest.mark.parametrize("num_splits", [None, 4])
@pytest.mark.parametrize("sparse", [False, True])
def test_case_15_no_grid_dimension_but_the_first_grows(device, batch, s_q, num_splits, sparse):
    q = TensorSpec((batch, s_q, 16, 576), "bfloat16")
    cache = TensorSpec((10, 64, 1, 576), "bfloat16")
    if sparse:
        scope = {"indices": TensorSpec((batch, s_q, 64), "int32")}
    else:
        scope = {"block_table": TensorSpec((batch, 8), "int32"), "cache_seqlens": TensorSpec((batch,), "int32")}
    plan = plan_decode(make_problem(q, cache, **scope, num_splits=num_splits), device)
    for step in plan.launches:
        assert step.grid[1:] == (1, 1)
        assert 0 < step.grid[0] < 2**31


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=needs_torch), pytest.param("jax", marks=needs_jax)])
def test_case_15_the_reference_writes_every_row_of_70000(framework):
    batch = 70_000
    spec = ArgSpec(batch=7, h_q=1, d_qk=16, d_v=8, page_size=2, length=3)
    few = make_inputs(spec)
    lengths = np.array([3, 0, 1, 2, 3, 0, 2], np.int32)
    few = replace(few, main=replace(few.main, lengths=lengths))
    rows = np.arange(batch) % 7
    scope = replace(few.main, table=few.main.table[rows], lengths=lengths[rows])
    many = replace(few, q=few.q[rows], main=scope, spec=replace(spec, batch=batch))
    if framework == "torch":
        out, lse = map(to_numpy, mla_torch.decode(**many.to_torch(), implementation="reference"))
    else:
        out, lse = map(np.asarray, mla_jax.decode(**many.to_jax(), implementation="reference"))
    assert_judged((out[:7], lse[:7]), few)
    np.testing.assert_allclose(out.astype(np.float32), out[rows].astype(np.float32), rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(lse, lse[rows], rtol=1e-5)


# 17


LAYOUTS = [
    ArgSpec(format=f, d_qk=576 if f == "v32_fp8" else 512, h_q=2, length=40, page_size=16, topk=topk, layout=layout)
    for f in ("bf16", "fp16", "v32_fp8", "model1_fp8")
    for layout in ("contiguous", "interleaved")
    for topk in (0, 20)
]


@needs_torch
@pytest.mark.parametrize("spec", LAYOUTS, ids=spec_id)
def test_case_17_no_operation_copies_the_cache(spec):
    class Sizes(TorchDispatchMode):
        """The largest tensor that an operation gave and that is not a view of what was there before."""

        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr():
                self.largest = max(self.largest, result.untyped_storage().nbytes())
            return result

    inputs = make_inputs(spec)
    call = inputs.to_torch()
    # As if most of the cache were pages that nobody uses.
    small = call["kv_cache"]
    flat = small.new_zeros(500 * small.stride(0) + small.storage_offset())
    cache = flat.as_strided((500, *small.shape[1:]), small.stride(), small.storage_offset())
    cache[: len(small)].view(torch.uint8).copy_(small.view(torch.uint8))
    with Sizes() as sizes:
        out, lse = mla_torch.decode(**call | {"kv_cache": cache}, implementation="triton")
    assert 0 < sizes.largest < 100_000
    assert flat.untyped_storage().nbytes() > 4_000_000
    assert_judged((to_numpy(out), to_numpy(lse)), inputs)


# 18


def loads(schedule: np.ndarray, batch: int, programs: int, lengths: np.ndarray) -> list[int]:
    """Blocks of 64 keys of each program, from the schedule of a dense call."""
    units = np.maximum(-(-np.maximum(lengths, 0) // 64), 1)
    work = schedule[: FIELDS * max(batch, programs)].reshape(-1, FIELDS).tolist()
    result = []
    for first, last, lo, end, *_ in work:
        items = range(first, last + 1)
        ends = [min(end, int(units[i])) if i == last else int(units[i]) for i in items]
        starts = [lo if i == first else 0 for i in items]
        result.append(sum(ends) - sum(starts))
    return result


def steps_of_a_server(batch: int, longest: int) -> tuple[Inputs, list[Inputs]]:
    """A batch with room for `longest` tokens each, and states of it: all short, one long, fewer requests, other pages."""
    spec = ArgSpec(batch=batch, length=longest, **SMALL)
    base = make_inputs(spec)
    pages = base.main.table[:, : longest // spec.page_size]
    rng = np.random.default_rng(0)
    states = []
    for lengths in (
        np.full(batch, 9),
        np.where(np.arange(batch) == 1, longest, 9),
        np.where(np.arange(batch) < batch // 2, 200, 0),
        np.full(batch, 0),
        rng.integers(0, longest + 1, batch),
    ):
        table = base.main.table.copy()
        table[:, : pages.shape[1]] = rng.permuted(pages, axis=1)
        scope = replace(base.main, table=table, lengths=lengths.astype(np.int32))
        states.append(replace(base, main=scope))
    return base, states


def assert_balanced(schedule: np.ndarray, state: Inputs) -> None:
    lengths = state.main.lengths
    found = loads(schedule, len(lengths), 6, lengths)
    total = sum(np.maximum(-(-lengths // 64), 1))
    assert sum(found) == total
    # Both costs of a plan, in blocks: what a piece costs, and what splitting may cost before it is worth it.
    assert max(found) <= -(-total // 6) + 2 * len(lengths) + 5


@needs_torch
def test_case_18_tensors_that_change_in_place_between_calls_torch():
    base, states = steps_of_a_server(5, 2048)
    call = base.to_torch()
    prepared = None
    for state in states:
        for name in ("block_table", "cache_seqlens"):
            call[name].copy_(state.to_torch()[name])
        with poisoned_memory() as memory:
            results = mla_torch.decode(**call, implementation="triton")
        assert_judged(tuple(map(to_numpy, results)), state)
        program = launcher.Program(mla_torch.explain(**call, implementation="triton").plan)
        start, buffer = program.scratch["schedule"]
        (scratch,) = [made for made in memory.buffers if made.shape == (program.scratch_size,)]
        assert_balanced(scratch.view(np.int32)[start : start + buffer.shape[0]], state)
        prepared = prepared or api._prepare_cached.cache_info().misses
        assert api._prepare_cached.cache_info().misses == prepared


@needs_jax
def test_case_18_a_jitted_function_for_every_state_jax():
    base, states = steps_of_a_server(5, 2048)
    options = {name: x for name, x in base.to_jax().items() if not isinstance(x, jax.Array)}

    @jax.jit
    def step(arrays):
        return mla_jax.decode(**arrays, **options, implementation="triton")

    compiled = None
    for state in states:
        arrays = {name: x for name, x in state.to_jax().items() if isinstance(x, jax.Array)}
        with poisoned_memory() as memory:
            results = jax.block_until_ready(step(arrays))
        assert_judged(tuple(map(np.asarray, results)), state)
        (schedule,) = [buffer for buffer in memory.buffers if buffer.dtype == np.int32]
        assert_balanced(schedule, state)
        compiled = compiled or len(compilations)
        assert len(compilations) == compiled


# 21


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("batch", "s_q"), [(0, 1), (0, 0), (3, 0)])
@pytest.mark.parametrize("framework", [pytest.param("torch", marks=needs_torch), pytest.param("jax", marks=needs_jax)])
def test_case_21_empty_batches(framework, batch, s_q, sparse):
    inputs = make_inputs(ArgSpec(batch=3, length=20, topk=10 if sparse else 0, topk_length=sparse, **SMALL))
    table = inputs.main.table[:batch, :s_q] if sparse else inputs.main.table[:batch]
    empty = replace(
        inputs, q=inputs.q[:batch, :s_q], main=replace(inputs.main, table=table, lengths=inputs.main.lengths[:batch])
    )
    for implementation in (None, "triton", "reference"):
        if framework == "torch":
            out, lse = map(to_numpy, mla_torch.decode(**empty.to_torch(), implementation=implementation))
        else:
            out, lse = map(np.asarray, mla_jax.decode(**empty.to_jax(), implementation=implementation))
        assert (out.shape, lse.shape) == ((batch, s_q, 4, 64), (batch, 4, s_q))


# 22


SCALES = [0.1, 0.2, -0.3, 0.0, 1e-3]


@needs_torch
def test_case_22_a_new_softmax_scale_prepares_nothing_torch():
    inputs = make_inputs(ArgSpec(batch=2, length=70, lengths="ragged", **SMALL))
    call = inputs.to_torch()
    prepared = None
    for scale in SCALES:
        for given in (scale, torch.tensor(scale), torch.tensor([scale], dtype=torch.float64)):
            results = mla_torch.decode(**call, softmax_scale=given, implementation="triton")
            assert_judged(tuple(map(to_numpy, results)), inputs, softmax_scale=scale)
            prepared = prepared or api._prepare_cached.cache_info().misses
    assert api._prepare_cached.cache_info().misses == prepared


@needs_jax
@pytest.mark.parametrize("jitted", [False, True])
def test_case_22_a_new_softmax_scale_compiles_nothing_jax(jitted):
    inputs = make_inputs(ArgSpec(batch=2, length=70, lengths="ragged", **SMALL))
    call = inputs.to_jax()
    arrays = {name: x for name, x in call.items() if isinstance(x, jax.Array)}
    options = {name: x for name, x in call.items() if name not in arrays}

    def step(arrays, scale):
        return mla_jax.decode(**arrays, **options, softmax_scale=scale, implementation="triton")

    step = jax.jit(step) if jitted else step
    compiled = None
    for scale in SCALES:
        results = jax.block_until_ready(step(arrays, scale))
        assert_judged(tuple(map(np.asarray, results)), inputs, softmax_scale=scale)
        compiled = compiled or len(compilations)
    assert len(compilations) == compiled
