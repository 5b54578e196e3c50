"""The shared specs cover what they claim, and their inputs are what they claim."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest

from mla_kernels.problem import TensorSpec, make_problem
from tests import arg_specs
from tests.arg_specs import HOPPER_FACTORS, REAL_FACTORS, SMALL_FACTORS, ArgSpec, allowed, real_specs, small_specs, spec_id
from tests.inputs import Inputs, PagedCache, make_inputs
from tests.pairwise import all_pairs, cover, pairs_of

# The part of the matrix that is asked for by number.
HEADS = {1, 3, 8, 16, 20, 63, 64, 96, 126, 128}
PAGE_SIZES = {1, 2, 16, 53, 61, 64, 69, 128, 256, 576}
QUERIES = {1, 2, 3, 5, 7}
LENGTHS = {0, 1, 20, 64, 65, 140}

SMALL = small_specs()
REAL = real_specs()


def as_row(spec: ArgSpec, factors) -> dict:
    row = {name: getattr(spec, name) for name in factors if name != "widths"}
    row["widths"] = (spec.d_qk, spec.d_v, spec.h_kv)
    return row


@pytest.mark.parametrize(("specs", "factors"), [(SMALL, SMALL_FACTORS), (REAL, REAL_FACTORS)], ids=["small", "real"])
def test_every_pair_that_can_be_is_covered(specs, factors):
    shown = set()
    for spec in specs:
        shown |= pairs_of(as_row(spec, factors), factors)
    missing = {pair for pair in all_pairs(factors) if pair not in shown}
    contradictions = {(a, x, b, y) for a, x, b, y in all_pairs(factors) if not allowed({a: x, b: y})}
    assert missing == contradictions
    # What contradicts is a small part, and none of it lies between the sizes that no rule ties together.
    assert len(contradictions) < 0.06 * len(all_pairs(factors))
    free = {"addressing", "h_q", "page_size", "s_q", "length", "num_splits", "sink", "layout", "std", "lengths", "views"}
    assert not {pair for pair in contradictions if pair[0] in free and pair[2] in free}


def test_every_pair_of_what_the_hopper_path_serves_is_covered():
    rows = [as_row(spec, HOPPER_FACTORS) for spec in REAL if not spec.views and not spec.sparse]
    shown = set().union(*(pairs_of(row, HOPPER_FACTORS) for row in rows))
    assert set(all_pairs(HOPPER_FACTORS)) <= shown


def test_the_matrix_holds_the_sizes_asked_for():
    for factors in (SMALL_FACTORS, REAL_FACTORS):
        assert set(factors["h_q"]) >= HEADS
        assert set(factors["page_size"]) >= PAGE_SIZES
        assert set(factors["s_q"]) >= QUERIES
        assert set(factors["length"]) >= LENGTHS
        assert set(factors["num_splits"]) == {None, 1, 2, 5}
    assert max(REAL_FACTORS["length"]) > 4000
    widths = {(spec.d_qk, spec.d_v) for spec in (*SMALL, *REAL)}
    assert widths >= {(576, 512), (512, 512), (320, 256), (288, 256), (192, 128)}
    assert {spec.h_kv for spec in SMALL} == {1, 2, 4}


def test_ids_are_unique_stable_and_say_the_spec():
    assert len({spec.id for spec in SMALL}) == len(SMALL)
    assert len({spec.id for spec in REAL}) == len(REAL)
    # Two specs that differ in anything have different ids.
    for specs in (SMALL, REAL):
        assert len(set(specs)) == len(specs)
    assert ArgSpec(format="v32_fp8", batch=2, s_q=1, h_q=128, length=4096).id == "b2-q1-s4096-h128-v32_fp8-p64-dense"
    arg_specs.small_cover.cache_clear()
    small_specs.cache_clear()
    assert small_specs() == SMALL


def test_small_specs_stay_small():
    rows = [{**as_row(spec, SMALL_FACTORS), "addressing": spec.addressing} for spec in SMALL]
    tiles = [
        arg_specs.small_cost(row) // arg_specs._least_batch(row) * spec.batch for row, spec in zip(rows, SMALL, strict=True)
    ]
    assert max(tiles) <= 70
    assert sum(tiles) < 2400
    assert len(SMALL) < 200
    assert len(REAL) < 220


def test_production_rows_are_among_the_real_specs():
    assert len(arg_specs.production_specs()) >= 15
    assert set(arg_specs.production_specs()) <= set(REAL)


def test_cover_backtracks_out_of_dead_ends():
    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    # c must equal a; b = 1 goes with c = 1 only, which a choice of b alone cannot see
    rows, impossible = cover(
        factors,
        lambda row: row.get("a", 0) == row.get("c", row.get("a", 0)) and not (row.get("b") == 1 and row.get("c") == 0),
        lambda row: 0,
    )
    shown = set().union(*(pairs_of(row, factors) for row in rows))
    assert set(impossible) == {("a", 0, "b", 1), ("a", 0, "c", 1), ("a", 1, "c", 0), ("b", 1, "c", 0)}
    assert shown == set(all_pairs(factors)) - set(impossible)


def tensor_spec(x: np.ndarray) -> TensorSpec:
    return TensorSpec(x.shape, x.dtype.name, tuple(s // x.itemsize for s in x.strides))


def problem_of(inputs: Inputs):
    call = {name: tensor_spec(x) if isinstance(x, np.ndarray) else x for name, x in inputs.as_call().items()}
    return make_problem(**call)


@pytest.mark.parametrize("spec", [*SMALL, *REAL[::5]], ids=spec_id)
def test_inputs_are_a_valid_call(spec):
    inputs = make_inputs(spec)
    problem = problem_of(inputs)
    assert problem.cache.format.name == spec.format
    assert (problem.batch, problem.s_q, problem.h_q, problem.h_kv) == (spec.batch, spec.s_q, spec.h_q, spec.h_kv)
    assert (problem.d_qk, problem.d_v) == (spec.d_qk, spec.d_v)
    assert problem.cache.page_size == spec.page_size
    assert problem.sparse == spec.sparse
    assert problem.causal == (spec.causal and spec.s_q > 1)
    assert (problem.extra is not None) == (spec.extra is not None)
    assert problem.has_sink == (spec.sink != "none")
    again = make_inputs(spec)
    assert again.main.cache.buffer.tobytes() == inputs.main.cache.buffer.tobytes()
    assert again.q.tobytes() == inputs.q.tobytes()


def attended_slots(inputs: Inputs, scope) -> set[int]:
    """Flat slots that some query attends, worked out one by one."""
    slots = set()
    num_slots = scope.cache.num_pages * scope.cache.page_size
    for i in range(inputs.spec.batch):
        if inputs.spec.sparse:
            limit = scope.table.shape[2] if scope.lengths is None else int(scope.lengths[i])
            for j in range(inputs.spec.s_q):
                slots |= {int(t) for t in scope.table[i, j, : max(limit, 0)] if 0 <= t < num_slots}
        else:
            size = scope.cache.page_size
            tokens = min(max(int(scope.lengths[i]), 0), scope.table.shape[1] * size)
            slots |= {int(scope.table[i, t // size]) * size + t % size for t in range(tokens)}
    return slots


def row_values(cache: PagedCache, slot: int) -> np.ndarray:
    """All numbers of one token, fp32, as the definition of the format says."""
    page, offset = divmod(slot, cache.page_size)
    if cache.format in ("bf16", "fp16"):
        return cache.array()[page, offset].astype(np.float32).reshape(-1)
    raw = cache.pages()[page]
    if cache.format == "v32_fp8":
        token = raw[offset * 656 : (offset + 1) * 656].copy()
        scales = token[512:528].view(np.float32).repeat(128)
        codes, rope = token[:512], token[528:]
    else:
        token = raw[offset * 576 : (offset + 1) * 576].copy()
        exponents = raw[cache.page_size * 576 + offset * 8 :][:7]
        scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(64)
        codes, rope = token[:448], token[448:]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    return np.concatenate([values, rope.view(ml_dtypes.bfloat16).astype(np.float32)])


@pytest.mark.parametrize("spec", [spec for spec in SMALL if spec.batch * spec.length < 1000][::2], ids=spec_id)
def test_attended_rows_are_numbers_and_all_others_are_poison(spec):
    inputs = make_inputs(spec, seed=3)
    for scope in (inputs.main, inputs.extra):
        if scope is None:
            continue
        attended = attended_slots(inputs, scope)
        cache = scope.cache
        for slot in range(min(cache.num_pages * cache.page_size, 700)):
            values = row_values(cache, slot)
            if slot in attended:
                assert np.isfinite(values).all()
                assert np.abs(values).max() < 16
            else:
                assert np.isnan(values).all()
        # Poison and nothing else lies between the pages and behind the rows.
        written = len(attended) * cache.token_bytes
        assert (cache.buffer != 0xFF).sum() <= written


def test_scales_come_in_both_kinds_and_tiles_of_zeros():
    base = ArgSpec(format="v32_fp8", batch=1, length=512, h_q=1)
    for kind in ("pow2", "arbitrary"):
        inputs = make_inputs(ArgSpec(**{**base.__dict__, "scales": kind}))
        rows = inputs.main.cache.array().reshape(-1, 656)
        rows = rows[~(rows == 0xFF).all(1)]
        assert len(rows) == 512
        scales = np.ascontiguousarray(rows[:, 512:528]).view(np.float32)
        codes = rows[:, :512].reshape(-1, 4, 128)
        empty = (codes & 0x7F == 0).all(-1)
        assert empty.any()
        if kind == "arbitrary":
            assert (scales[empty] == 0).all()
            assert (np.frexp(scales[~empty])[0] != 0.5).any()
        else:
            assert (np.frexp(scales)[0] == 0.5).all()


def test_lengths_and_indices_hold_what_their_kinds_say():
    wild = make_inputs(ArgSpec(batch=3, length=100, lengths="wild"))
    assert wild.main.lengths[0] > wild.main.table.shape[1] * 64
    assert wild.main.lengths[1] < 0
    zeros = make_inputs(ArgSpec(batch=4, length=100, lengths="zeros"))
    assert zeros.main.lengths.tolist() == [100, 0, 100, 0]
    assert {-1, 2147480000} <= set(zeros.main.table[1].tolist()) | set(zeros.main.table[3].tolist())

    sparse = {"format": "v32_fp8", "batch": 2, "s_q": 2, "length": 300, "topk": 130}
    first64 = make_inputs(ArgSpec(**sparse, index_kind="first64")).main.table
    assert (first64[..., :64] == -1).all()
    assert (first64[..., 64:] >= 0).all()
    outside = make_inputs(ArgSpec(**sparse, index_kind="out_of_range"))
    num_slots = outside.main.cache.num_pages * 64
    assert (outside.main.table >= num_slots).any()
    assert (outside.main.table == -(2**31)).any()
    empty = make_inputs(ArgSpec(**sparse, index_kind="empty_rows")).main.table
    assert (empty[:, 0] == -1).all()
    assert ((empty[:, 1] >= 0).sum(-1) == 1).all()
    short = make_inputs(ArgSpec(**{**sparse, "length": 20})).main.table
    assert ((short >= 0).sum(-1) == 20).all()
    plain = make_inputs(ArgSpec(**sparse)).main.table
    assert all(len(set(row.tolist())) == 130 for row in plain.reshape(-1, 130))


def test_sinks_are_infinite_when_asked():
    sink = make_inputs(ArgSpec(h_q=16, sink="infinite")).attn_sink
    assert np.isposinf(sink).any()
    assert np.isneginf(sink).any()
    assert np.isfinite(make_inputs(ArgSpec(h_q=16, sink="finite")).attn_sink).all()
    assert make_inputs(ArgSpec()).attn_sink is None


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
@pytest.mark.parametrize("spec", SMALL[::3], ids=spec_id)
def test_torch_tensors_hold_the_same_bytes_with_the_same_strides(spec):
    import torch

    inputs = make_inputs(spec)
    call, plain = inputs.to_torch(), inputs.as_call()
    assert call.keys() == plain.keys()
    for name, x in plain.items():
        if not isinstance(x, np.ndarray):
            assert call[name] == x
            continue
        tensor = call[name]
        assert tuple(tensor.shape) == x.shape
        if "cache" in name and name != "cache_seqlens":
            assert tensor.stride() == tuple(s // x.itemsize for s in x.strides)
        elif spec.views and name != "cache_seqlens" and x.ndim > 1 and x.shape[0] > 1:
            assert not tensor.is_contiguous()
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
        same = tensor.view(width).numpy() == x.view(f"u{x.itemsize}").astype(f"i{x.itemsize}" if x.itemsize > 1 else "u1")
        assert same.all()


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="no jax")
@pytest.mark.parametrize("spec", SMALL[::5], ids=spec_id)
def test_jax_arrays_hold_the_same_bytes(spec):
    inputs = make_inputs(spec)
    call, plain = inputs.to_jax(), inputs.as_call()
    for name, x in plain.items():
        if not isinstance(x, np.ndarray):
            assert call[name] == x
        elif spec.format == "model1_fp8" and name in ("kv_cache", "extra_kv_cache"):
            pages = np.asarray(call[name])
            assert pages.dtype == np.uint8
            assert pages[:, : x.shape[1] * 584].tobytes() == np.ascontiguousarray(x).tobytes()
        else:
            assert np.asarray(call[name]).tobytes() == np.ascontiguousarray(x).tobytes()
    if spec.format == "model1_fp8":
        sizes = spec.page_size if spec.extra is None else (spec.page_size, spec.extra[0])
        assert call["page_size"] == sizes
