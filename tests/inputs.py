"""Arrays of a call, from its `ArgSpec`: made with numpy alone, handed over as PyTorch or JAX arrays.

Memory that no output may depend on is poisoned: bytes that no query attends (slots, whole pages, padding) are 0xFF, which is
NaN as bf16, fp16, e4m3, fp32 and E8M0; table entries behind the last used page and indices behind `topk_length` are garbage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from mla_kernels.formats import get_format
from tests.arg_specs import ArgSpec

POISON = 0xFF
E4M3_MAX = 448.0
# Distinct rows of a large cache; more would only cost time.
ROW_POOL = 4096
INTERLEAVED = 2

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}


@dataclass(frozen=True)
class PagedCache:
    """A cache in memory.

    Attributes:
      buffer: uint8 [bytes], the whole allocation.
      offset: bytes before page 0.
      page_stride: bytes between the starts of two pages.
    """

    format: str
    num_pages: int
    page_size: int
    h_kv: int
    d_qk: int
    buffer: np.ndarray
    offset: int
    page_stride: int

    @property
    def dtype(self) -> np.dtype:
        return DTYPES.get(self.format, np.dtype(np.uint8))

    @property
    def token_bytes(self) -> int:
        return get_format(self.format).token_bytes or self.h_kv * self.d_qk * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As the calls take it: [pages, page_size, h_kv, d_qk], or bytes [pages, page_size, 1, token_bytes]."""
        return (self.num_pages, self.page_size, self.h_kv, self.token_bytes // self.h_kv // self.dtype.itemsize)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """In elements."""
        token = self.token_bytes // self.dtype.itemsize
        return (self.page_stride // self.dtype.itemsize, token, token // self.h_kv, 1)

    def part(self, start: int, step: int, width: int) -> np.ndarray:
        """Bytes [pages, page_size, width] at `start + slot * step` of each page, writable."""
        return np.lib.stride_tricks.as_strided(
            self.buffer[self.offset + start :], (self.num_pages, self.page_size, width), (self.page_stride, step, 1)
        )

    def array(self) -> np.ndarray:
        """The numpy view that a call would be given, with these strides."""
        itemsize = self.dtype.itemsize
        flat = self.buffer[self.offset :]
        flat = flat[: len(flat) // itemsize * itemsize].view(self.dtype)
        return np.lib.stride_tricks.as_strided(flat, self.shape, tuple(s * itemsize for s in self.strides))

    def pages(self) -> np.ndarray:
        """Bytes [pages, bytes of a page with its padding]; not the pages in between of an interleaved cache."""
        width = self.page_stride // (INTERLEAVED if self.offset else 1)
        return np.lib.stride_tricks.as_strided(self.buffer[self.offset :], (self.num_pages, width), (self.page_stride, 1))

    def write(self, slots: np.ndarray, rows: Rows) -> None:
        """Stores rows at flat slots `page * page_size + offset`."""
        page, slot = slots // self.page_size, slots % self.page_size
        width = rows.data.shape[1]
        self.part(0, width, width)[page, slot] = rows.data
        if rows.scales is not None:
            scale_bytes = rows.scales.shape[1]
            self.part(self.page_size * width, scale_bytes, scale_bytes)[page, slot] = rows.scales


@dataclass(frozen=True)
class Rows:
    """Encoded keys: uint8 [n, bytes], and uint8 [n, scale bytes] where scales lie apart from them."""

    data: np.ndarray
    scales: np.ndarray | None = None

    def __getitem__(self, which: np.ndarray) -> Rows:
        return Rows(self.data[which], None if self.scales is None else self.scales[which])


def empty_cache(spec: ArgSpec, num_pages: int, page_size: int, poisoned: bool = True) -> PagedCache:
    """A poisoned cache of `num_pages` pages in the memory layout of `spec`; one of unwritten memory takes no time."""
    fmt = get_format(spec.format)
    token_bytes = fmt.token_bytes or spec.h_kv * spec.d_qk * 2
    stride = -(-page_size * token_bytes // fmt.page_align) * fmt.page_align
    if spec.layout == "padded":
        stride += 64
    elif spec.layout == "skewed":
        align = 4  # what the kernels ask of strides
        stride = page_size * token_bytes + align
    offset = 0
    if spec.layout == "interleaved":
        offset, stride = stride, stride * INTERLEAVED
    size = offset + num_pages * stride
    buffer = np.full(size, POISON, np.uint8) if poisoned else np.empty(size, np.uint8)
    return PagedCache(spec.format, num_pages, page_size, spec.h_kv, spec.d_qk, buffer, offset, stride)


def quantise(x: np.ndarray, rng: np.random.Generator, scales: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [n, tiles, tile] to e4m3 codes (uint8, same shape) and fp32 scales [n, tiles]; some tiles are zero.

    `pow2` scales are `2 ** ceil(log2(max(amax / 448, 1e-4)))`.  `arbitrary` ones are at least `amax / 448` and not rounded;
    a zero tile then has scale 0.
    """
    zero = rng.random(x.shape[:2]) < 1 / 16
    amax = np.where(zero, np.float32(0), np.abs(x).max(-1))
    if scales == "pow2":
        scale = np.exp2(np.ceil(np.log2(np.maximum(amax / E4M3_MAX, 1e-4)))).astype(np.float32)
    else:
        scale = (amax / E4M3_MAX * rng.uniform(1.0, 1.5, amax.shape)).astype(np.float32)
    divisor = np.where(scale > 0, scale, np.float32(1))
    values = np.where(zero[..., None], np.float32(0), x) / divisor[..., None]
    codes = np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scale


def make_rows(spec: ArgSpec, n: int, rng: np.random.Generator) -> Rows:
    """`n` random encoded keys."""
    if n > ROW_POOL:
        return make_rows(spec, ROW_POOL, rng)[rng.integers(0, ROW_POOL, n)]
    fmt = get_format(spec.format)
    std = np.float32(min(spec.std, 1.0))
    x = rng.standard_normal((n, spec.h_kv * spec.d_qk), dtype=np.float32) * std
    if not fmt.quantised:
        return Rows(x.astype(DTYPES[spec.format]).view(np.uint8))
    tiles = x[:, : fmt.d_nope].reshape(n, fmt.num_scales, fmt.scale_tile)
    # tiles of different magnitude, so that a scale that belongs to another tile shows
    tiles = tiles * np.exp2(rng.integers(-3, 1, (n, fmt.num_scales, 1))).astype(np.float32)
    codes, scale = quantise(tiles, rng, spec.scales)
    data = np.full((n, fmt.row_bytes), POISON, np.uint8)
    data[:, : fmt.d_nope] = codes.reshape(n, fmt.d_nope)
    data[:, fmt.rope_offset : fmt.rope_offset + 2 * fmt.d_rope] = x[:, fmt.d_nope :].astype(ml_dtypes.bfloat16).view(np.uint8)
    if not fmt.scale_in_page:
        data[:, fmt.scale_offset : fmt.scale_offset + fmt.scale_bytes] = scale.view(np.uint8)
        return Rows(data)
    scales = np.full((n, fmt.scale_bytes), POISON, np.uint8)
    scales[:, : fmt.num_scales] = scale.view(np.uint32) >> 23
    return Rows(data, scales)


def jax_array(x: np.ndarray) -> Any:
    """A copy of `x` in JAX.  Of every new shape `jax.numpy.asarray` would compile a function that copies it."""
    import jax

    return jax.device_put(np.array(x, order="C"))


def draw_lengths(kind: str, largest: int, batch: int, rng: np.random.Generator, capacity: int) -> np.ndarray:
    """int32 [batch] of one of `ArgSpec.lengths`; `capacity` is what a call clamps to."""
    lengths = np.full(batch, largest, np.int64)
    if kind in ("ragged", "wild"):
        lengths[1:] = rng.integers(0, largest + 1, batch - 1)
    if kind == "zeros":
        lengths[1::2] = 0
    if kind == "wild":
        lengths[0] = capacity + 7
        lengths[1:2] = -5
    return lengths.astype(np.int32)


class _Pages:
    """Deals out the pages of a cache in random order."""

    def __init__(self, total: int, keep_first: bool, rng: np.random.Generator):
        """Three pages are never used; page 0 is among them if `keep_first`."""
        self.num_pages = total + 3
        ids = rng.permutation(np.arange(int(keep_first), self.num_pages))
        self._ids = ids.astype(np.int32)
        self.unused = 0 if keep_first else int(ids[-1])
        self._next = 0

    def take(self, n: int) -> np.ndarray:
        taken = self._ids[self._next : self._next + n]
        self._next += n
        return taken


@dataclass(frozen=True)
class Scope:
    """One cache and what selects its keys: a block table or indices."""

    cache: PagedCache
    table: np.ndarray  # int32 [b, max_pages] or [b, s_q, topk]
    lengths: np.ndarray | None  # int32 [b]


@dataclass(frozen=True)
class Inputs:
    """The arrays of one call.  q is [b, s_q, h_q, d_qk], attn_sink fp32 [h_q]."""

    spec: ArgSpec
    q: np.ndarray
    main: Scope
    extra: Scope | None
    attn_sink: np.ndarray | None

    @cached_property
    def _options(self) -> dict[str, Any]:
        spec = self.spec
        options: dict[str, Any] = {"causal": spec.causal, "num_splits": spec.num_splits}
        if spec.d_v != 512 or spec.d_qk not in (512, 576):
            options["head_dim_v"] = spec.d_v
        return options

    def _arrays(self) -> dict[str, np.ndarray | None]:
        """All arrays but the caches, by the names of the call."""
        arrays: dict[str, np.ndarray | None] = {"q": self.q, "attn_sink": self.attn_sink}
        if self.spec.sparse:
            arrays |= {"indices": self.main.table, "topk_length": self.main.lengths}
            if self.extra is not None:
                arrays |= {"extra_indices": self.extra.table, "extra_topk_length": self.extra.lengths}
        else:
            arrays |= {"block_table": self.main.table, "cache_seqlens": self.main.lengths}
        return {name: array for name, array in arrays.items() if array is not None}

    def _caches(self) -> dict[str, PagedCache]:
        caches = {"kv_cache": self.main.cache}
        if self.extra is not None:
            caches["extra_kv_cache"] = self.extra.cache
        return caches

    def as_call(self) -> dict[str, Any]:
        """Keyword arguments of `decode` as numpy arrays; caches are strided views."""
        return {**self._arrays(), **{name: cache.array() for name, cache in self._caches().items()}, **self._options}

    def to_torch(self, device: Any = "cpu") -> dict[str, Any]:
        """Keyword arguments of `mla_torch.decode` on `device`, with the strides that the spec asks for."""
        import torch

        def tensor(x: np.ndarray) -> torch.Tensor:
            if x.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(x.view(np.int16)).to(device).view(torch.bfloat16)
            return torch.from_numpy(x).to(device)

        call: dict[str, Any] = {name: tensor(x) for name, x in self._arrays().items()}
        if self.spec.views:
            q = call["q"]
            b, s_q, h_q, d_qk = q.shape
            base = q.new_full((s_q, b, h_q + 1, d_qk + 8), float("nan"))
            call["q"] = base.transpose(0, 1)[:, :, :h_q, :d_qk].copy_(q)
            for name in ("block_table", "indices", "extra_indices"):
                if name in call:
                    table = call[name]
                    base = table.new_full((*table.shape[:-1], table.shape[-1] + 3), 2147480000)
                    call[name] = base[..., : table.shape[-1]].copy_(table)
        for name, cache in self._caches().items():
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(cache.format, torch.uint8)
            flat = torch.from_numpy(cache.buffer).to(device).view(dtype)
            call[name] = flat.as_strided(cache.shape, cache.strides, cache.offset // cache.dtype.itemsize)
        return {**call, **self._options}

    def to_jax(self) -> dict[str, Any]:
        """Keyword arguments of `mla_jax.decode`.

        JAX arrays have no strides: caches are row-major, and `model1_fp8` ones are [pages, page_bytes] with their padding.
        """
        call: dict[str, Any] = {name: jax_array(x) for name, x in self._arrays().items()}
        sizes = []
        for name, cache in self._caches().items():
            in_page = get_format(cache.format).scale_in_page
            call[name] = jax_array(cache.pages() if in_page else cache.array())
            sizes.append(cache.page_size)
        if get_format(self.spec.format).scale_in_page:
            call["cache_format"] = self.spec.format
            call["page_size"] = sizes[0] if len(sizes) == 1 else tuple(sizes)
        return {**call, **self._options}


def _dense_scope(spec: ArgSpec, rng: np.random.Generator, filled: bool) -> Scope:
    used = max(-(-spec.length // spec.page_size), 1)
    width = used if spec.lengths == "wild" else used + 2
    lengths = draw_lengths(spec.lengths, spec.length, spec.batch, rng, width * spec.page_size)
    tokens = np.clip(lengths.astype(np.int64), 0, width * spec.page_size)
    needed = -(-tokens // spec.page_size)
    pages = _Pages(int(needed.sum()), bool(rng.integers(2)), rng)
    table = np.where(rng.integers(0, 2, (spec.batch, width)) == 0, 2147480000, -1).astype(np.int32)
    slots = []
    for i in range(spec.batch):
        ids = pages.take(int(needed[i]))
        table[i, : len(ids)] = ids
        t = np.arange(tokens[i])
        slots.append(ids[t // spec.page_size].astype(np.int64) * spec.page_size + t % spec.page_size)
    cache = empty_cache(spec, pages.num_pages, spec.page_size, filled)
    attended = np.concatenate(slots)
    if filled:
        cache.write(attended, make_rows(spec, len(attended), rng))
    return Scope(cache, table, lengths)


def _index_rows(spec: ArgSpec, topk: int, own: np.ndarray, num_slots: int, rng: np.random.Generator, first: int) -> np.ndarray:
    """int32 [s_q, topk]: selections among one request's slots `own`; `first` counts the queries before."""
    rows = np.full((spec.s_q, topk), -1, np.int64)
    for j, row in enumerate(rows):
        chosen = rng.permutation(own)[:topk]
        if spec.index_kind == "first64" and topk > 64:
            row[64 : 64 + len(chosen)] = chosen[: topk - 64]
        elif spec.index_kind == "empty_rows":
            if (first + j) % 2 and len(chosen):
                row[-1] = chosen[0]
        else:
            row[: len(chosen)] = chosen
    if spec.index_kind == "holes":
        rows[rng.random(rows.shape) < 0.2] = -1
    elif spec.index_kind == "out_of_range":
        wrong = np.array([num_slots, num_slots + 1, 2**31 - 1, -(2**31), -2])
        rows = np.where(rng.random(rows.shape) < 0.2, wrong[rng.integers(0, len(wrong), rows.shape)], rows)
    return rows.astype(np.int32)


def _sparse_scope(
    spec: ArgSpec, page_size: int, topk: int, has_length: bool, tokens: np.ndarray, rng: np.random.Generator, filled: bool
) -> Scope:
    """`tokens` are the keys of each request in this cache."""
    needed = -(-tokens // page_size)
    pages = _Pages(int(needed.sum()), spec.index_kind != "plain" or bool(rng.integers(2)), rng)
    num_slots = pages.num_pages * page_size
    indices = np.empty((spec.batch, spec.s_q, topk), np.int32)
    for i in range(spec.batch):
        slots = (pages.take(int(needed[i])).astype(np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
        indices[i] = _index_rows(spec, topk, slots[: tokens[i]], num_slots, rng, i * spec.s_q)
    lengths = None
    counted = np.ones(indices.shape, bool)
    if has_length:
        lengths = draw_lengths(spec.lengths, max(topk - 1, 1), spec.batch, rng, topk)
        counted &= np.arange(topk) < np.clip(lengths, 0, topk)[:, None, None]
        garbage = np.array([2147480000, -7, pages.unused * page_size], np.int32)
        indices = np.where(counted, indices, garbage[rng.integers(0, 3, indices.shape)])
    selected = np.unique(indices[counted & (indices >= 0) & (indices < num_slots)].astype(np.int64))
    cache = empty_cache(spec, pages.num_pages, page_size, filled)
    if filled:
        cache.write(selected, make_rows(spec, len(selected), rng))
    return Scope(cache, indices, lengths)


def make_sink(kind: str, h_q: int, rng: np.random.Generator) -> np.ndarray | None:
    """fp32 [h_q], or None."""
    if kind == "none":
        return None
    sink = (rng.standard_normal(h_q) * 3).astype(np.float32)
    if kind == "infinite":
        special = np.array([np.inf, -np.inf, 200.0, -200.0], np.float32)
        where = rng.permutation(h_q)[: len(special)]
        sink[where] = rng.permutation(special)[: len(where)]
    return sink


def make_inputs(spec: ArgSpec, seed: int = 0, filled: bool = True) -> Inputs:
    """The arrays of `spec`; the same seed gives the same bits.

    Where only shapes, dtypes and strides are of interest, q and the caches need not be `filled`.
    """
    rng = np.random.default_rng([seed, *spec.id.encode()])
    q = np.empty((spec.batch, spec.s_q, spec.h_q, spec.d_qk), DTYPES["fp16" if spec.format == "fp16" else "bf16"])
    if filled:
        q = (rng.standard_normal(q.shape, dtype=np.float32) * np.float32(spec.std)).astype(q.dtype)
    extra = None
    if spec.sparse:
        kind = "equal" if spec.lengths == "wild" else spec.lengths
        tokens = draw_lengths(kind, spec.length, spec.batch, rng, spec.length).astype(np.int64)
        main = _sparse_scope(spec, spec.page_size, spec.topk, spec.topk_length, tokens, rng, filled)
        if spec.extra is not None:
            page_size, topk, has_length = spec.extra
            extra = _sparse_scope(spec, page_size, topk, has_length, np.full(spec.batch, topk + page_size), rng, filled)
    else:
        main = _dense_scope(spec, rng, filled)
    return Inputs(spec, q, main, extra, make_sink(spec.sink, spec.h_q, rng))
