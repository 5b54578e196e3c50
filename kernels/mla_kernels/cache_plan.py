"""Planning the kernels that write, read and copy a cache: pure functions from a problem and device facts to launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .cache_kernels import append_kernel, copy_pages_kernel, read_kernel
from .cache_problem import Append, CacheProblem, CopyPages, Read
from .device import DeviceFacts
from .launch import Buffer, Launch, Refusal
from .plan import cache_constants
from .problem import INT32_MAX, CacheSpec
from .work import cdiv, overridden, power_of_two

COPIED_BYTES = 8192  # by one program


@dataclass(frozen=True)
class TokenTiles:
    """How many tokens one program takes, and with how many warps.  The same for every number of tokens of a call, so that
    none compiles anew."""

    block_n: int = 4
    num_warps: int = 4


@dataclass(frozen=True)
class CachePlan:
    """How a call is served on a device; the counterpart of `Plan`.

    Launches name the arrays `kv_cache`, `latent`, `rope`, `slots`, `source_pages` and `target_pages`.  `buffers` holds what
    is returned beside the cache: `rows` of a `Read`.
    """

    problem: CacheProblem
    facts: DeviceFacts
    launches: tuple[Launch, ...]
    buffers: dict[str, Buffer] = field(default_factory=dict)

    @property
    def dtypes(self) -> dict[str, str]:
        """Of the arrays of the call, by their names."""
        if isinstance(self.problem, Append):
            names = ["latent", "rope", "slots"] if self.problem.d_rope else ["latent", "slots"]
        else:
            names = ["slots"] if isinstance(self.problem, Read) else ["source_pages", "target_pages"]
        return {"kv_cache": self.problem.cache.format.dtype, **dict(zip(names, self.problem.dtypes, strict=True))}


def refusals(problem: CacheProblem, facts: DeviceFacts) -> tuple[Refusal, ...]:
    """Why the kernels do not serve `problem` on this device; empty if they do."""
    found = []
    if not facts.interpreted and facts.capability < (8, 0):
        reason = f"needs a GPU of compute capability 8.0 or more, {facts.name} has {facts.capability}"
        found.append(Refusal("kv_cache", reason))
    if isinstance(problem, CopyPages):
        programs = _copy_grid(problem)
        if programs > INT32_MAX:
            found.append(Refusal("source_pages", f"fewer than 2**31 blocks of {COPIED_BYTES} bytes, got {programs}"))
    return tuple(found)


def plan(problem: CacheProblem, facts: DeviceFacts, overrides: dict[str, int] | None = None) -> CachePlan:
    """The launch that serves a problem that is not empty; `overrides` replaces fields of `TokenTiles`."""
    if isinstance(problem, Append):
        return _plan_append(problem, facts, overrides)
    if isinstance(problem, Read):
        return _plan_read(problem, facts, overrides)
    return _plan_copy_pages(problem, facts)


def _tiles(width: int, overrides: dict[str, int] | None) -> TokenTiles:
    """Rows of up to 512 values are taken four at a time, longer ones fewer."""
    return overridden(TokenTiles(block_n=max(1, 2048 // max(width, 512))), overrides)


def _format_constants(cache: CacheSpec, facts: DeviceFacts) -> dict[str, Any]:
    fmt = cache.format
    return {
        **cache_constants(cache),
        "SCALE_TILE": fmt.scale_tile,
        "NUM_SCALES": fmt.num_scales,
        "SCALE_E8M0": fmt.scale_dtype == "e8m0",
        "ROPE_OFFSET": fmt.rope_offset,
        "NATIVE_FP8": facts.capability >= (8, 9),
    }


def _plan_append(problem: Append, facts: DeviceFacts, overrides: dict[str, int] | None) -> CachePlan:
    block_c = power_of_two(problem.d_latent)
    tiles = _tiles(block_c, overrides)
    launch = Launch(
        kernel=append_kernel,
        inputs=("kv_cache", "latent", "rope" if problem.d_rope else "latent", "slots"),
        scalars=(problem.n, problem.cache.num_pages),
        outputs=("kv_cache",),
        constexprs={
            "LATENT_STRIDE": problem.latent_stride,
            "ROPE_STRIDE": problem.rope_stride,
            "D_LATENT": problem.d_latent,
            "D_ROPE": problem.d_rope,
            **_format_constants(problem.cache, facts),
            "POWER_OF_TWO": problem.power_of_two_scales,
            "BLOCK_N": tiles.block_n,
            "BLOCK_C": block_c,
            "BLOCK_R": power_of_two(problem.d_rope),
        },
        grid=(cdiv(problem.n, tiles.block_n), 1, 1),
        num_warps=tiles.num_warps,
        num_stages=1,
    )
    return CachePlan(problem, facts, (launch,))


def _plan_read(problem: Read, facts: DeviceFacts, overrides: dict[str, int] | None) -> CachePlan:
    fmt = problem.cache.format
    # A row is cut where a power of two ends, or where its RoPE part begins.
    main = fmt.d_nope or 1 << (problem.d_qk.bit_length() - 1)
    block_c = power_of_two(main)
    tiles = _tiles(block_c, overrides)
    launch = Launch(
        kernel=read_kernel,
        inputs=("kv_cache", "slots"),
        scalars=(problem.n, problem.cache.num_pages),
        outputs=("rows",),
        constexprs={
            "D_QK": problem.d_qk,
            "D_MAIN": main,
            **_format_constants(problem.cache, facts),
            "BLOCK_N": tiles.block_n,
            "BLOCK_C": block_c,
            "BLOCK_R": power_of_two(problem.d_qk - main),
        },
        grid=(cdiv(problem.n, tiles.block_n), 1, 1),
        num_warps=tiles.num_warps,
        num_stages=1,
    )
    return CachePlan(problem, facts, (launch,), {"rows": Buffer((problem.n, problem.d_qk), problem.dtype)})


def _runs(problem: CopyPages) -> tuple[int, int, int]:
    """A page as runs of consecutive elements: how many, elements of one, and elements from one to the next."""
    cache = problem.cache
    # The data and the scales of such a page are one run.
    if cache.format.scale_in_page or cache.token_stride == problem.row or cache.page_size == 1:
        return 1, cache.page_size * problem.row, 0
    return cache.page_size, problem.row, cache.token_stride


def _copy_block(problem: CopyPages) -> int:
    """Elements that one program copies."""
    _, run, _ = _runs(problem)
    return min(COPIED_BYTES // (1 if problem.cache.format.quantised else 2), max(power_of_two(run), 128))


def _copy_grid(problem: CopyPages) -> int:
    runs, run, _ = _runs(problem)
    return problem.n * runs * cdiv(run, _copy_block(problem))


def _plan_copy_pages(problem: CopyPages, facts: DeviceFacts) -> CachePlan:
    runs, run, stride = _runs(problem)
    block = _copy_block(problem)
    launch = Launch(
        kernel=copy_pages_kernel,
        inputs=("kv_cache", "source_pages", "target_pages"),
        scalars=(problem.cache.num_pages,),
        outputs=("kv_cache",),
        constexprs={
            "PAGE_STRIDE": problem.cache.page_stride,
            "RUN_STRIDE": stride,
            "RUN": run,
            "CHUNKS": cdiv(run, block),
            "RUNS": runs,
            "BLOCK": block,
        },
        grid=(_copy_grid(problem), 1, 1),
        num_warps=4,
        num_stages=1,
    )
    return CachePlan(problem, facts, (launch,))
