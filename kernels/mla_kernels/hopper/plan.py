"""Planning the fast paths for Hopper: dense calls over 16-bit caches, and sparse calls over fp8 caches."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..device import DeviceFacts
from ..launch import Buffer, Launch, Plan, Refusal, TileDescriptor
from ..plan import cache_constants
from ..problem import INT32_MAX, Problem
from ..work import Geometry, Work, cdiv, overridden
from .dense import dense_kernel
from .schedule import LONGEST_LINE
from .sizes import BLOCK, D_V, PANEL, ROPE, TILE, WARPS
from .sparse import sparse_kernel

SWITCH = "MLA_DECODE_HOPPER"  # an environment variable: "0" when this is imported turns the path off
TURNED_OFF = os.environ.get(SWITCH) == "0"

SPARSE_FORMATS = ("v32_fp8", "model1_fp8")  # that the kernel knows the tiles of
LEAST_PAGE = 16
MOST_COST = 16


@dataclass(frozen=True)
class Tuning:
    """What can be overridden for experiments.

    Attributes:
      fixed_cost: what starting and ending an item costs, in pairs of blocks, where there are more items than programs.
      split_cost: what splitting costs a call, in pairs of blocks.
    """

    fixed_cost: int = 2
    split_cost: int = 4

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not isinstance(value, int) or not 0 <= value <= MOST_COST:
                raise ValueError(f"{name}: expected an int of 0 to {MOST_COST}, got {value!r}")


def shared_memory(problem: Problem) -> int:
    """Bytes of shared memory of a program: queries, two blocks of keys, P0.

    P1 lies over the RoPE part of the queries (dense) or over that of its own block (sparse).
    """
    rope = problem.d_qk - D_V if problem.sparse else ROPE
    tiles = TILE * (D_V + rope) + 2 * BLOCK * problem.d_qk + TILE * BLOCK
    if problem.sparse and not rope:
        tiles += TILE * BLOCK
    vectors = (4 * TILE + 2 * BLOCK * problem.sparse) * 4
    barriers_and_arguments = 1024
    return 2 * tiles + vectors + barriers_and_arguments


def _q_axes(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Extent and stride of heads, queries and the batch."""
    # With a number of splits a request gets the same kernel alone as in a batch.
    batch = problem.batch if problem.num_splits is None else max(problem.batch, 2)
    return tuple(zip((problem.h_q, problem.s_q, batch), reversed(problem.q_strides), strict=True))


def _q_row_stride(problem: Problem) -> int:
    """Elements from row to row of q as a matrix [b * s_q * h_q, d_qk]."""
    return next((stride for extent, stride in _q_axes(problem) if extent > 1), problem.d_qk)


def _query_refusals(problem: Problem) -> list[Refusal]:
    """TMA describes q as a matrix: rows at equal distances, all at multiples of 16 bytes."""
    row = _q_row_stride(problem)
    expected = row
    flat = True
    for extent, stride in _q_axes(problem):
        flat = flat and (extent == 1 or stride == expected)
        expected *= extent
    if not flat or row % 8 or row < problem.d_qk:
        return [Refusal("q", f"needs rows at equal distances, multiples of 16 bytes, got strides {list(problem.q_strides)}")]
    return []


def _dense_cache_refusals(problem: Problem) -> list[Refusal]:
    """TMA describes the cache as a matrix, too."""
    cache = problem.cache
    if (
        cache.token_stride % 8
        or cache.token_stride < problem.d_qk
        or (cache.num_pages > 1 and cache.page_stride % cache.token_stride)
    ):
        reason = "needs tokens at multiples of 16 bytes and pages at multiples of the token stride"
        return [Refusal("kv_cache", f"{reason}, got strides {[cache.page_stride, cache.token_stride]}")]
    if _cache_rows(problem) > INT32_MAX:
        return [Refusal("kv_cache", f"fewer than 2**31 rows, got {_cache_rows(problem)}")]
    return []


def _sparse_cache_refusals(problem: Problem) -> list[Refusal]:
    """Rows are loaded by 16 bytes."""
    found = []
    for argument, spec in (("kv_cache", problem.cache), ("extra_kv_cache", problem.extra)):
        if spec is not None and (spec.page_stride % 16 or spec.token_stride % 16):
            strides = [spec.page_stride, spec.token_stride]
            found.append(Refusal(argument, f"needs pages and tokens at multiples of 16 bytes, got strides {strides}"))
    return found


def _page_rows(problem: Problem) -> int:
    """Rows of the matrix that the cache is, from page to page."""
    cache = problem.cache
    return cache.page_stride // cache.token_stride if cache.num_pages > 1 else cache.page_size


def _cache_rows(problem: Problem) -> int:
    return (problem.cache.num_pages - 1) * _page_rows(problem) + problem.cache.page_size


