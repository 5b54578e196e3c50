"""Merging partial results: the combine kernel, interpreted as the plan launches it, against its definition in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from mla_kernels.combine import SHAPES, combine_kernel, shape_for
from mla_kernels.device import INTERPRETER, KNOWN_DEVICES
from mla_kernels.plan import plan_decode
from mla_kernels.problem import TensorSpec, make_problem
from tests.kernel_runs import INTERPRET, Memory, launch

pytestmark = INTERPRET

UNTOUCHED = 12345.0
TOLERANCE = 2e-6  # relative; fp32 sums of up to 100 pieces


@dataclass
class Merge:
    """A call's rows, and the pieces of its split items: item -> list of (out [rows, d_v], lse [rows])."""

    s_q: int
    h_q: int
    h_kv: int
    d_v: int
    sparse: bool
    items: int
    pieces: dict
    sink: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Packed rows of an item: key-value heads, then queries (dense), then the heads of a group."""
        return self.h_q * (1 if self.sparse else self.s_q)

    def compacted(self) -> Merge:
        """The same with outputs as fp16 holds them."""
        pieces = {item: [(dequantised(*quantised(out)), lse) for out, lse in of_item] for item, of_item in self.pieces.items()}
        return replace(self, pieces=pieces)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """fp64 out [b, s_q, h_q, d_v] and lse [b, h_q, s_q]; what is not split stays as it is."""
        batch = self.items // self.s_q if self.sparse else self.items
        out = np.full((batch, self.s_q, self.h_q, self.d_v), UNTOUCHED)
        lse = np.full((batch, self.h_q, self.s_q), UNTOUCHED)
        group = self.h_q // self.h_kv
        for item, pieces in self.pieces.items():
            for row in range(self.rows):
                if self.sparse:
                    at = (item // self.s_q, item % self.s_q, row)
                else:
                    kv_head, rest = divmod(row, group * self.s_q)
                    at = (item, rest // group, kv_head * group + rest % group)
                total, value = 0.0, np.zeros(self.d_v)
                weights = np.array([piece_lse[row] for _, piece_lse in pieces], np.float64)
                top = weights[weights > -np.inf].max(initial=-np.inf)
                if np.isnan(weights).any():
                    top = np.nan
                if top == -np.inf:
                    out[at], lse[at[0], at[2], at[1]] = 0.0, np.inf
                    continue
                for (piece_out, _), weight in zip(pieces, weights, strict=True):
                    if weight != -np.inf:
                        total += np.exp(weight - top)
                        value = value + np.exp(weight - top) * piece_out[row].astype(np.float64)
                merged = top + np.log(total)
                value = value / total
                if self.sink is not None:
                    with np.errstate(over="ignore"):
                        value = value / (1 + np.exp(float(self.sink[at[2]]) - merged))
                out[at], lse[at[0], at[2], at[1]] = value, merged
        return out, lse

    def run(self, num_splits=None, first_slot=0, columns=None, compact=False, **constants) -> tuple[np.ndarray, np.ndarray]:
        """Merges with slots from `first_slot` on and a gap of one between items, in memory that is poison otherwise."""
        batch = self.items // self.s_q if self.sparse else self.items
        cache = TensorSpec((4, 64, self.h_kv, self.d_v), "bfloat16")
        q = TensorSpec((batch, self.s_q, self.h_q, self.d_v), "bfloat16")
        if self.sparse:
            scopes = {"indices": TensorSpec((batch, self.s_q, 64), "int32"), "topk_length": TensorSpec((batch,), "int32")}
        else:
            scopes = {"block_table": TensorSpec((batch, 4), "int32"), "cache_seqlens": TensorSpec((batch,), "int32")}
        sink = None if self.sink is None else TensorSpec((self.h_q,), "float32")
        problem = make_problem(q, cache, **scopes, attn_sink=sink, head_dim_v=self.d_v, num_splits=num_splits)
        step = plan_decode(problem, INTERPRETER).launches[-1]
        assert step.kernel is combine_kernel
        if compact:  # as the Hopper path has it, whose kernels are not interpreted
            columns = columns or self.d_v // 2
            constants |= {"COMPACT": True, "WIDEST": 256, "NARROWER": 2}
        if columns is not None:
            step = replace(step, scalars=(*step.scalars[:-1], columns))

        memory = Memory()
        slots = first_slot + sum(len(pieces) + 1 for pieces in self.pieces.values())
        if num_splits:
            slots = self.items * num_splits
        partial_out = memory.array((slots, self.rows, self.d_v), "float16" if compact else "float32")
        partial_lse = memory.array((slots, self.rows, 2, 2) if compact else (slots, self.rows), "float32")
        schedule = memory.array((step.scalars[0] + 1 + 3 * len(self.pieces),), "int32")
        schedule[step.scalars[0]] = len(self.pieces)
        slot = first_slot
        for entry, (item, pieces) in enumerate(self.pieces.items()):
            if num_splits:
                slot = item * num_splits
            schedule[step.scalars[0] + 1 + 3 * entry :][:3] = (item, slot, len(pieces))
            for piece_out, piece_lse in pieces:
                # As the attention kernel leaves it: where there was no key, anything.
                written = piece_lse != -np.inf
                if compact:  # 0 where there was no key
                    values, scales = quantised(np.where(written[:, None], piece_out, 0))
                    partial_out[slot] = values
                    partial_lse[slot, :, :, 0] = piece_lse[:, None]
                    partial_lse[slot, :, :, 1] = scales
                else:
                    partial_out[slot, written] = piece_out[written]
                    partial_lse[slot] = piece_lse
                slot += 1
            slot += 1
        arrays = {"schedule": schedule, "table": schedule, "partial_out": partial_out, "partial_lse": partial_lse}
        arrays["out"] = memory.array(problem.out_shape, "float32")
        arrays["lse"] = memory.array(problem.lse_shape, "float32")
        arrays["out"][:] = UNTOUCHED
        arrays["lse"][:] = UNTOUCHED
        arrays["attn_sink"] = np.zeros(1, np.float32) if self.sink is None else self.sink
        arrays["softmax_scale"] = np.ones(1, np.float32)
        launch(step, arrays, **constants)
        memory.assert_guards_hold()
        return arrays["out"], arrays["lse"]

    def check(self, **how) -> tuple[np.ndarray, np.ndarray]:
        out, lse = self.run(**how)
        expected_out, expected_lse = (self.compacted() if how.get("compact") else self).expected()
        scale = max((np.abs(p[np.isfinite(p)]).max(initial=0) for ps in self.pieces.values() for p, _ in ps), default=1)
        np.testing.assert_allclose(out, expected_out, rtol=TOLERANCE, atol=TOLERANCE * scale)
        np.testing.assert_allclose(lse, expected_lse, rtol=TOLERANCE, atol=TOLERANCE)
        return out, lse


# Where the columns of half a row lie: of 32 neighbours each lane of a quad has 4 pairs, which it stores side by side.
PLACES = np.arange(256).reshape(8, 4, 4, 2).transpose(0, 2, 1, 3).ravel()


def quantised(out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 512 columns as the Hopper kernels write them: fp16 in their places, and the scales of the halves."""
    halves = out.astype(np.float32).reshape(len(out), 2, 256)
    largest = np.where(np.isfinite(halves), np.abs(halves), 0).max(-1)
    _, exponent = np.frexp(np.clip(largest, 2.0**-113, None))
    scales = np.ldexp(np.float32(1), np.minimum(exponent - 1, 126) - 13).astype(np.float32)
    with np.errstate(invalid="ignore"):
        values = (halves / scales[..., None]).astype(np.float16)
    return values[..., PLACES].reshape(out.shape), scales


