"""The partition of the dense kernel that fetches: one warp, which issues TMA copies and waits for buffers to be empty."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_names import tma_load
from .parts import BLOCK, HALF, PANEL, ROPE, TILE


@gluon.jit
def _fetch(desc, row, tile, barrier, FIRST: gl.constexpr, PANELS: gl.constexpr, BOX: gl.constexpr, offset: gl.constexpr):
    """Fetches `BOX` rows of a matrix, columns `FIRST` on in panels, into a tile from its row `offset` on."""
    for panel in gl.static_range(PANELS):
        part = tile
        if PANELS > 1:
            part = part.slice(panel * PANEL, PANEL, dim=1)
        if BOX < BLOCK:
            part = part.slice(offset, BOX, dim=0)
        tma_load(desc, [row, FIRST + panel * PANEL], barrier, part)


@gluon.jit
def fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS: gl.constexpr, HAS_ROPE: gl.constexpr):
    row = item * ROWS + work.tile * TILE
    mbarrier.wait(q_empty, ((item - work.first_item) & 1) ^ 1)
    mbarrier.expect(q_full, TILE * (2 * HALF + (ROPE if HAS_ROPE else 0)) * 2)
    for half in gl.static_range(2):
        _fetch(q_desc, row, buffers.q.index(half), q_full, half * HALF, HALF // PANEL, TILE, 0)
    if HAS_ROPE:
        _fetch(q_desc, row, buffers.q_rope, q_full, 2 * HALF, 1, TILE, 0)


@gluon.jit
def _row(table_row, token, last, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr):
    """Row of a token in the matrix that the cache is; behind the last keys stand the last keys again."""
    token = gl.minimum(token, last)
    return gl.load(table_row + token // PAGE_SIZE) * PAGE_ROWS + token % PAGE_SIZE


@gluon.jit
def _rows(table_row, start, last, BOX: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr):
    """Where the boxes of a block begin."""
    if BOX == 64:
        rows = (_row(table_row, start, last, PAGE_SIZE, PAGE_ROWS),)
    elif BOX == 32:
        rows = (  # type: ignore[assignment]  # one of these is compiled
            _row(table_row, start, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 32, last, PAGE_SIZE, PAGE_ROWS),
        )
    else:
        rows = (  # type: ignore[assignment]
            _row(table_row, start, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 16, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 32, last, PAGE_SIZE, PAGE_ROWS),
            _row(table_row, start + 48, last, PAGE_SIZE, PAGE_ROWS),
        )
    return rows


@gluon.jit
def _fetch_keys(
    buffers, full, empty, k_desc, rows, parity, WITH_ROPE: gl.constexpr, BOX: gl.constexpr, WHICH: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """Fetches one half of the columns of a block, and with the half that is needed first the RoPE part."""
    TILE_INDEX: gl.constexpr = 2 * WHICH + SIDE
    barrier = full[TILE_INDEX]
    mbarrier.wait(empty[TILE_INDEX], parity)
    mbarrier.expect(barrier, BLOCK * (HALF + (ROPE if WITH_ROPE else 0)) * 2)
    for box in gl.static_range(BLOCK // BOX):
        _fetch(k_desc, rows[box], buffers.k.index(TILE_INDEX), barrier, SIDE * HALF, HALF // PANEL, BOX, box * BOX)
        if WITH_ROPE:
            _fetch(k_desc, rows[box], buffers.rope.index(WHICH), barrier, 2 * HALF, 1, BOX, box * BOX)


@gluon.jit
def producer(
    work, buffers, barriers, q_desc, k_desc, table_ptr, table_stride,
    ROWS: gl.constexpr, HAS_ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr,
):  # fmt: skip
    """Fetches the queries of every item and the keys of every pair."""
    q_full, q_empty, full, empty, _p_full, _total_full = barriers
    BOX: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK else BLOCK
    pairs_done = 0
    for item in range(work.first_item, work.last_item + 1):
        _length, lo, hi, _extra_lo, _extra_hi = work.keys(item)
        table_row = table_ptr + gl.cast(item, gl.int64) * table_stride
        last = gl.maximum(hi - 1, 0) // BOX * BOX
        if lo >= hi:
            fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
        for start in range(lo, hi, 2 * BLOCK):
            parity = (pairs_done & 1) ^ 1
            rows = _rows(table_row, start, last, BOX, PAGE_SIZE, PAGE_ROWS)
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, HAS_ROPE, BOX, 0, 0)
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, False, BOX, 0, 1)
            rows = _rows(table_row, start + BLOCK, last, BOX, PAGE_SIZE, PAGE_ROWS)
            if start == lo:  # what the first products of block 0 wait for comes first
                fetch_queries(work, buffers, q_full, q_empty, q_desc, item, ROWS, HAS_ROPE)
            # The right half is given back first.
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, HAS_ROPE, BOX, 1, 1)
            _fetch_keys(buffers, full, empty, k_desc, rows, parity, False, BOX, 1, 0)
            pairs_done += 1
