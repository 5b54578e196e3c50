"""Kinds of input that have broken other kernels, each as a test, interpreted through every front end that is installed.

Numbers are those of the list that the tests follow: 1 and 15 are in test_cases_limits.py, 17 to 23 in test_cases_calls.py.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests import kernel_runs
from tests.arg_specs import ArgSpec, spec_id
from tests.inputs import Inputs, make_inputs, quantise
from tests.kernel_runs import INTERPRET, assert_judged, assert_same_bits, check, decode_either

pytestmark = INTERPRET


@pytest.fixture(autouse=True)
def _front_ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both installed, a third of a test's cases go through both, in turn, and the others through PyTorch.

    All go through JAX where PyTorch is not installed.
    """
    number = 0
    for mark in request.node.iter_markers("parametrize"):
        names = mark.args[0]
        number += request.node.callspec.indices[names if isinstance(names, str) else names[0]]
    if kernel_runs.HAS_TORCH and (number + number // 3) % 3:
        monkeypatch.setattr(kernel_runs, "HAS_JAX", False)


FORMATS = ("bf16", "fp16", "v32_fp8", "model1_fp8")
WIDTHS = {"bf16": (192, 128), "fp16": (80, 64), "v32_fp8": (576, 512), "model1_fp8": (512, 512)}


def spec_of(cache_format: str, **more) -> ArgSpec:
    """A call of three heads."""
    d_qk, d_v = WIDTHS[cache_format]
    return ArgSpec(**{"format": cache_format, "d_qk": d_qk, "d_v": d_v, "h_q": 3} | more)


def both_ways(**more) -> list[ArgSpec]:
    """Every format, dense and with as many indices as there are keys."""
    specs = [spec_of(cache_format, **more) for cache_format in FORMATS]
    return specs + [replace(spec, topk=spec.length) for spec in specs]


def taking_turns(first, second, third) -> list[tuple]:
    """Every pair of values of two of the factors: all of the first two, with the values of the third one in turn."""
    found = [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]
    for x, y, pairs in ((first, third, {(a, c) for a, _, c in found}), (second, third, {(b, c) for _, b, c in found})):
        assert len(pairs) == len(x) * len(y)
    return found


def poisoned_share(inputs: Inputs) -> float:
    """What part of the cache is bytes that would be NaN."""
    return float((inputs.main.cache.buffer == 0xFF).mean())


@pytest.mark.parametrize("spec", both_ways(batch=2, page_size=4, length=13), ids=spec_id)
def test_case_02_tails_of_pages_and_unused_pages_full_of_nan(spec):
    inputs = make_inputs(spec)
    assert poisoned_share(inputs) > 0.2
    (out, lse), _ = check(inputs)
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize("spec", both_ways(batch=4, length=70, lengths="zeros"), ids=spec_id)
def test_case_03_batches_padded_with_empty_requests(spec, num_splits):
    inputs = make_inputs(replace(spec, num_splits=num_splits, topk_length=spec.sparse))
    (out, lse), _ = check(inputs)
    assert (out[1::2] == 0).all()
    assert np.isposinf(lse[1::2]).all()
    assert np.isfinite(lse[::2]).all()


@pytest.mark.parametrize("kind", ["first64", "holes", "empty_rows"])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_case_04_invalid_indices_before_and_among_valid_ones(cache_format, kind):
    spec = spec_of(cache_format, batch=2, s_q=2, length=100, topk=130, index_kind=kind, page_size=16)
    inputs = make_inputs(spec)
    assert (pages_in_use(inputs) > 0).all()  # slot 0, where a masked index may point, holds NaN
    assert (inputs.main.table < 0).any()
    check(inputs)


def pages_in_use(inputs: Inputs) -> np.ndarray:
    table = inputs.main.table
    return table[table >= 0] // inputs.spec.page_size


@pytest.mark.parametrize("num_splits", [None, 2])
def test_case_04_nothing_but_invalid_indices(num_splits):
    inputs = make_inputs(spec_of("v32_fp8", batch=2, length=70, topk=70, index_kind="holes", num_splits=num_splits))
    table = inputs.main.table.copy()
    table[0] = -1
    inputs = replace(inputs, main=replace(inputs.main, table=table))
    (out, lse), _ = check(inputs)
    assert (out[0] == 0).all()
    assert np.isposinf(lse[0]).all()


@pytest.mark.parametrize("extra", [None, (16, 40, False)])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_case_05_indices_out_of_range(cache_format, extra):
    spec = spec_of(cache_format, batch=2, length=100, topk=90, index_kind="out_of_range", page_size=53, extra=extra)
    inputs = make_inputs(spec)
    last = inputs.main.cache.num_pages * 53 - 1
    assert (inputs.main.table > last).any()
    check(inputs)
    # The last slot of the cache is the last that counts.
    table = inputs.main.table.copy()
    valid = (table >= 0) & (table <= last)
    assert valid.any()
    with_last = replace(inputs, main=replace(inputs.main, table=np.where(valid, last, table)))
    assert_judged(decode_either(with_last), with_last)  # NaN, unless a request has that slot
    behind = replace(inputs, main=replace(inputs.main, table=np.where(valid, last + 1, table)))
    assert_judged(decode_either(behind), behind)


@pytest.mark.parametrize("topk", [0, 70])
@pytest.mark.parametrize("tiny", [False, True])
def test_case_06_scales_that_are_not_powers_of_two_and_scales_of_zero(topk, tiny):
    spec = spec_of("v32_fp8", batch=2, length=70, topk=topk, scales="arbitrary")
    inputs = make_inputs(spec)
    rows = inputs.main.cache.array().reshape(-1, 656)
    scales = np.lib.stride_tricks.as_strided(rows[:, 512:].view(np.uint8), (len(rows), 16), rows.strides).view(np.float32)
    assert (scales == 0).any()
    if tiny:
        rng = np.random.default_rng(0)
        factor = np.where(rng.random(scales.shape) < 0.5, np.float32(1e-30), np.float32(1))
        scales *= factor
    (out, lse), _ = check(inputs)
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(lse).all()


def test_case_06_the_writer_of_the_tests_makes_both_kinds_of_scales():
    values = np.random.default_rng(0).standard_normal((64, 4, 128)).astype(np.float32)
    for kind, rounded in (("pow2", True), ("arbitrary", False)):
        codes, scales = quantise(values, np.random.default_rng(1), kind)
        assert ((codes & 0x7F) == 0).all(-1).any()
        assert (np.frexp(scales[scales > 0])[0] == 0.5).all() == rounded


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("spec", both_ways(batch=3, s_q=2, length=100, lengths="ragged", page_size=16), ids=spec_id)
def test_case_07_with_num_splits_a_row_is_the_same_in_any_batch(spec, num_splits):
    inputs = make_inputs(replace(spec, num_splits=num_splits, topk_length=spec.sparse, sink="finite"))
    out, lse = decode_either(inputs)
    for rows in ([1], [2, 1]):
        scope = replace(inputs.main, table=inputs.main.table[rows], lengths=inputs.main.lengths[rows])
        some = replace(inputs, q=inputs.q[rows], main=scope, spec=replace(inputs.spec, batch=len(rows)))
        assert_same_bits((out[rows], lse[rows]), decode_either(some))


@pytest.mark.parametrize("num_splits", [None, 1, 2, 5, 16])
def test_case_08_partial_results_are_natural_logarithms_wherever_they_are_cut(num_splits):
    """The same call cut differently; test_combine.py merges sums of 2 and 8 with outputs 0 and 10 to 8."""
    check(make_inputs(spec_of("bf16", batch=2, length=300, page_size=16, num_splits=num_splits)))


@pytest.mark.parametrize(
    "spec",
    [*both_ways(batch=2, length=5, page_size=2, lengths="ragged", num_splits=7), spec_of("bf16", length=20, num_splits=40)],
    ids=spec_id,
)
def test_case_09_fewer_keys_than_splits(spec):
    """All scratch is poison beforehand."""
    check(make_inputs(spec))


@pytest.mark.parametrize("num_splits", [None, 4])
@pytest.mark.parametrize("spec", both_ways(batch=2, length=260, std=100.0, page_size=16), ids=spec_id)
def test_case_10_large_queries_and_splits(spec, num_splits):
    (out, lse), expected = check(make_inputs(replace(spec, num_splits=num_splits)))
    assert np.abs(expected.lse).max() > 100
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("spec", both_ways(batch=2, s_q=4, length=70, lengths="ragged", page_size=16), ids=spec_id)
@pytest.mark.parametrize("causal", [False, True])
def test_case_11_more_query_rows_than_table_rows(spec, causal):
    check(make_inputs(replace(spec, causal=causal and not spec.sparse, h_q=20)))


@pytest.mark.parametrize(("cache_format", "s_q", "num_splits"), taking_turns(FORMATS, (3, 5, 7), (None, 2)))
def test_case_12_every_position_has_its_own_result(cache_format, s_q, num_splits):
    spec = spec_of(cache_format, batch=2, s_q=s_q, length=70, page_size=16, causal=True, num_splits=num_splits)
    inputs = make_inputs(spec)
    (out, _), expected = check(inputs)
    for j in range(s_q):
        scope = replace(inputs.main, lengths=inputs.main.lengths - s_q + j + 1)
        alone = replace(inputs, q=inputs.q[:, j : j + 1], main=scope, spec=replace(spec, s_q=1, causal=False))
        own = assert_judged(decode_either(alone), alone)
        np.testing.assert_allclose(expected.out[:, j : j + 1], own.out, rtol=1e-12)
    different = [not np.array_equal(out[:, 0], out[:, j]) for j in range(1, s_q)]
    assert all(different)


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_case_12_causal_rows_before_the_first_key(length):
    (out, lse), _ = check(make_inputs(spec_of("bf16", batch=2, s_q=5, length=length, causal=True)))
    assert (out[:, : 5 - length] == 0).all()
    assert np.isposinf(lse[..., : 5 - length]).all()
    assert np.isfinite(lse[..., 5 - length :]).all()


OTHER_WIDTHS = ((320, 256), (288, 256), (512, 512), (192, 128), (256, 256), (17, 5), (1, 1), (129, 1))


@pytest.mark.parametrize(("widths", "topk", "cache_format"), taking_turns(OTHER_WIDTHS, (0, 40), ("bf16", "fp16")))
def test_case_13_widths(cache_format, widths, topk):
    d_qk, d_v = widths
    check(make_inputs(ArgSpec(format=cache_format, d_qk=d_qk, d_v=d_v, batch=2, h_q=5, length=70, topk=topk, num_splits=2)))


@pytest.mark.parametrize("h_q", [1, 3, 8, 12, 20, 63, 96, 126])
@pytest.mark.parametrize("topk", [0, 40])
def test_case_14_numbers_of_heads(h_q, topk):
    """q lies in a tensor with a head of NaN behind the last (torch), and buffers have guards around them."""
    for spec in (
        spec_of("bf16", h_q=h_q, batch=1, s_q=2, length=40, topk=topk, sink="finite", views=True),
        spec_of("v32_fp8", h_q=h_q, batch=1, length=40, topk=topk, sink="infinite", views=True, num_splits=2),
    ):
        check(make_inputs(spec))


@pytest.mark.parametrize("h_kv", [2, 3, 4])
def test_several_key_value_heads(h_kv):
    for more in ({"s_q": 1}, {"s_q": 3, "causal": True}, {"s_q": 2, "num_splits": 3, "sink": "finite"}):
        spec = ArgSpec(batch=2, h_q=h_kv * 5, h_kv=h_kv, d_qk=96, d_v=64, length=70, page_size=16, lengths="ragged", **more)
        check(make_inputs(spec))


PAGE_SIZES = (1, 2, 16, 53, 61, 128, 256, 576)


@pytest.mark.parametrize(("page_size", "cache_format", "topk"), taking_turns(PAGE_SIZES, FORMATS, (0, 70)))
def test_case_16_page_sizes(page_size, cache_format, topk):
    check(make_inputs(spec_of(cache_format, batch=2, page_size=page_size, length=150, lengths="ragged", topk=topk)))


@pytest.mark.parametrize("layout", ["padded", "skewed", "interleaved"])
@pytest.mark.parametrize("spec", both_ways(batch=2, length=100, page_size=16), ids=spec_id)
def test_case_17_distances_between_pages(spec, layout):
    """Interleaved: every second page of a larger cache (torch).  What lies between pages is NaN."""
    near = check(make_inputs(spec))[0]
    # The layout is part of what seeds the random numbers.
    inputs = make_inputs(replace(spec, layout=layout))
    far = check(inputs)[0]
    assert near[0].shape == far[0].shape
    assert inputs.main.cache.page_stride > spec.page_size * inputs.main.cache.token_bytes


@pytest.mark.parametrize("topk", [1, 100, 2047])
@pytest.mark.parametrize("length", [20, 2100])
def test_case_19_any_topk_also_above_the_number_of_keys(topk, length):
    for cache_format in ("bf16", "model1_fp8"):
        inputs = make_inputs(spec_of(cache_format, h_q=1, length=length, topk=topk))
        assert (inputs.main.table >= 0).sum() == min(topk, length)
        check(inputs)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_splits": 3},
        {"s_q": 3, "causal": True},
        {"topk": 60},
        {"topk": 60, "topk_length": True, "lengths": "zeros"},
        {"topk": 60, "extra": (16, 40, True)},
        {"lengths": "zeros", "num_splits": 2},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_case_20_sinks_with_every_format_and_mode(cache_format, more):
    """Four of six heads have sinks of inf, -inf, 200 and -200."""
    inputs = make_inputs(spec_of(cache_format, batch=2, h_q=6, length=100, page_size=16, sink="infinite", **more))
    (out, lse), _ = check(inputs)
    plain_out, plain_lse = decode_either(replace(inputs, attn_sink=None))
    np.testing.assert_array_equal(lse, plain_lse)
    never = np.isneginf(inputs.attn_sink)
    np.testing.assert_array_equal(out[:, :, never], plain_out[:, :, never])
    assert (out[:, :, np.isposinf(inputs.attn_sink)] == 0).all()
    felt = inputs.attn_sink > lse.transpose(0, 2, 1) - 2
    assert (out[felt] != plain_out[felt]).any(-1).all()


def test_case_20_sinks_beside_logits_above_88():
    inputs = make_inputs(spec_of("bf16", batch=2, h_q=40, length=100, std=100.0, num_splits=2))
    sink = np.linspace(-400, 400, 40).astype(np.float32)
    (out, _), expected = check(replace(inputs, attn_sink=sink))
    assert np.abs(expected.lse).max() > 88
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize(("length", "num_splits"), [(1, None), (1, 2), (17, 2)])
def test_queries_without_a_key_beside_keys_that_are_nan(length, num_splits, monkeypatch):
    """The newest token is NaN and its own query's alone: of earlier ones a range of keys, or all, is empty, not 0 * NaN."""
    monkeypatch.setattr(kernel_runs, "HAS_JAX", not kernel_runs.HAS_TORCH)  # whose NaN has other bits
    inputs = make_inputs(spec_of("bf16", s_q=2, length=length, page_size=16, causal=True, num_splits=num_splits))
    cache = inputs.main.cache
    newest = inputs.main.table[0, (length - 1) // 16], (length - 1) % 16
    cache.part(0, cache.token_bytes, cache.token_bytes)[newest] = 0xFF
    (out, lse), _ = check(inputs)
    assert np.isnan(out[0, 1].astype(np.float32)).all()
    assert np.isfinite(out[0, 0].astype(np.float32)).all()
    assert np.isposinf(lse[0, :, 0]).all() == (length == 1)


@pytest.mark.parametrize("extreme", [-(2**31), -1, 10**6, 2**31 - 1])
@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("topk", [0, 50])
def test_lengths_are_clamped(extreme, num_splits, topk):
    spec = spec_of("bf16", batch=3, length=50, page_size=16, num_splits=num_splits, lengths="ragged", topk=topk)
    if topk:
        spec = replace(spec, topk_length=True, extra=(2, 30, True))
    inputs = make_inputs(spec)
    # Of request 0 the whole table is filled in, so that it can be read to its end.
    table = inputs.main.table.copy()
    if not topk:
        table[0] = table[0, 0]
    else:
        table[0] = table[0, 0, 0]
    if not topk:
        fill = inputs.main.cache.part(0, inputs.main.cache.token_bytes, inputs.main.cache.token_bytes)
        fill[table[0, 0]] = fill[table[0, 0], 0]
    lengths = inputs.main.lengths.copy()
    lengths[0] = extreme
    inputs = replace(inputs, main=replace(inputs.main, table=table, lengths=lengths))
    if inputs.extra is not None:
        extra = inputs.extra.lengths.copy()
        extra[1] = -5
        inputs = replace(inputs, extra=replace(inputs.extra, lengths=extra))
    (out, lse), _ = check(inputs)
    if extreme < 0 and not topk:
        assert (out[0] == 0).all()
        assert np.isposinf(lse[0]).all()


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.05, -3.0, 1e-30, 7.5])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_any_softmax_scale(scale, num_splits):
    inputs = make_inputs(spec_of("bf16", batch=2, s_q=2, length=90, lengths="ragged", num_splits=num_splits, page_size=16))
    (_, lse), _ = check(inputs, softmax_scale=scale)
    if scale == 0:
        with np.errstate(divide="ignore"):
            keys = np.log(inputs.main.lengths.astype(np.float64))
        some = keys > 0
        np.testing.assert_allclose(lse[some], np.broadcast_to(keys[some, None, None], lse[some].shape), rtol=1e-5)