def dequantised(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    halves = np.empty((len(values), 2, 256), np.float32)
    halves[..., PLACES] = values.reshape(halves.shape).astype(np.float32)
    return (halves * scales[..., None]).reshape(values.shape)


def draw_pieces(rng, count, rows, d_v, spread=3.0, empty=0.2):
    """`count` pieces; some rows of some pieces have no key."""
    pieces = []
    for _ in range(count):
        lse = (rng.standard_normal(rows) * spread).astype(np.float32)
        lse[rng.random(rows) < empty] = -np.inf
        pieces.append((rng.standard_normal((rows, d_v)).astype(np.float32), lse))
    return pieces


def one_row(outs, sums, sink=None):
    """Two or more pieces of one row, given by their outputs and the sums of their exponentials."""
    with np.errstate(divide="ignore"):
        pieces = [
            (np.full((1, 16), out, np.float32), np.log(np.array([z], np.float32))) for out, z in zip(outs, sums, strict=True)
        ]
    return Merge(1, 1, 1, 16, False, 1, {0: pieces}, sink)


def test_sums_of_2_and_8_with_outputs_0_and_10_merge_to_8():
    out, lse = one_row([0, 10], [2, 8]).run()
    np.testing.assert_allclose(out, 8.0, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(10), rtol=1e-6)


def test_order_and_grouping_of_pieces_change_nothing_but_rounding():
    outs, sums = [1, -3, 10, 5], [2.0, 8.0, 0.5, 1e-3]
    total = sum(sums)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        out, lse = one_row([outs[i] for i in order], [sums[i] for i in order]).run()
        np.testing.assert_allclose(out, np.dot(outs, sums) / total, rtol=1e-6)
        np.testing.assert_allclose(lse, np.log(total), rtol=1e-6)


def test_empty_pieces_weigh_nothing_and_are_not_read():
    for outs, sums in [([7, np.nan], [3, 0]), ([np.nan, 7], [0, 3]), ([np.nan, 7, np.inf, np.nan], [0, 3, 0, 0])]:
        out, lse = one_row(outs, sums).run()
        np.testing.assert_array_equal(out, 7.0)
        np.testing.assert_allclose(lse, np.log(3), rtol=1e-6)


def test_a_row_without_any_key_is_zero_and_inf():
    for sink in (None, np.zeros(1, np.float32), np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)):
        out, lse = one_row([np.nan, np.nan], [0, 0], sink).run()
        np.testing.assert_array_equal(out, 0.0)
        np.testing.assert_array_equal(lse, np.inf)


