"""The named calls that every tier of tests, in both frameworks, runs: one list of data.

`SMALL` can be interpreted on a CPU, `REAL` holds the sizes of a GPU.  Both consist of a pairwise cover of the factors below
and of calls that are there for a reason of their own.  `tests/inputs.py` makes the arrays of a spec.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, TypeVar

from benchmarks.cases import select_cases
from tests.pairwise import Row, cover

T = TypeVar("T")


@dataclass(frozen=True)
class ArgSpec:
    """One decode call, up to the random numbers in it.

    Attributes:
      format: `bf16`, `fp16`, `v32_fp8` or `model1_fp8`.
      page_size: tokens of a page of the first cache.
      length: keys that a request has in the first cache.
      lengths: how they vary: `equal`; `ragged` (0 to `length`, the first has `length`); `zeros` (every second request is
        empty, as in a padded batch); `wild` (some below 0, some above what the table holds; both are clamped).
        In a sparse call this goes for `topk_length` too.
      topk: indices of a query, 0 for a dense call.  Where a request has fewer keys the rest is -1.
      topk_length: whether the array of that name is given.
      extra: page size, topk and whether `extra_topk_length` is given, of the extra cache.
      sink: `none`, `finite` or `infinite` (+inf, -inf and finite ones).
      num_splits: as in the call.
      scales: `pow2`, or `arbitrary` fp32 (v32_fp8 only).
      std: standard deviation of q; that of the cache is the same, but at most 1.
      index_kind: `plain`; `holes` (-1 in between); `out_of_range` (positive ones and the smallest int32);
        `first64` (the first 64 are -1); `empty_rows` (every second query selects nothing, the others one late key).
      layout: `contiguous`; `padded` (pages 16 * n bytes apart); `skewed` (apart by the least that the format allows);
        `interleaved` (every second page of a larger buffer).
      views: q, table, indices and lengths are views with strides (torch).
    """

    format: str = "bf16"
    batch: int = 1
    s_q: int = 1
    h_q: int = 16
    h_kv: int = 1
    d_qk: int = 576
    d_v: int = 512
    page_size: int = 64
    length: int = 64
    lengths: str = "equal"
    topk: int = 0
    topk_length: bool = False
    extra: tuple[int, int, bool] | None = None
    sink: str = "none"
    causal: bool = False
    num_splits: int | None = None
    scales: str = "pow2"
    std: float = 1.0
    index_kind: str = "plain"
    layout: str = "contiguous"
    views: bool = False

    @property
    def sparse(self) -> bool:
        return self.topk > 0

    @property
    def addressing(self) -> str:
        return "sparse" if self.sparse else "dense"

    @property
    def id(self) -> str:
        parts = [f"b{self.batch}", f"q{self.s_q}", f"s{self.length}", f"h{self.h_q}", self.format, f"p{self.page_size}"]
        if self.h_kv > 1:
            parts.append(f"hkv{self.h_kv}")
        if (self.d_qk, self.d_v) != default_widths(self.format):
            parts.append(f"d{self.d_qk}_{self.d_v}")
        parts.append(f"t{self.topk}" + ("len" if self.topk_length else "") if self.sparse else "dense")
        if self.extra is not None:
            page, topk, has_length = self.extra
            parts.append(f"x{topk}p{page}" + ("len" if has_length else ""))
        for value, usual in (
            (self.lengths, "equal"),
            (self.index_kind, "plain"),
            (self.layout, "contiguous"),
        ):
            if value != usual:
                parts.append(value)
        if self.scales != "pow2":
            parts.append(self.scales)
        if self.std != 1.0:
            parts.append(f"std{self.std:g}")
        if self.sink != "none":
            parts.append({"finite": "sink", "infinite": "infsink"}[self.sink])
        if self.causal:
            parts.append("causal")
        if self.num_splits is not None:
            parts.append(f"n{self.num_splits}")
        if self.views:
            parts.append("views")
        return "-".join(parts)


def default_widths(cache_format: str) -> tuple[int, int]:
    return (512, 512) if cache_format == "model1_fp8" else (576, 512)


# Values in the order in which they are tried; (d_qk, d_v, h_kv) is one factor.
COMMON: dict[str, tuple[Any, ...]] = {
    "format": ("bf16", "v32_fp8", "model1_fp8", "fp16"),
    "addressing": ("dense", "sparse"),
    "h_q": (128, 16, 1, 3, 8, 20, 63, 64, 96, 126),
    "page_size": (64, 1, 2, 16, 53, 61, 69, 128, 256, 576),
    "s_q": (1, 2, 3, 5, 7),
    "widths": ((576, 512, 1), (512, 512, 1), (320, 256, 1), (288, 256, 1), (192, 128, 1), (576, 512, 2), (192, 128, 4)),
    "causal": (False, True),
    "num_splits": (None, 1, 2, 5),
    "sink": ("none", "finite", "infinite"),
    "lengths": ("equal", "ragged", "zeros", "wild"),
    "topk_length": (False, True),
    "index_kind": ("plain", "holes", "out_of_range", "first64", "empty_rows"),
    "layout": ("contiguous", "padded", "skewed", "interleaved"),
    "scales": ("pow2", "arbitrary"),
    "std": (1.0, 0.1, 100.0),
    "views": (False, True),
}
SMALL_FACTORS = {
    **COMMON,
    "length": (0, 1, 20, 64, 65, 140, 300),
    "topk": (0, 1, 20, 64, 100, 140),
    "extra": (None, (64, 100, True), (2, 20, False), (53, 65, False)),
}
REAL_FACTORS = {
    **COMMON,
    "length": (0, 1, 20, 64, 65, 140, 4097),
    "topk": (0, 1, 64, 100, 512, 2047, 2048),
    "extra": (None, (64, 512, True), (2, 100, False), (64, 1024, False), (256, 65, True)),
}
# What DeepSeek's models ask of a dense 16-bit cache, which the Hopper path serves and the cover of everything seldom draws.
HOPPER_FACTORS: dict[str, tuple[Any, ...]] = {
    "format": ("bf16", "fp16"),
    "addressing": ("dense",),
    "h_q": (128, 16, 40),
    "page_size": (16, 32, 192, 256),
    "s_q": (1, 2, 4),
    "widths": ((576, 512, 1), (512, 512, 1)),
    "causal": (False, True),
    "num_splits": (None, 1, 5),
    "sink": ("none", "finite", "infinite"),
    "lengths": ("equal", "ragged", "zeros", "wild"),
    "layout": ("contiguous", "interleaved"),
    "length": (1, 65, 1000, 4097),
    "std": (1.0, 0.1, 100.0),
}

# The work of one call: interpreted tiles of 64 heads and 64 keys (about 0.05 s each), or (query head, key) pairs.
SMALL_COST = 24
REAL_COST = 8_000_000


def allowed(row: Row) -> bool:
    """Whether a (partial) row of factors is a call that exists."""
    fmt, widths = row.get("format"), row.get("widths")
    dense = sparse = False
    for name, value in row.items():
        if name == "addressing":
            dense |= value == "dense"
            sparse |= value == "sparse"
        elif name == "topk":
            dense |= value == 0
            sparse |= value > 0
        elif name in ("extra", "topk_length"):
            sparse |= bool(value)
        elif name == "index_kind":
            sparse |= value != "plain"
        elif name == "causal":
            dense |= value
        elif name == "widths":
            dense |= value[2] > 1
    if dense and sparse:
        return False
    if widths is not None:
        if "h_q" in row and row["h_q"] % widths[2]:
            return False
        quantised_only_as = {"v32_fp8": (576, 512, 1), "model1_fp8": (512, 512, 1)}
        if fmt in quantised_only_as and widths != quantised_only_as[fmt]:
            return False
        if row.get("scales") == "arbitrary" and widths != quantised_only_as["v32_fp8"]:
            return False
    if row.get("scales") == "arbitrary" and fmt not in (None, "v32_fp8"):
        return False
    # 64 invalid indices in front of valid ones
    return row.get("index_kind") != "first64" or row.get("topk", 65) > 64


def _least_batch(row: Row) -> int:
    return 1 if row.get("lengths", "equal") == "equal" else 2


def _scanned(row: Row, block: int) -> int:
    """Keys that a query passes, in whole blocks."""
    if row.get("topk", 0) or row.get("addressing") == "sparse":
        extra = row.get("extra") or (0, 0, False)
        return -(-row.get("topk", 1) // block) * block + -(-extra[1] // block) * block
    if row.get("topk") != 0 and row.get("addressing") != "dense":
        return 0
    keys = row.get("length", 0)
    if row.get("lengths") == "wild":  # clamped to what the table holds
        page_size = row.get("page_size", 1)
        keys = max(-(-keys // page_size), 1) * page_size
    return -(-keys // block) * block


def small_cost(row: Row) -> int:
    """Tiles of 64 (query, head) rows and 64 keys; ten rows to merge count as one."""
    s_q, h_q, h_kv = row.get("s_q", 1), row.get("h_q", 1), row.get("widths", (0, 0, 1))[2]
    sparse = row.get("topk", 0) > 0 or row.get("addressing") == "sparse"
    tiles = s_q * -(-h_q // 64) if sparse else h_kv * -(-s_q * h_q // h_kv // 64)
    blocks = _scanned(row, 64) // 64
    splits = row.get("num_splits") or 1
    if blocks:  # a split is a block at least
        blocks += splits - 1
    merged = s_q * h_q // 10 if splits > 1 else 0
    return _least_batch(row) * (tiles * blocks + merged)


def real_cost(row: Row) -> int:
    return _least_batch(row) * row.get("s_q", 1) * row.get("h_q", 1) * _scanned(row, 1)


@cache
def hopper_cover() -> tuple[list[Row], list[Any]]:
    """Rows of the pairwise cover of what the Hopper path serves."""
    return cover(HOPPER_FACTORS, lambda row: allowed(row) and real_cost(row) <= REAL_COST, lambda row: 0)


def _to_spec(row: Row, batch: int) -> ArgSpec:
    values = {name: value for name, value in row.items() if name not in ("addressing", "widths")}
    d_qk, d_v, h_kv = row["widths"]
    return ArgSpec(batch=batch, d_qk=d_qk, d_v=d_v, h_kv=h_kv, **values)


@cache
def small_cover() -> tuple[list[Row], list[Any]]:
    """Rows of the small pairwise cover, and the pairs that no call can show."""
    return cover(SMALL_FACTORS, lambda row: allowed(row) and small_cost(row) <= SMALL_COST, small_cost)


@cache
def real_cover() -> tuple[list[Row], list[Any]]:
    """Rows of the real-size pairwise cover, and the pairs that no call can show."""
    return cover(REAL_FACTORS, lambda row: allowed(row) and real_cost(row) <= REAL_COST, lambda row: 0)


def _specs(rows: list[Row], cost: Any, limit: int, most: int) -> list[ArgSpec]:
    """Rows as calls of 1 to `most` requests, as many as half of the limit allows."""
    specs = []
    for i, row in enumerate(rows):
        least = _least_batch(row)
        fitting = least * limit // 2 // max(cost(row), 1)
        specs.append(_to_spec(row, max(least, min(1 + i % most, fitting))))
    return specs


# Sizes and combinations that a pairwise cover of small calls leaves out.
SMALL_EXTRAS = (
    ArgSpec(batch=1, s_q=1, h_q=16, length=4096, num_splits=None),
    ArgSpec(batch=1, s_q=1, h_q=16, length=4099, page_size=61, num_splits=5, lengths="equal", std=0.1),
    ArgSpec(batch=1, s_q=2, h_q=8, length=1000, causal=True, std=100.0, num_splits=4),
    ArgSpec(batch=4, s_q=1, h_q=16, length=700, lengths="ragged", sink="finite"),
    ArgSpec(batch=2, s_q=2, h_q=128, length=200, lengths="ragged", causal=True),
    ArgSpec(batch=1, s_q=3, h_q=16, length=2, causal=True),
    ArgSpec(batch=1, s_q=7, h_q=3, length=5, page_size=2, causal=True, num_splits=2),
    ArgSpec(format="v32_fp8", batch=1, s_q=1, h_q=16, length=3000, topk=2047, scales="arbitrary", sink="finite"),
    ArgSpec(format="v32_fp8", batch=2, s_q=2, h_q=128, length=400, topk=192, index_kind="holes"),
    ArgSpec(format="v32_fp8", batch=1, s_q=1, h_q=8, length=100, topk=640, num_splits=5),
    ArgSpec(
        format="model1_fp8",
        d_qk=512,
        batch=2,
        s_q=2,
        h_q=64,
        length=300,
        page_size=256,
        topk=128,
        topk_length=True,
        extra=(64, 192, True),
        lengths="ragged",
        sink="infinite",
        index_kind="holes",
    ),
    ArgSpec(format="model1_fp8", d_qk=512, batch=1, s_q=1, h_q=64, length=200, page_size=2, topk=130, extra=(256, 70, False)),
    ArgSpec(format="fp16", batch=2, s_q=1, h_q=12, length=200, std=0.1, lengths="ragged"),
    ArgSpec(batch=2, s_q=3, h_q=20, length=150, page_size=53, d_qk=288, d_v=256, causal=True, sink="finite"),
    ArgSpec(batch=2, s_q=2, h_q=12, h_kv=4, length=150, d_qk=192, d_v=128, causal=True, lengths="ragged"),
    ArgSpec(batch=8, s_q=1, h_q=4, length=65, lengths="zeros", num_splits=2),
)

REAL_EXTRAS = (
    ArgSpec(batch=8, s_q=1, h_q=128, length=4096, lengths="ragged"),
    ArgSpec(batch=8, s_q=1, h_q=16, length=16384, lengths="ragged", sink="finite"),
    ArgSpec(batch=4, s_q=2, h_q=128, length=4096, causal=True, num_splits=4, std=0.1),
    ArgSpec(batch=5, s_q=4, h_q=16, length=4100, causal=True, lengths="wild"),
    ArgSpec(batch=2, s_q=1, h_q=128, length=4096, std=100.0, num_splits=7),
    ArgSpec(format="v32_fp8", batch=4, s_q=2, h_q=128, length=8192, topk=2048, scales="arbitrary", sink="finite"),
    ArgSpec(format="v32_fp8", batch=8, s_q=1, h_q=128, length=4096, lengths="ragged"),
    ArgSpec(
        format="model1_fp8",
        d_qk=512,
        batch=4,
        s_q=2,
        h_q=64,
        length=4096,
        page_size=256,
        topk=128,
        topk_length=True,
        extra=(64, 512, True),
        lengths="ragged",
        sink="infinite",
        index_kind="holes",
    ),
    ArgSpec(batch=300, s_q=1, h_q=8, length=140, lengths="ragged"),
    ArgSpec(format="fp16", batch=4, s_q=1, h_q=128, length=4096, std=0.1),
)


def production_specs() -> list[ArgSpec]:
    """The benchmark's rows with fewer requests and at most 65,536 keys, so that fp64 can follow."""
    specs: dict[ArgSpec, None] = {}
    for case in select_cases():
        spec = ArgSpec(
            format=case.format,
            s_q=case.s_q,
            h_q=case.h_q,
            d_qk=case.d_qk,
            page_size=case.page_size,
            length=min(case.keys, 65_536),
            lengths="ragged" if case.ragged else "equal",
            topk=case.topk,
            extra=(case.extra_page_size, case.extra_topk, False) if case.extra_topk else None,
            sink="finite" if case.attn_sink else "none",
            causal=case.causal,
        )
        row = {**asdict(spec), "addressing": spec.addressing}
        specs[replace(spec, batch=max(1, min(case.batch, 8, _least_batch(row) * REAL_COST // real_cost(row))))] = None
    return list(specs)


def _unique(specs: list[ArgSpec]) -> tuple[ArgSpec, ...]:
    return tuple({spec.id: spec for spec in specs}.values())


@cache
def small_specs() -> tuple[ArgSpec, ...]:
    """Calls that an interpreted kernel finishes in seconds."""
    return _unique([*_specs(small_cover()[0], small_cost, SMALL_COST, 3), *SMALL_EXTRAS])


@cache
def real_specs() -> tuple[ArgSpec, ...]:
    """Calls of the sizes that a GPU serves."""
    rows = [*real_cover()[0], *hopper_cover()[0]]
    return _unique([*_specs(rows, real_cost, REAL_COST, 8), *production_specs(), *REAL_EXTRAS])


def through_jax(items: Iterable[T]) -> list[T]:
    """Those of `items` that go through JAX: all, or where PyTorch is installed, too, every third."""
    return list(items)[:: 1 if importlib.util.find_spec("torch") is None else 3]


def spec_id(spec: ArgSpec) -> str:
    """For pytest's `ids`."""
    return spec.id
