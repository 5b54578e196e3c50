"""Whole problems drawn at random: judged, and held to laws that need no judge."""

import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from mla_kernels.formats import get_format
from tests.arg_specs import ArgSpec
from tests.inputs import Inputs, Scope, make_inputs
from tests.kernel_runs import INTERPRET, assert_judged, assert_same_bits, check, decode_either, move_pages, pages_of

pytestmark = INTERPRET

INT32_MAX = 2**31 - 1
SEEDS = st.integers(0, 2**16)


def examples(count: int) -> settings:
    """Two thirds of them, or all if it is asked for."""
    return settings(max_examples=count if "MLA_ALL_EXAMPLES" in os.environ else count * 2 // 3)


@st.composite
def specs(draw, sparse=None, batch=(1, 3), num_splits=(None, 1, 2, 3, 7), extra=True, topk=(1, 150)) -> ArgSpec:
    """Any call of up to three requests and queries, 40 heads and some hundred keys."""
    cache_format = draw(st.sampled_from(["bf16", "fp16", "v32_fp8", "model1_fp8"]))
    fmt = get_format(cache_format)
    sparse = draw(st.booleans()) if sparse is None else sparse
    h_kv = 1 if fmt.quantised or sparse else draw(st.integers(1, 3))
    h_q = h_kv * draw(st.integers(1, 40 // h_kv))
    d_v = fmt.d_v or draw(st.integers(1, 80))
    std = draw(st.sampled_from([0.1, 1.0, 30.0]))
    # Some head must keep an output that fp32 can hold: the cosine of the judge knows no rounding to zero.
    sinks = ["none"] + ["finite"] * (std < 30) + ["infinite"] * (std < 30 and h_q > 4)
    values = {
        "format": cache_format,
        "batch": draw(st.integers(*batch)),
        "s_q": draw(st.integers(1, 3)),
        "h_kv": h_kv,
        "h_q": h_q,
        "d_v": d_v,
        "d_qk": fmt.d_qk or d_v + draw(st.integers(0, 40)),
        "page_size": draw(st.integers(1, 80)),
        "length": draw(st.integers(0, 130)),
        "lengths": draw(st.sampled_from(["equal", "ragged", "zeros", "wild"])),
        "sink": draw(st.sampled_from(sinks)),
        "num_splits": draw(st.sampled_from(num_splits)),
        "scales": draw(st.sampled_from(["pow2", "arbitrary"])) if cache_format == "v32_fp8" else "pow2",
        "std": std,
        "layout": draw(st.sampled_from(["contiguous", "padded", "skewed", "interleaved"])),
        "views": draw(st.booleans()),
    }
    if not sparse:
        return ArgSpec(**values, causal=draw(st.booleans()))
    values["topk"] = draw(st.integers(*topk))
    values["topk_length"] = draw(st.booleans())
    kinds = ["plain", "holes", "out_of_range", "empty_rows"] + ["first64"] * (values["topk"] > 64)
    values["index_kind"] = draw(st.sampled_from(kinds))
    if extra:
        values["extra"] = draw(st.none() | st.tuples(st.integers(1, 80), st.integers(1, 100), st.booleans()))
    return ArgSpec(**values)


def each_scope(inputs: Inputs, change) -> Inputs:
    """`inputs` with `change(scope)` in place of each scope."""
    return replace(inputs, main=change(inputs.main), extra=None if inputs.extra is None else change(inputs.extra))


def one_request(inputs: Inputs, i: int) -> Inputs:
    def cut(scope: Scope) -> Scope:
        lengths = None if scope.lengths is None else scope.lengths[i : i + 1]
        return replace(scope, table=scope.table[i : i + 1], lengths=lengths)

    return replace(each_scope(inputs, cut), q=inputs.q[i : i + 1], spec=replace(inputs.spec, batch=1))


@examples(15)
@given(spec=specs(), seed=SEEDS, scale=st.none() | st.floats(-1, 1, width=32))
def test_any_call_agrees_with_fp64(spec, seed, scale):
    more = {} if scale is None else {"softmax_scale": scale * spec.d_qk**-0.5}
    check(make_inputs(spec, seed), **more)


@examples(12)
@given(spec=specs(sparse=True, extra=False), seed=SEEDS)
def test_a_key_that_is_selected_twice_counts_twice(spec, seed):
    inputs = make_inputs(spec, seed)
    again = np.random.default_rng(seed).integers(0, spec.topk, spec.topk)
    if spec.topk_length:
        again = np.minimum(again, np.arange(spec.topk))  # what lies behind a length is no key
    inputs = replace(inputs, main=replace(inputs.main, table=np.ascontiguousarray(inputs.main.table[..., again])))
    assert_judged(decode_either(inputs), inputs)


@examples(12)
@given(spec=specs(), seed=SEEDS)
def test_where_pages_lie_changes_no_bit(spec, seed):
    rng = np.random.default_rng(seed)

    def permute(scope: Scope) -> Scope:
        return move_pages(scope, rng.permutation(scope.cache.num_pages), np.empty_like(pages_of(scope)))

    inputs = make_inputs(spec, seed)
    assert_same_bits(decode_either(inputs), decode_either(each_scope(inputs, permute)))


@examples(12)
@given(spec=specs(), seed=SEEDS, count=st.integers(1, 5))
def test_more_pages_that_nobody_uses_change_no_bit(spec, seed, count):
    def far(scope: Scope) -> Scope:
        """Indices out of range so far that they stay out of range."""
        outside = scope.table >= scope.cache.num_pages * scope.cache.page_size
        return replace(scope, table=np.where(outside, INT32_MAX, scope.table).astype(np.int32))

    def add(scope: Scope) -> Scope:
        before = scope.cache.num_pages
        more = np.full((before + count, scope.cache.page_stride), 0xFF, np.uint8)
        return move_pages(scope, np.arange(before), more)

    inputs = make_inputs(spec, seed)
    if spec.sparse:
        inputs = each_scope(inputs, far)
    assert_same_bits(decode_either(inputs), decode_either(each_scope(inputs, add)))


@examples(12)
@given(spec=specs(batch=(2, 3), num_splits=(1, 2, 3, 7)), seed=SEEDS)
def test_with_num_splits_a_row_does_not_depend_on_its_batch(spec, seed):
    inputs = make_inputs(spec, seed)
    out, lse = decode_either(inputs)
    for i in range(spec.batch):
        assert_same_bits((out[i : i + 1], lse[i : i + 1]), decode_either(one_request(inputs, i)))


@examples(12)
@given(spec=specs(sparse=True, extra=False, topk=(2, 150)), seed=SEEDS, data=st.data())
def test_keys_may_come_from_either_cache(spec, seed, data):
    spec = replace(spec, topk_length=False, lengths="equal")
    inputs = make_inputs(spec, seed)
    cut = data.draw(st.integers(1, spec.topk - 1), label="cut")
    table = inputs.main.table
    halves = [replace(inputs.main, table=np.ascontiguousarray(part)) for part in (table[..., :cut], table[..., cut:])]
    if data.draw(st.booleans(), label="swap"):
        halves.reverse()
    split = replace(inputs, main=halves[0], extra=halves[1])
    assert_judged(decode_either(split), inputs)


@examples(10)
@given(spec=specs(), seed=SEEDS)
def test_a_sink_of_minus_infinity_changes_no_bit_and_one_of_infinity_leaves_zeros(spec, seed):
    inputs = make_inputs(replace(spec, sink="none"), seed)
    out, lse = decode_either(inputs)
    never = replace(inputs, attn_sink=np.full(spec.h_q, -np.inf, np.float32))
    assert_same_bits((out, lse), decode_either(never))
    always = replace(inputs, attn_sink=np.full(spec.h_q, np.inf, np.float32))
    assert_same_bits((out * 0, lse), decode_either(always))