@pytest.mark.parametrize("where", ["out", "lse"])
def test_nan_of_an_attended_key_propagates(where):
    rng = np.random.default_rng(0)
    pieces = draw_pieces(rng, 3, 4, 32, empty=0)
    if where == "out":
        pieces[1][0][2, 5] = np.nan
    else:
        pieces[1][1][2] = np.nan
    out, lse = Merge(1, 4, 1, 32, False, 1, {0: pieces}).run()
    nan = np.zeros((4, 32), bool)
    nan[2, 5 if where == "out" else slice(None)] = True
    np.testing.assert_array_equal(np.isnan(out[0, 0]), nan)
    np.testing.assert_array_equal(np.isnan(lse[0, :, 0]), np.arange(4) == (2 if where == "lse" else -1))


@pytest.mark.parametrize("spread", [0.1, 30.0, 2000.0])
def test_scores_of_any_size_stay_finite(spread):
    rng = np.random.default_rng(1)
    out, lse = Merge(1, 8, 1, 64, False, 1, {0: draw_pieces(rng, 5, 8, 64, spread, empty=0)}).check()
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("count", [2, 31, 32, 33, 64, 100])
def test_any_number_of_pieces(count):
    """One block of the kernel holds 32."""
    rng = np.random.default_rng(count)
    Merge(1, 3, 1, 40, False, 2, {1: draw_pieces(rng, count, 3, 40)}).check()


@pytest.mark.parametrize("d_v", [16, 100, 512, 768, 1024])
def test_one_binary_serves_every_batch(d_v):
    launches = []
    for batch in (1, 2, 3, 40, 200):
        problem = make_problem(
            TensorSpec((batch, 1, 128, d_v + 64), "bfloat16"),
            TensorSpec((4, 64, 1, d_v + 64), "bfloat16"),
            block_table=TensorSpec((batch, 64), "int32"),
            cache_seqlens=TensorSpec((batch,), "int32"),
            head_dim_v=d_v,
        )
        launches.append(plan_decode(problem, KNOWN_DEVICES["NVIDIA H200"]).launches[-1])
    constants = launches[0].constexprs
    widths = [constants["WIDEST"] >> halved for halved in range(constants["NARROWER"] + 1)]
    assert len({merge.scalars[-1] for merge in launches}) > (d_v > 100)
    for merge in launches:
        assert merge.kernel is combine_kernel
        assert merge.constexprs == constants
        assert merge.scalars[-1] in widths  # others write nothing


@pytest.mark.parametrize("columns", [64, 128, 256, 512])
def test_the_columns_of_a_task_are_only_a_matter_of_speed(columns):
    rng = np.random.default_rng(5)
    Merge(1, 3, 1, 300, False, 1, {0: draw_pieces(rng, 41, 3, 300)}).check(columns=columns)


def test_a_shape_has_room_for_the_pieces_that_are_expected():
    assert len({shape.columns for shape in SHAPES}) == len(SHAPES)  # by which the kernel knows them
    for pieces in range(1, 200):
        shape = shape_for(pieces)
        assert shape.pieces >= pieces or shape == SHAPES[-1]
        assert all(other.pieces < pieces for other in SHAPES if other.pieces < shape.pieces)


