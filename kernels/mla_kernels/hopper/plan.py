"""Planning the dense fast path for Hopper."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from ..device import DeviceFacts
from ..launch import Buffer, Launch, Plan, Refusal, TileDescriptor
from ..problem import INT32_MAX, Problem
from ..work import Work, cdiv, item_chunk, overridden
from .dense import dense_kernel
from .schedule import LONGEST_LINE
from .sizes import BLOCK, D_V, PANEL, ROPE, TILE, WARPS

SWITCH = "MLA_DECODE_HOPPER"  # an environment variable: "0" when this is imported turns the path off
TURNED_OFF = os.environ.get(SWITCH) == "0"

LEAST_PAGE = 16
MOST_COST = 16


@dataclass(frozen=True)
class Tuning:
    """What can be overridden for experiments.

    Attributes:
      fixed_cost: what starting and ending an item costs, in pairs of blocks.
      split_cost: what splitting costs a call, in pairs of blocks.
    """

    fixed_cost: int
    split_cost: int = 4

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not isinstance(value, int) or not 0 <= value <= MOST_COST:
                raise ValueError(f"{name}: expected an int of 0 to {MOST_COST}, got {value!r}")


def shared_memory(d_qk: int) -> int:
    """Bytes of shared memory of a program: queries, two blocks of keys, P0 (P1 lies over the RoPE part of the queries)."""
    tiles = TILE * (D_V + ROPE) + 2 * BLOCK * d_qk + TILE * BLOCK
    vectors = 4 * 4 * TILE
    barriers_and_arguments = 1024
    return 2 * tiles + vectors + barriers_and_arguments


def _q_row_stride(problem: Problem) -> int:
    """Elements from row to row of q as a matrix [b * s_q * h_q, d_qk]."""
    extents = (problem.h_q, problem.s_q, problem.batch)
    strides = reversed(problem.q_strides)
    return next((stride for extent, stride in zip(extents, strides, strict=True) if extent > 1), problem.d_qk)


def _stride_refusals(problem: Problem) -> list[Refusal]:
    """TMA describes q and the cache as matrices: rows at equal distances, all at multiples of 16 bytes."""
    found = []
    row = _q_row_stride(problem)
    extents = (problem.batch, problem.s_q, problem.h_q)
    expected = row
    flat = True
    for extent, stride in zip(reversed(extents), reversed(problem.q_strides), strict=True):
        flat = flat and (extent == 1 or stride == expected)
        expected *= extent
    if not flat or row % 8 or row < problem.d_qk:
        found.append(
            Refusal("q", f"needs rows at equal distances, multiples of 16 bytes, got strides {list(problem.q_strides)}")
        )
    cache = problem.cache
    if (
        cache.token_stride % 8
        or cache.token_stride < problem.d_qk
        or (cache.num_pages > 1 and cache.page_stride % cache.token_stride)
    ):
        reason = "needs tokens at multiples of 16 bytes and pages at multiples of the token stride"
        found.append(Refusal("kv_cache", f"{reason}, got strides {[cache.page_stride, cache.token_stride]}"))
    elif _cache_rows(problem) > INT32_MAX:
        found.append(Refusal("kv_cache", f"fewer than 2**31 rows, got {_cache_rows(problem)}"))
    return found


def _page_rows(problem: Problem) -> int:
    """Rows of the matrix that the cache is, from page to page."""
    cache = problem.cache
    return cache.page_stride // cache.token_stride if cache.num_pages > 1 else cache.page_size


def _cache_rows(problem: Problem) -> int:
    return (problem.cache.num_pages - 1) * _page_rows(problem) + problem.cache.page_size


def refusals(problem: Problem, facts: DeviceFacts) -> tuple[Refusal, ...]:
    """Why the fast path does not serve `problem` on this device; empty if it does."""
    found = []
    if TURNED_OFF:
        found.append(Refusal("implementation", f"turned off by {SWITCH}=0"))
    if facts.interpreted:
        found.append(Refusal("q", "Gluon kernels cannot be interpreted"))
    elif facts.capability != (9, 0):
        found.append(Refusal("q", f"needs a GPU of compute capability 9.0, {facts.name} has {facts.capability}"))
    elif facts.shared_memory < shared_memory(problem.d_qk):
        found.append(Refusal("q", f"needs {shared_memory(problem.d_qk)} bytes of shared memory, got {facts.shared_memory}"))
    if problem.sparse:
        found.append(Refusal("indices", "serves dense calls only"))
    if problem.cache.format.quantised:
        found.append(Refusal("kv_cache", f"serves bf16 and fp16 caches only, got {problem.cache.format.name}"))
    if problem.d_v != D_V or problem.d_qk not in (D_V, D_V + ROPE):
        found.append(Refusal("q", f"needs d_qk 576 or 512 with d_v 512, got {problem.d_qk} with {problem.d_v}"))
    if problem.h_kv != 1:
        found.append(Refusal("kv_cache", f"needs one key-value head, got {problem.h_kv}"))
    size = problem.cache.page_size
    if size < LEAST_PAGE or (BLOCK % size and size % BLOCK):
        found.append(Refusal("kv_cache", f"needs pages of 16, 32 or a multiple of 64 tokens, got {size}"))
    if problem.cache.num_pages == 0:
        found.append(Refusal("kv_cache", "needs at least one page"))
    if not problem.aligned:
        found.append(Refusal("q", "needs q and kv_cache to start at multiples of 16 bytes"))
    if found:
        return tuple(found)
    found += _stride_refusals(problem)
    if problem.width * size > INT32_MAX - 2 * max(size, 1024):
        found.append(Refusal("block_table", f"room for fewer than 2**31 keys a row, got {problem.width * size}"))
    line = problem.batch * (problem.max_tokens // (2 * BLOCK) + 1 + MOST_COST)
    if problem.num_splits is None and line >= LONGEST_LINE:
        found.append(
            Refusal("block_table", f"room for fewer than {LONGEST_LINE * 2 * BLOCK} keys in all, got {line * 2 * BLOCK}")
        )
    if max(problem.table_strides) > INT32_MAX:
        found.append(Refusal("block_table", f"strides below 2**31, got {list(problem.table_strides)}"))
    rows = problem.batch * problem.s_q * problem.h_q
    programs = problem.batch * (problem.num_splits or 1) * cdiv(problem.s_q * problem.h_q, TILE)
    if rows > INT32_MAX - TILE:
        found.append(Refusal("q", f"fewer than 2**31 rows, got {rows}"))
    elif programs > INT32_MAX:
        found.append(Refusal("num_splits" if problem.num_splits else "q", f"fewer than 2**31 programs, got {programs}"))
    return tuple(found)


def plan_dense(problem: Problem, facts: DeviceFacts, overrides: dict[str, int] | None = None) -> Plan:
    """The plan of the fast path; `refusals` must be empty.  `overrides` replaces fields of `Tuning`."""
    rows = problem.s_q * problem.h_q
    row_tiles = cdiv(rows, TILE)
    programs = max(1, facts.multiprocessors // row_tiles)
    # With a program or more for every item all of them start and end about as many.
    tuning = overridden(Tuning(fixed_cost=0 if problem.batch <= programs else 2), overrides)
    if problem.num_splits is not None:
        work = Work.fixed(problem, problem.num_splits)
    else:
        work = Work.made_by_each(problem, 2 * BLOCK, programs)
    cache = problem.cache
    constants = work.output_constants()
    attend = Launch(
        kernel=dense_kernel,
        inputs=(
            TileDescriptor("q", (problem.batch * rows, problem.d_qk), _q_row_stride(problem), (TILE, PANEL)),
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
            problem.num_splits or 0,
        ),
        outputs=("out", "lse", "partial_out", "partial_lse", "schedule"),
        constexprs={
            **{
                name: constants[name]
                for name in ("S_Q", "H_Q", "HAS_SINK", "OUT_STRIDE_B", "OUT_STRIDE_S", "OUT_STRIDE_H", "FIXED_SPLITS")
            },
            "CAUSAL": problem.causal,
            "HAS_ROPE": problem.d_qk > D_V,
            "PAGE_SIZE": cache.page_size,
            "PAGE_ROWS": _page_rows(problem),
            "UNIT": work.unit,
            "FIXED_COST": tuning.fixed_cost,
            "SPLIT_COST": tuning.split_cost,
            "ITEM_CHUNK": item_chunk(problem.batch),
            "ROW_TILES": row_tiles,
        },
        grid=(work.launched * row_tiles, 1, 1),
        num_warps=WARPS,
        num_stages=1,
    )
    launches = (attend, *work.combine_launches(facts))
    details = {**asdict(tuning), "warps": f"{WARPS} + {WARPS} + 1", "tiles_per_item": row_tiles, **work.details()}
    # A list of split items is an operand also where the splits are fixed and nobody writes or reads it.
    buffers = {"schedule": Buffer((1,), "int32"), **work.buffers(facts)}
    return Plan("hopper", problem, facts, launches, buffers, details)
