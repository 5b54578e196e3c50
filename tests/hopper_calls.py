"""Calls for the Hopper path, as problems: nothing is allocated.  And which shared specs it serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from mla_kernels.device import KNOWN_DEVICES
from mla_kernels.formats import get_format
from mla_kernels.launch import Launch, Plan
from mla_kernels.problem import Problem, TensorSpec, make_problem, row_major_strides
from tests.arg_specs import ArgSpec

H200 = KNOWN_DEVICES["NVIDIA H200"]
PAGES = 1000


def dense_problem(
    *,
    batch: int = 4,
    s_q: int = 1,
    h_q: int = 128,
    h_kv: int = 1,
    d_qk: int = 576,
    dtype: str = "bfloat16",
    page_size: int = 64,
    pages: int = PAGES,
    width: int = 512,
    sink: bool = False,
    q_strides: tuple[int, ...] = (),
    cache_strides: tuple[int, ...] = (),
    table_strides: tuple[int, ...] = (),
    aligned: tuple[bool, bool] = (True, True),
    **options: Any,
) -> Problem:
    """`width` is that of the block table; `aligned` goes for q and kv_cache; no strides means row-major."""
    return make_problem(
        TensorSpec((batch, s_q, h_q, d_qk), dtype, q_strides, aligned[0]),
        TensorSpec((pages, page_size, h_kv, d_qk), dtype, cache_strides, aligned[1]),
        TensorSpec((batch, width), "int32", table_strides),
        TensorSpec((batch,), "int32"),
        attn_sink=TensorSpec((h_q,), "float32") if sink else None,
        **options,
    )


def sparse_problem(
    *,
    cache_format: str = "v32_fp8",
    batch: int = 4,
    s_q: int = 1,
    h_q: int = 128,
    page_size: int = 64,
    pages: int = PAGES,
    topk: int = 2048,
    length: bool = False,
    extra: int = 0,
    extra_page_size: int = 64,
    extra_length: bool = False,
    sink: bool = False,
    dtype: str = "bfloat16",
    page_stride: int = 0,
    aligned: tuple[bool, bool] = (True, True),
    **options: Any,
) -> Problem:
    """`extra` is the number of indices of an extra cache; pages are as the format pads them, or `page_stride` bytes apart."""
    fmt = get_format(cache_format)

    def cache(size: int, is_aligned: bool = True) -> TensorSpec:
        shape = (pages, size, 1, fmt.token_bytes)
        strides = (page_stride or fmt.page_bytes(size), fmt.token_bytes, fmt.token_bytes, 1)
        return TensorSpec(shape, "uint8", strides, is_aligned)

    lengths = TensorSpec((batch,), "int32")
    return make_problem(
        TensorSpec((batch, s_q, h_q, fmt.d_qk or 0), dtype, (), aligned[0]),
        cache(page_size, aligned[1]),
        indices=TensorSpec((batch, s_q, topk), "int32"),
        topk_length=lengths if length else None,
        extra_kv_cache=cache(extra_page_size) if extra else None,
        extra_indices=TensorSpec((batch, s_q, extra), "int32") if extra else None,
        extra_topk_length=lengths if extra_length else None,
        attn_sink=TensorSpec((h_q,), "float32") if sink else None,
        cache_format=cache_format,
        **options,
    )


def interleaved(page_size: int, d_qk: int = 576, step: int = 2) -> tuple[int, ...]:
    """Strides of a cache that is every `step`-th page of a larger one."""
    page, *rest = row_major_strides((PAGES, page_size, 1, d_qk))
    return (step * page, *rest)


def served(spec: ArgSpec) -> bool:
    """Whether the Hopper path serves a spec with the strides that PyTorch's arrays have."""
    # Views of q lie in a larger array, queries first: rows at equal distances only along one dimension.
    many = (spec.batch > 1 or spec.num_splits is not None, spec.s_q > 1, spec.h_q > 1)
    rows = not spec.views or sum(many) < 2
    if spec.sparse:  # skewed pages do not lie at multiples of 16 bytes
        return rows and spec.format in ("v32_fp8", "model1_fp8") and spec.layout != "skewed"
    pages = spec.page_size in (16, 32) or spec.page_size % 64 == 0
    model = spec.format in ("bf16", "fp16") and (spec.d_v, spec.h_kv) == (512, 1) and spec.d_qk in (512, 576)
    return model and pages and rows and spec.layout in ("contiguous", "interleaved")


def cases_by_implementation(specs: Iterable[ArgSpec]) -> list[tuple[ArgSpec, str]]:
    """Each spec with every implementation that has kernels for it, the best first."""
    return [(spec, name) for spec in specs for name in ("hopper",) * served(spec) + ("triton",)]


def by_implementation(specs: Iterable[ArgSpec]) -> pytest.MarkDecorator:
    """Parametrises a test of `spec` and `implementation`."""
    cases = [pytest.param(spec, name, id=f"{spec.id}-{name}") for spec, name in cases_by_implementation(specs)]
    return pytest.mark.parametrize(("spec", "implementation"), cases)


def scalars_of(launch: Launch) -> dict[str, int]:
    """By the names of the kernel's parameters."""
    return dict(zip(launch.kernel.arg_names[len(launch.inputs) :], launch.scalars, strict=False))


def attend_launch(plan: Plan) -> Launch:
    """The launch that reads the cache."""
    (launch,) = (launch for launch in plan.launches if "kv_cache" in launch.input_arrays)
    return launch
