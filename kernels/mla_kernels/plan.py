"""Planning the portable implementation: a pure function from a problem and device facts to kernels, grids and scratch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

from .attend import attend_kernel
from .device import DeviceFacts
from .launch import Launch, Plan, Refusal
from .problem import INT32_MAX, CacheSpec, Problem
from .work import Geometry, Work, cdiv, overridden, power_of_two

MAX_D_V = 512
MAX_REST = 128  # columns of a key beyond d_v


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and the cost model of one plan; every field can be overridden for experiments.

    Attributes:
      block_h: rows (queries times heads) of a tile.
      block_n: keys of a block.
      num_warps, num_stages: Triton's launch options.
      programs_per_sm: programs that share a multiprocessor.
      fixed_cost: what starting and ending an item costs, in blocks of keys.
      split_cost: what splitting costs a call (partial results and their merge), in blocks of keys.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    fixed_cost: int = 2
    split_cost: int = 5

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < (0 if name.endswith("cost") else 1):
                raise ValueError(f"{name}: expected a positive int, got {value!r}")
        for name in ("block_h", "block_n", "num_warps"):
            value = getattr(self, name)
            if value & (value - 1) or (value < 16 and name != "num_warps"):
                raise ValueError(f"{name}: expected a power of two of at least 16 (num_warps: 1), got {value}")


def refusals(problem: Problem, facts: DeviceFacts) -> tuple[Refusal, ...]:
    """Why the portable kernels do not serve `problem` on this device; empty if they do."""
    found = []
    if not facts.interpreted and facts.capability < (8, 0):
        found.append(Refusal("q", f"needs a GPU of compute capability 8.0 or more, {facts.name} has {facts.capability}"))
    if problem.d_v > MAX_D_V:
        found.append(Refusal("head_dim_v", f"at most {MAX_D_V}, got {problem.d_v}"))
    if problem.d_qk - problem.d_v > MAX_REST:
        found.append(Refusal("q", f"d_qk - head_dim_v at most {MAX_REST}, got {problem.d_qk} - {problem.d_v}"))
    table = "indices" if problem.sparse else "block_table"
    for argument, strides in ((table, problem.table_strides), ("extra_indices", problem.extra_table_strides)):
        if max(strides) > INT32_MAX:
            found.append(Refusal(argument, f"strides below 2**31, got {list(strides)}"))
    # Places of keys are counted in 32 bits, and by whole blocks and pages.
    most = INT32_MAX - 2 * max(problem.cache.page_size, 1024)
    tokens = problem.width * (1 if problem.sparse else problem.cache.page_size) + problem.extra_width
    if tokens > most:
        found.append(Refusal(table, f"room for at most {most} keys a row, got {tokens}"))
    if not found:
        geometry = Geometry.of(problem)
        programs = geometry.items * (problem.num_splits or 1) * problem.h_kv * cdiv(geometry.rows, 16)
        if programs > INT32_MAX:
            found.append(Refusal("num_splits" if problem.num_splits else "q", f"fewer than 2**31 programs, got {programs}"))
    return tuple(found)


# Measured on an H200.  By rows of an item for plain caches.  Quantised ones take 64 however few there are: it is decoding that
# takes the time, and warpgroups multiply straight from shared memory.
_HOPPER_TILES = {16: Tiles(16, 64, 8, 5), 32: Tiles(32, 64, 8, 5), 64: Tiles(64, 64, 8, 2)}
_HOPPER_ROPE_IN_VALUES = Tiles(64, 64, 8, 3)  # with two stages 1 % faster, but it spills
# Compute capability 10 multiplies tiles of 64 rows in tensor memory, which leaves registers to the rest.
_BLACKWELL_TILES = {16: (), 32: (), 64: (Tiles(64, 32, 8, 3),)}
# For plain caches, for quantised ones, and for quantised ones whose values end in the RoPE part: merging it takes registers,
# and mma.sync spills in the inner loop with more than 16 rows.  Chosen by what compiles without spilling, not measured; with
# fewer than 64 keys a block Triton gives some of the scores' products to several warps.
_OTHER_TILES = {
    16: (
        (Tiles(16, 32, 8, 3), Tiles(16, 16, 4, 1)),
        (Tiles(16, 32, 8, 3), Tiles(16, 16, 8, 3), Tiles(16, 16, 4, 1)),
        (Tiles(16, 32, 8, 3), Tiles(16, 16, 8, 3), Tiles(16, 16, 4, 1)),
    ),
    32: (
        (Tiles(32, 64, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 16, 8, 1), Tiles(16, 16, 4, 1)),
        (Tiles(32, 32, 8, 2), Tiles(16, 16, 8, 3), Tiles(16, 16, 4, 1)),
        (Tiles(16, 32, 8, 3), Tiles(16, 16, 8, 3), Tiles(16, 16, 4, 1)),
    ),
    64: (
        (Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 3), Tiles(32, 32, 8, 2), Tiles(32, 16, 8, 1), Tiles(16, 16, 4, 1)),
        (Tiles(32, 32, 8, 2), Tiles(16, 16, 8, 3), Tiles(16, 16, 4, 1)),
        (Tiles(16, 32, 8, 3), Tiles(16, 16, 8, 3), Tiles(16, 16, 4, 1)),
    ),
}


def _tile_candidates(problem: Problem, facts: DeviceFacts, rows: int) -> tuple[Tiles, ...]:
    size = 16 if rows <= 16 else 32 if rows <= 32 else 64
    quantised = problem.cache.format.quantised
    rope_in_values = quantised and problem.d_qk == problem.d_v
    first: tuple[Tiles, ...] = ()
    if facts.capability[0] == 9:
        first = (_HOPPER_ROPE_IN_VALUES if rope_in_values else _HOPPER_TILES[64 if quantised else size],)
    elif facts.capability[0] == 10:
        first = _BLACKWELL_TILES[size]
    return first + _OTHER_TILES[size][quantised + rope_in_values]


def _wgmma(tiles: Tiles, facts: DeviceFacts) -> bool:
    """Whether Triton multiplies by warpgroups, with both factors in shared memory."""
    return facts.capability[0] == 9 and tiles.block_h >= 64


def _mma_sync(tiles: Tiles, facts: DeviceFacts) -> bool:
    """Whether Triton multiplies by single warps, which read both factors into registers."""
    return facts.capability[0] not in (9, 10) or tiles.block_h < 64


def _shared_memory(tiles: Tiles, problem: Problem, geometry: Geometry, facts: DeviceFacts) -> int:
    """An upper estimate of a program's shared memory in bytes: q, the blocks of keys in flight or in use, and P."""
    width = 2 * (geometry.block_c + geometry.block_r)
    ahead = max(1, (tiles.num_stages - 1) // 2)  # of the stages one half is for the indices of the keys
    wgmma = _wgmma(tiles, facts)
    if problem.cache.format.quantised:  # raw bytes are staged, the decoded block lies beside them, for mma.sync in two orders
        keys = tiles.block_n * (width * (1 if wgmma else 2) + problem.cache.format.token_bytes * ahead)
    else:  # wgmma still reads a block while the next one is awaited
        keys = tiles.block_n * width * (ahead + wgmma)
    return tiles.block_h * width + keys + 9216


def choose_tiles(problem: Problem, facts: DeviceFacts, overrides: dict[str, int] | None = None) -> Tiles:
    """Tile sizes by rows per item and device, the first candidate that fits the shared memory."""
    geometry = Geometry.of(problem)
    if facts.interpreted:
        chosen = Tiles(power_of_two(min(max(geometry.rows, 16), 64)), 64, 4, 1)
    else:
        candidates = _tile_candidates(problem, facts, geometry.rows)
        fitting = (t for t in candidates if _shared_memory(t, problem, geometry, facts) <= facts.shared_memory)
        chosen = next(fitting, candidates[-1])
    return overridden(chosen, overrides)


def _static_splits(tokens: tuple[int, int], items: int, programs: int, tiles: Tiles) -> int:
    """Splits of each item when every item has the same, statically known, number of keys."""
    best, best_time = 1, None
    for splits in range(1, max(1, programs) + 1):
        blocks = cdiv(cdiv(sum(tokens), splits), tiles.block_n) + (1 if tokens[1] else 0)
        time = cdiv(items * splits, programs) * (blocks + tiles.fixed_cost) + (tiles.split_cost if splits > 1 else 0)
        if best_time is None or time < best_time:
            best, best_time = splits, time
    return best


def cache_constants(spec: CacheSpec | None, prefix: str = "") -> dict[str, Any]:
    """What kernels know of where the rows of a cache and their scales lie."""
    if spec is None:
        names = ("PAGE_SIZE", "PAGE_STRIDE", "TOKEN_STRIDE", "SCALE_BASE", "SCALE_STRIDE")
        return {prefix + name: 1 for name in names}
    fmt = spec.format
    in_page = fmt.scale_in_page
    return {
        prefix + "PAGE_SIZE": spec.page_size,
        prefix + "PAGE_STRIDE": spec.page_stride,
        prefix + "TOKEN_STRIDE": spec.token_stride,
        prefix + "SCALE_BASE": spec.page_size * fmt.row_bytes if in_page else fmt.scale_offset,
        prefix + "SCALE_STRIDE": fmt.scale_bytes if in_page else spec.token_stride,
    }


def _one_page(problem: Problem, tiles: Tiles, unit: int) -> bool:
    """Whether a block of keys lies in one page, at equal distances that add up in 32 bits."""
    aligned = problem.cache.page_size % tiles.block_n == 0 and unit % tiles.block_n == 0
    return not problem.sparse and aligned and tiles.block_n * problem.cache.token_stride <= INT32_MAX


def _row_alignment(problem: Problem) -> int:
    """What the offsets of all rows are known to be multiples of, in elements of the cache; at most 16."""
    specs = [spec for spec in (problem.cache, problem.extra) if spec is not None]
    return gcd(16, *(spec.page_stride for spec in specs), *(spec.token_stride for spec in specs))


def plan_decode(problem: Problem, facts: DeviceFacts, overrides: dict[str, int] | None = None) -> Plan:
    """The portable plan: schedule (unless it is static), attention, combine (unless nothing can be split).

    `overrides` replaces fields of `Tiles`.  The problem must not be empty, and `refusals` must be.
    """
    geometry = Geometry.of(problem)
    tiles = choose_tiles(problem, facts, overrides)
    fmt = problem.cache.format
    row_tiles = cdiv(geometry.rows, tiles.block_h)
    item_tiles = problem.h_kv * row_tiles
    programs = max(1, facts.multiprocessors * tiles.programs_per_sm // item_tiles)

    num_splits = problem.num_splits
    if num_splits is None and problem.sparse and not problem.has_length and not problem.has_extra_length:
        num_splits = _static_splits((problem.width, problem.extra_width), geometry.items, programs, tiles)
    if num_splits is not None:
        work = Work.fixed(problem, num_splits)
    else:
        work = Work.made(problem, tiles.block_n, programs)

    has_extra = problem.extra is not None
    extra_cache, extra_table = ("extra_kv_cache", "extra_table") if has_extra else ("kv_cache", "table")
    attend = Launch(
        kernel=attend_kernel,
        inputs=(
            "q",
            "kv_cache",
            "table",
            work.lengths,
            extra_cache,
            extra_table,
            work.extra_lengths,
            "softmax_scale",
            work.sink,
            work.schedule,
        ),
        scalars=(
            *problem.table_strides,
            *problem.extra_table_strides,
            min(problem.cache.num_slots - 1, INT32_MAX),
            min(problem.extra.num_slots - 1, INT32_MAX) if problem.extra else -1,
            problem.max_tokens,
            problem.extra_width,
            num_splits or 0,
        ),
        outputs=("out", "lse", "partial_out", "partial_lse"),
        constexprs={
            **work.output_constants(),
            "D_QK": problem.d_qk,
            "CAUSAL": problem.causal,
            "HAS_LENGTH": problem.has_length,
            "HAS_EXTRA": has_extra,
            "HAS_EXTRA_LENGTH": problem.has_extra_length,
            "Q_STRIDE_B": problem.q_strides[0],
            "Q_STRIDE_S": problem.q_strides[1],
            "Q_STRIDE_H": problem.q_strides[2],
            **cache_constants(problem.cache),
            **cache_constants(problem.extra, "EXTRA_"),
            "HEAD_STRIDE": problem.cache.head_stride,
            "SCALE_TILE": fmt.scale_tile,
            "NUM_SCALES": fmt.num_scales,
            "SCALE_E8M0": fmt.scale_dtype == "e8m0",
            "ROPE_OFFSET": fmt.rope_offset,
            "ROW_ALIGN": _row_alignment(problem),
            "INTERPRETED": facts.interpreted,
            "NATIVE_FP8": facts.capability >= (8, 9),
            "UNIT": work.unit,
            "ONE_PAGE": _one_page(problem, tiles, work.unit),
            # A sum across warps in every block costs more than a tile of sums, while registers last.
            "LATE_SUM": tiles.block_h <= 32,
            # The interpreter takes the same way, to have it tested.
            "QK_APART": _wgmma(tiles, facts) or (facts.interpreted and tiles.block_h >= 64),
            "HOIST_QUERIES": _mma_sync(tiles, facts),
            "ROW_TILES": row_tiles,
            "BLOCK_H": tiles.block_h,
            "BLOCK_N": tiles.block_n,
            "BLOCK_C": geometry.block_c,
            "BLOCK_R": geometry.block_r,
        },
        grid=(work.launched * item_tiles, 1, 1),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    launches = (
        *work.schedule_launches(tiles.fixed_cost, tiles.split_cost),
        attend,
        *work.combine_launches(facts),
    )
    details = {**asdict(tiles), "tiles_per_item": item_tiles, **work.details()}
    return Plan("triton", problem, facts, launches, work.buffers(facts), details)