def refusals(problem: Problem, facts: DeviceFacts) -> tuple[Refusal, ...]:
    """Why the fast paths do not serve `problem` on this device; empty if one does."""
    found = []
    if TURNED_OFF:
        found.append(Refusal("implementation", f"turned off by {SWITCH}=0"))
    if facts.interpreted:
        found.append(Refusal("q", "Gluon kernels cannot be interpreted"))
    elif facts.capability != (9, 0):
        found.append(Refusal("q", f"needs a GPU of compute capability 9.0, {facts.name} has {facts.capability}"))
    elif facts.shared_memory < shared_memory(problem):
        found.append(Refusal("q", f"needs {shared_memory(problem)} bytes of shared memory, got {facts.shared_memory}"))
    cache = problem.cache
    if problem.sparse and cache.format.name not in SPARSE_FORMATS:
        found.append(Refusal("indices", f"served over {' and '.join(SPARSE_FORMATS)} caches only, got {cache.format.name}"))
    if not problem.sparse and cache.format.quantised:
        found.append(Refusal("kv_cache", f"serves dense calls over bf16 and fp16 caches only, got {cache.format.name}"))
    if problem.d_v != D_V or problem.d_qk not in (D_V, D_V + ROPE):
        found.append(Refusal("q", f"needs d_qk 576 or 512 with d_v 512, got {problem.d_qk} with {problem.d_v}"))
    if problem.h_kv != 1:
        found.append(Refusal("kv_cache", f"needs one key-value head, got {problem.h_kv}"))
    size = cache.page_size
    if not problem.sparse and (size < LEAST_PAGE or (BLOCK % size and size % BLOCK)):
        found.append(Refusal("kv_cache", f"needs pages of 16, 32 or a multiple of 64 tokens, got {size}"))
    if not problem.sparse and cache.num_pages == 0:
        found.append(Refusal("kv_cache", "needs at least one page"))
    if not problem.aligned:
        found.append(Refusal("q", "needs q and the caches to start at multiples of 16 bytes"))
    if found:
        return tuple(found)
    found += _query_refusals(problem)
    found += _sparse_cache_refusals(problem) if problem.sparse else _dense_cache_refusals(problem)
    table = "indices" if problem.sparse else "block_table"
    keys = problem.width * (1 if problem.sparse else size) + problem.extra_width
    if keys > INT32_MAX - 2 * max(size, 1024):
        wider = "extra_indices" if problem.extra_width > problem.width else table
        found.append(Refusal(wider, f"room for fewer than 2**31 keys a row, got {keys}"))
    geometry = Geometry.of(problem)
    line = geometry.items * (problem.max_tokens // (2 * BLOCK) + problem.extra_width // (2 * BLOCK) + 2 + MOST_COST)
    if problem.num_splits is None and line >= LONGEST_LINE:
        found.append(Refusal(table, f"room for fewer than {LONGEST_LINE * 2 * BLOCK} keys in all, got {line * 2 * BLOCK}"))
    for argument, strides in ((table, problem.table_strides), ("extra_indices", problem.extra_table_strides)):
        if max(strides) > INT32_MAX:
            found.append(Refusal(argument, f"strides below 2**31, got {list(strides)}"))
    rows = problem.batch * problem.s_q * problem.h_q
    programs = geometry.items * (problem.num_splits or 1) * cdiv(geometry.rows, TILE)
    if rows > INT32_MAX - TILE:
        found.append(Refusal("q", f"fewer than 2**31 rows, got {rows}"))
    elif programs > INT32_MAX:
        found.append(Refusal("num_splits" if problem.num_splits else "q", f"fewer than 2**31 programs, got {programs}"))
    return tuple(found)


def _work(problem: Problem, facts: DeviceFacts, overrides: dict[str, int] | None) -> tuple[Work, Tuning, int]:
    """The work, its costs, and the row tiles of an item."""
    geometry = Geometry.of(problem)
    row_tiles = cdiv(geometry.rows, TILE)
    programs = max(1, facts.multiprocessors // row_tiles)
    tuning = overridden(Tuning(), overrides)
    if problem.num_splits is not None:
        return replace(Work.fixed(problem, problem.num_splits), compact=True), tuning, row_tiles
    even = _even_pieces(problem, geometry.items, programs, tuning)
    return replace(Work.made_by_each(problem, 2 * BLOCK, programs, even), compact=True), tuning, row_tiles


def _even_pieces(problem: Problem, items: int, programs: int, tuning: Tuning) -> int:
    """Pieces of every item where all have as many keys, as known here, and no schedule could do better; otherwise 0."""
    if not problem.sparse or problem.has_length or problem.has_extra_length:
        return 0
    units = max(cdiv(problem.max_tokens, 2 * BLOCK) + cdiv(problem.extra_width, 2 * BLOCK), 1)
    fixed_cost = 0 if items <= programs else tuning.fixed_cost
    cost = units + fixed_cost
    balanced = cdiv(items * cost, programs)
    if cost * cdiv(items, programs) <= balanced + fixed_cost + tuning.split_cost:
        return 1
    pieces = min(range(1, max(programs // items, 1) + 1), key=lambda pieces: cdiv(units, pieces))
    return pieces if pieces > 1 and cdiv(units, pieces) <= balanced else 0


def _constants(problem: Problem, work: Work, tuning: Tuning, row_tiles: int) -> dict[str, Any]:
    """What both kernels know of a call."""
    constants = work.output_constants()
    return {
        **{
            name: constants[name]
            for name in ("S_Q", "H_Q", "HAS_SINK", "OUT_STRIDE_B", "OUT_STRIDE_S", "OUT_STRIDE_H", "FIXED_SPLITS")
        },
        "HAS_ROPE": problem.d_qk > D_V,
        "UNIT": work.unit,
        "FIXED_COST": tuning.fixed_cost,
        "SPLIT_COST": tuning.split_cost,
        "ROW_TILES": row_tiles,
    }


def _queries(problem: Problem) -> TileDescriptor:
    rows = problem.batch * problem.s_q * problem.h_q
    return TileDescriptor("q", (rows, problem.d_qk), _q_row_stride(problem), (TILE, PANEL))


def _plan(problem: Problem, facts: DeviceFacts, attend: Launch, work: Work, tuning: Tuning, row_tiles: int, warps: str) -> Plan:
    launches = (attend, *work.combine_launches(facts))
    details = {**asdict(tuning), "warps": warps, "tiles_per_item": row_tiles, **work.details()}
    # A list of split items is an operand also where nobody writes or reads it, as the pieces of items are known.
    buffers = {"schedule": Buffer((1,), "int32"), **work.buffers(facts)}
    return Plan("hopper", problem, facts, launches, buffers, details)


def plan_decode(problem: Problem, facts: DeviceFacts, overrides: dict[str, int] | None = None) -> Plan:
    """The plan of a fast path; `refusals` must be empty.  `overrides` replaces fields of `Tuning`."""
    return (plan_sparse if problem.sparse else plan_dense)(problem, facts, overrides)


def plan_dense(problem: Problem, facts: DeviceFacts, overrides: dict[str, int] | None = None) -> Plan:
    """As `plan_decode`, for a dense call over a cache of 16-bit values."""
    work, tuning, row_tiles = _work(problem, facts, overrides)
    cache = problem.cache
    attend = Launch(
        kernel=dense_kernel,
        inputs=(
            _queries(problem),
            TileDescriptor(
                "kv_cache", (_cache_rows(problem), problem.d_qk), cache.token_stride, (min(cache.page_size, BLOCK), PANEL)
            ),
            "table",
            "lengths",
            "softmax_scale",
            work.sink,
        ),
        scalars=(
            problem.table_strides[0],
            problem.max_tokens,
            problem.batch,
            work.programs,
            problem.num_splits or work.even,
        ),
        outputs=("out", "lse", "partial_out", "partial_lse", "schedule"),
        constexprs={
            **_constants(problem, work, tuning, row_tiles),
            "CAUSAL": problem.causal,
            "PAGE_SIZE": cache.page_size,
            "PAGE_ROWS": _page_rows(problem),
        },
        grid=(work.launched * row_tiles, 1, 1),
        num_warps=WARPS,
        num_stages=1,
    )
    return _plan(problem, facts, attend, work, tuning, row_tiles, f"{WARPS} + {WARPS} + 1")


def plan_sparse(problem: Problem, facts: DeviceFacts, overrides: dict[str, int] | None = None) -> Plan:
    """As `plan_decode`, for a sparse call over an fp8 cache."""
    work, tuning, row_tiles = _work(problem, facts, overrides)
    has_extra = problem.extra is not None
    fmt = problem.cache.format
    attend = Launch(
        kernel=sparse_kernel,
        inputs=(
            _queries(problem),
            "kv_cache",
            "table",
            work.lengths,
            "extra_kv_cache" if has_extra else "kv_cache",
            "extra_table" if has_extra else "table",
            work.extra_lengths,
            "softmax_scale",
            work.sink,
        ),
        scalars=(
            *problem.table_strides,
            *problem.extra_table_strides,
            min(problem.cache.num_slots - 1, INT32_MAX),
            min(problem.extra.num_slots - 1, INT32_MAX) if problem.extra else -1,
            problem.max_tokens,
            problem.extra_width,
            work.geometry.items,
            work.programs,
            problem.num_splits or work.even,
        ),
        outputs=("out", "lse", "partial_out", "partial_lse", "schedule"),
        constexprs={
            **_constants(problem, work, tuning, row_tiles),
            "HAS_LENGTH": problem.has_length,
            "HAS_EXTRA": has_extra,
            "HAS_EXTRA_LENGTH": problem.has_extra_length,
            **cache_constants(problem.cache),
            **cache_constants(problem.extra, "EXTRA_"),
            "SCALE_E8M0": fmt.scale_dtype == "e8m0",
            "ROPE_OFFSET": fmt.rope_offset,
        },
        grid=(work.launched * row_tiles, 1, 1),
        num_warps=WARPS,
        num_stages=1,
    )
    return _plan(problem, facts, attend, work, tuning, row_tiles, f"{WARPS} + {WARPS} + {WARPS} + {WARPS}")