def test_half_precision_of_a_piece_has_a_scale_for_each_half_of_a_row():
    rng = np.random.default_rng(9)
    out = (rng.standard_normal((40, 512)) * np.exp(rng.uniform(-80, 80, (40, 1)))).astype(np.float32)
    out[0], out[1, 300:] = 0, 1e38
    values, scales = quantised(out)
    assert np.isfinite(values).all()
    error = np.abs(dequantised(values, scales) - out).reshape(40, 2, 256)
    largest = np.abs(out).reshape(40, 2, 256).max(-1, keepdims=True)
    assert (error <= np.maximum(2.0**-11 * np.abs(out).reshape(40, 2, 256), 2.0**-37 * largest)).all()


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("count", [2, 15, 16, 33, 70])
def test_pieces_in_half_precision(columns, count):
    rng = np.random.default_rng([columns, count])
    pieces = draw_pieces(rng, count, 6, 512)
    for out, _ in pieces:
        out *= np.exp(rng.uniform(-30, 30, (6, 1))).astype(np.float32)
        out[:, 256:] *= 1e3
    Merge(2, 3, 1, 512, False, 2, {1: pieces}).check(columns=columns, compact=True, first_slot=1)
    three = {item: draw_pieces(rng, 3, 3, 512) for item in range(4)}
    Merge(2, 3, 1, 512, True, 4, three, np.zeros(3, np.float32)).check(columns=columns, compact=True, num_splits=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_half_precision_and_spoils_nothing_else(value):
    pieces = draw_pieces(np.random.default_rng(10), 3, 2, 512, empty=0)
    pieces[1][0][1, 300] = value
    merge = Merge(1, 2, 1, 512, False, 1, {0: pieces})
    out, lse = merge.run(compact=True)
    np.testing.assert_array_equal(out[0, 0, 1, 300], value)
    pieces[1][0][1, 300] = out[0, 0, 1, 300] = 0
    expected, expected_lse = merge.compacted().expected()
    expected[0, 0, 1, 300] = 0
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_late_pieces_alone_hold_keys():
    """The first block of pieces is empty, so a running maximum has nothing to start from."""
    rng = np.random.default_rng(6)
    pieces = draw_pieces(rng, 32, 2, 16, empty=1.0) + draw_pieces(rng, 3, 2, 16, spread=50, empty=0)
    Merge(1, 2, 1, 16, False, 1, {0: pieces}).check()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("d_v", [16, 100, 512])
def test_rows_land_where_they_belong(sparse, num_splits, d_v):
    rng = np.random.default_rng(7)
    s_q, h_q, h_kv = 3, 6, 1 if sparse else 2
    items = 4 * s_q if sparse else 4
    rows = h_q if sparse else h_q * s_q
    chosen = range(items) if num_splits else (0, items - 2)
    pieces = {item: draw_pieces(rng, num_splits or 2 + item % 3, rows, d_v) for item in chosen}
    sink = (rng.standard_normal(h_q) * 3).astype(np.float32)
    sink[:2] = np.inf, -np.inf
    for given in (None, sink):
        Merge(s_q, h_q, h_kv, d_v, sparse, items, pieces, given).check(num_splits=num_splits, first_slot=0 if num_splits else 2)


@pytest.mark.parametrize("grid", [1, 2, 7, 1000])
def test_any_number_of_programs_shares_the_work(grid):
    rng = np.random.default_rng(8)
    pieces = {item: draw_pieces(rng, 2, 5, 24) for item in (0, 2)}
    Merge(1, 5, 1, 24, False, 3, pieces).check(grid=(grid, 1, 1))


def test_nothing_split_leaves_everything_as_it_is():
    out, lse = Merge(1, 4, 1, 16, False, 3, {}).run()
    assert (out == UNTOUCHED).all()
    assert (lse == UNTOUCHED).all()


@pytest.mark.parametrize("sink", [-np.inf, -300.0, 0.0, 90.0, 300.0, np.inf])
@pytest.mark.parametrize("size", [0.0, 200.0, -200.0])
def test_a_sink_scales_the_merged_row_once(sink, size):
    outs, lse = [2.0, 6.0], [size, size]
    pieces = [(np.full((1, 16), o, np.float32), np.array([z], np.float32)) for o, z in zip(outs, lse, strict=True)]
    out, merged = Merge(1, 1, 1, 16, False, 1, {0: pieces}, np.array([sink], np.float32)).run()
    np.testing.assert_allclose(merged, size + np.log(2), rtol=1e-6)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(out, 4.0 / (1 + np.exp(sink - (size + np.log(2)))), rtol=5e-5, atol=1e-30)
