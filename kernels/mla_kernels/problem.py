"""What one decode call is: its shapes, dtypes, strides and options, checked before anything is launched.

A front end turns its arrays into `TensorSpec`s and calls `make_problem`; everything behind it (plan, kernels, launchers)
works from the `Problem` and never sees a framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .formats import BF16, FP16, MODEL1_FP8, V32_FP8, CacheFormat, get_format

COMPUTE_DTYPES = ("bfloat16", "float16")
BYTE_DTYPES = ("uint8", "int8", "float8_e4m3fn")
INT32_MAX = 2**31 - 1


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype name (`"bfloat16"`, `"int32"`, ...) and strides in elements of an array; no strides means row-major.

    `aligned` says whether its first byte is known to lie at a multiple of 16.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] = ()
    aligned: bool = True

    def __post_init__(self):
        if len(self.strides) != len(self.shape):
            object.__setattr__(self, "strides", row_major_strides(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class CacheSpec:
    """A paged cache: its format and where pages, tokens and heads lie.  Strides are in elements of `format.dtype`."""

    format: CacheFormat
    num_pages: int
    page_size: int
    page_stride: int
    token_stride: int
    head_stride: int

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True)
class Problem:
    """One decode call.  All that selects and shapes kernels, nothing that changes between steps of a server."""

    batch: int
    s_q: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    dtype: str  # of q and out
    cache: CacheSpec
    q_strides: tuple[int, int, int]  # batch, query, head
    sparse: bool
    causal: bool = False
    # dense: block_table [batch, width] (width pages); sparse: indices [batch, s_q, width] (width = topk)
    width: int = 0
    table_strides: tuple[int, int] = (0, 0)  # batch, query (0 when dense)
    has_length: bool = True  # cache_seqlens (dense, always) or topk_length (sparse, optional)
    extra: CacheSpec | None = None
    extra_width: int = 0
    extra_table_strides: tuple[int, int] = (0, 0)
    has_extra_length: bool = False
    has_sink: bool = False
    num_splits: int | None = None
    out_strides: tuple[int, int, int] | None = None  # None: row-major
    aligned: bool = True  # q and the caches are known to start at multiples of 16 bytes

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.s_q, self.h_q, self.d_v)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.h_q, self.s_q)

    @property
    def empty(self) -> bool:
        return self.batch == 0 or self.s_q == 0

    @property
    def max_tokens(self) -> int:
        """The largest number of keys that a length may name in the first scope."""
        if not self.sparse and self.cache.num_pages == 0:
            return 0  # whatever a block table says
        return min(self.width * (1 if self.sparse else self.cache.page_size), INT32_MAX)

    def flops(self, keys: int) -> int:
        """Floating-point operations when `keys` keys are attended in all (summed over requests and, if sparse, queries)."""
        per_key = 2 * self.h_q * (self.d_qk + self.d_v)
        return keys * per_key * (1 if self.sparse else self.s_q)

    def bytes(self, keys: int, extra_keys: int = 0) -> int:
        """Bytes of attended keys, q and out."""
        total = 2 * self.batch * self.s_q * self.h_q * (self.d_qk + self.d_v)
        for spec, n in ((self.cache, keys), (self.extra, extra_keys)):
            if spec is not None:
                per_token = spec.format.token_bytes or 2 * self.h_kv * self.d_qk
                total += n * per_token
        return total


def expect(ok: bool, argument: str, expected: str, got: Any) -> None:
    if not ok:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def expect_dense_rows(argument: str, spec: TensorSpec) -> None:
    if spec.shape and spec.shape[-1] > 1 and 0 not in spec.shape and spec.strides[-1] != 1:
        raise ValueError(f"{argument}: the innermost dimension must be dense (stride 1), got strides {list(spec.strides)}")


def expect_distinct(argument: str, what: str, spec: TensorSpec) -> None:
    """That no two elements of what is written share memory: each stride leads past all that smaller ones reach."""
    reach = 1
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size > 1:
            expect(stride >= reach, argument, f"every {what} at an address of its own", f"strides {list(spec.strides)}")
            reach += (size - 1) * stride


def _int32_vector(argument: str, spec: TensorSpec, batch: int) -> None:
    expect(spec.dtype == "int32" and spec.shape == (batch,), argument, f"int32 of shape [b={batch}]", spec)
    expect_dense_rows(argument, spec)


def positive_int(argument: str, value: Any) -> int:
    expect(isinstance(value, int) and not isinstance(value, bool) and value > 0, argument, "a positive int", repr(value))
    return value


def infer_format(argument: str, spec: TensorSpec, page_size: int | None) -> CacheFormat:
    if spec.dtype == "bfloat16":
        return BF16
    if spec.dtype == "float16":
        return FP16
    if spec.dtype not in BYTE_DTYPES:
        raise ValueError(f"{argument}: expected bfloat16, float16 or bytes ({', '.join(BYTE_DTYPES)}), got {spec}")
    if len(spec.shape) == 4:
        width = spec.shape[3]
        by_width = {f.token_bytes: f for f in (V32_FP8, MODEL1_FP8)}
        if width in by_width:
            return by_width[width]
        if width in (288, 512, 528, 576):
            raise NotImplementedError(
                f"{argument}: a cache of {width} bytes a token belongs to a format that is not built yet, got {spec}"
            )
        raise ValueError(
            f"{argument}: {width} bytes a token is no known cache format "
            f"({', '.join(f'{f.name}: {n}' for n, f in by_width.items())}), got {spec}"
        )
    if page_size is not None and len(spec.shape) == 2:
        if spec.shape[1] in (MODEL1_FP8.page_bytes(page_size), page_size * MODEL1_FP8.token_bytes):
            return MODEL1_FP8
        raise ValueError(
            f"{argument}: pages of {spec.shape[1]} bytes for page_size={page_size} do not say their format; pass cache_format"
        )
    expected = f"[pages, page_size, 1, bytes of a token], or [pages, page_bytes] of {MODEL1_FP8.name} with page_size="
    raise ValueError(f"{argument}: expected bytes of shape {expected}, got {spec}")


def cache_spec(
    argument: str, spec: TensorSpec, cache_format: str | None, page_size: int | None, d_qk: int, dtype: str
) -> tuple[CacheSpec, int]:
    """Checks one cache against the queries' width and dtype: the cache and its number of heads.  Raises as `make_problem`."""
    fmt = get_format(cache_format) if cache_format is not None else infer_format(argument, spec, page_size)
    if not fmt.quantised:
        expect(
            spec.dtype == fmt.dtype and len(spec.shape) == 4 and spec.shape[3] == d_qk,
            argument,
            f"{fmt.dtype} of shape [pages, page_size, h_kv, d_qk={d_qk}]",
            spec,
        )
        expect(fmt.dtype == dtype, argument, f"the dtype of q ({dtype})", spec)
        expect(spec.shape[1] > 0 and spec.shape[2] > 0, argument, "page_size and h_kv of at least 1", spec)
        expect_dense_rows(argument, spec)
        if page_size is not None:
            expect(page_size == spec.shape[1], "page_size", f"{spec.shape[1]}, as {argument} has", page_size)
        pages, tokens, heads, _ = spec.shape
        return CacheSpec(fmt, pages, tokens, *spec.strides[:3]), heads

    if dtype != "bfloat16":
        raise NotImplementedError(f"q: a {fmt.name} cache takes bfloat16 queries (its RoPE part is bfloat16), got {dtype}")
    expect(d_qk == fmt.d_qk, "q", f"a head dimension of {fmt.d_qk} for a {fmt.name} cache", d_qk)
    expect(spec.dtype in BYTE_DTYPES, argument, f"bytes ({', '.join(BYTE_DTYPES)}) for cache_format {fmt.name!r}", spec)
    if len(spec.shape) == 2 and fmt.scale_in_page:
        if page_size is None:
            raise ValueError(f"page_size: needed for a cache given as [pages, page_bytes], got {argument} {spec}")
        least = f"at least {page_size} * {fmt.token_bytes} bytes a page"
        expect(spec.shape[1] >= page_size * fmt.token_bytes, argument, least, spec)
        size, page_stride, token_stride = page_size, spec.strides[0], fmt.row_bytes
    else:
        wanted = f"bytes of shape [pages, page_size, 1, {fmt.token_bytes}]"
        if fmt.scale_in_page:
            wanted += " or [pages, page_bytes] with page_size="
        expect(len(spec.shape) == 4 and spec.shape[2:] == (1, fmt.token_bytes) and spec.shape[1] > 0, argument, wanted, spec)
        if page_size is not None:
            expect(page_size == spec.shape[1], "page_size", f"{spec.shape[1]}, as {argument} has", page_size)
        size, page_stride, token_stride = spec.shape[1], spec.strides[0], spec.strides[1]
        if fmt.scale_in_page:
            expect(
                token_stride == fmt.token_bytes or size == 1 or spec.shape[0] == 0,
                argument,
                f"a token stride of {fmt.token_bytes} bytes ({fmt.name} pages are laid out as a whole)",
                f"strides {list(spec.strides)}",
            )
            token_stride = fmt.row_bytes
    expect_dense_rows(argument, spec)
    align = 4  # scales are read by words
    expect(
        page_stride % align == 0 and token_stride % align == 0,
        argument,
        f"page and token strides that are multiples of {align} bytes",
        f"strides {list(spec.strides)}",
    )
    return CacheSpec(fmt, spec.shape[0], size, page_stride, token_stride, 0), 1


def _indices(argument: str, spec: TensorSpec, batch: int, s_q: int) -> tuple[int, tuple[int, int]]:
    ok = spec.dtype == "int32" and len(spec.shape) == 3 and spec.shape[:2] == (batch, s_q)
    expect(ok, argument, f"int32 of shape [b={batch}, s_q={s_q}, topk]", spec)
    expect(spec.shape[2] > 0, argument, "a topk of at least 1", spec)
    expect_dense_rows(argument, spec)
    return spec.shape[2], (spec.strides[0], spec.strides[1])


def make_problem(
    q: TensorSpec,
    kv_cache: TensorSpec,
    block_table: TensorSpec | None = None,
    cache_seqlens: TensorSpec | None = None,
    *,
    indices: TensorSpec | None = None,
    topk_length: TensorSpec | None = None,
    extra_kv_cache: TensorSpec | None = None,
    extra_indices: TensorSpec | None = None,
    extra_topk_length: TensorSpec | None = None,
    attn_sink: TensorSpec | None = None,
    head_dim_v: int | None = None,
    causal: bool = False,
    cache_format: str | None = None,
    page_size: int | tuple[int | None, int | None] | None = None,
    num_splits: int | None = None,
    out: TensorSpec | None = None,
) -> Problem:
    """Checks one call and describes it.

    Raises:
      ValueError: a wrong shape, dtype, stride or combination; the message names the argument.
      NotImplementedError: a meaningful call that this version does not support.
    """
    expect(len(q.shape) == 4, "q", "shape [b, s_q, h_q, d_qk]", q)
    expect(q.dtype in COMPUTE_DTYPES, "q", "bfloat16 or float16", q)
    batch, s_q, h_q, d_qk = q.shape
    expect(h_q > 0 and d_qk > 0, "q", "at least one head and one column", q)
    expect_dense_rows("q", q)

    sparse = indices is not None
    if sparse and block_table is not None:
        raise ValueError("block_table: does not go with indices (a call is dense or sparse)")
    if not sparse and block_table is None:
        raise ValueError("block_table: needed for a dense call (or pass indices for a sparse one)")
    if sparse and cache_seqlens is not None:
        raise ValueError("cache_seqlens: does not go with indices; topk_length limits a sparse call")
    if not sparse:
        for name, value in (
            ("topk_length", topk_length),
            ("extra_kv_cache", extra_kv_cache),
            ("extra_indices", extra_indices),
            ("extra_topk_length", extra_topk_length),
        ):
            if value is not None:
                raise ValueError(f"{name}: goes with indices (a sparse call), got {value} in a dense one")
    expect(isinstance(causal, bool), "causal", "a bool", repr(causal))
    if sparse and causal:
        raise ValueError("causal: does not go with indices: which keys a query sees is what its indices say")

    sizes = page_size if isinstance(page_size, tuple) else (page_size, page_size)
    expect(len(sizes) == 2, "page_size", "an int or a pair (kv_cache, extra_kv_cache)", page_size)
    for size in sizes:
        if size is not None:
            positive_int("page_size", size)
    if isinstance(page_size, int) and extra_kv_cache is not None and len(extra_kv_cache.shape) != 2:
        sizes = (page_size, None)  # a cache with a page dimension says its own size

    cache, h_kv = cache_spec("kv_cache", kv_cache, cache_format, sizes[0], d_qk, q.dtype)
    if sparse and h_kv != 1:
        raise ValueError(f"kv_cache: expected one key-value head for a sparse call, got {kv_cache}")
    expect(h_q % h_kv == 0, "kv_cache", f"a number of heads that divides h_q={h_q}", kv_cache)

    if head_dim_v is not None:
        positive_int("head_dim_v", head_dim_v)
    elif cache.format.d_v or d_qk in (576, 512):
        head_dim_v = 512
    else:
        raise ValueError(f"head_dim_v: must be given when d_qk is neither 576 nor 512, got d_qk={d_qk}")
    if cache.format.d_v is not None:
        expect(head_dim_v == cache.format.d_v, "head_dim_v", f"{cache.format.d_v} for a {cache.format.name} cache", head_dim_v)
    expect(head_dim_v <= d_qk, "head_dim_v", f"at most d_qk={d_qk}", head_dim_v)

    extra = None
    extra_width, extra_strides = 0, (0, 0)
    if (extra_kv_cache is None) != (extra_indices is None):
        missing, given = ("extra_indices", "extra_kv_cache") if extra_indices is None else ("extra_kv_cache", "extra_indices")
        raise ValueError(f"{missing}: needed together with {given}")
    if extra_topk_length is not None and extra_indices is None:
        raise ValueError("extra_topk_length: goes with extra_kv_cache and extra_indices")
    if extra_kv_cache is not None and extra_indices is not None:
        extra, extra_heads = cache_spec("extra_kv_cache", extra_kv_cache, cache_format, sizes[1], d_qk, q.dtype)
        if extra.format != cache.format:
            raise NotImplementedError(
                f"extra_kv_cache: its format must be that of kv_cache ({cache.format.name}), got {extra.format.name}"
            )
        expect(extra_heads == 1, "extra_kv_cache", "one key-value head", extra_kv_cache)
        extra_width, extra_strides = _indices("extra_indices", extra_indices, batch, s_q)
        if extra_topk_length is not None:
            _int32_vector("extra_topk_length", extra_topk_length, batch)

    table_strides: tuple[int, int]
    if indices is not None:
        width, table_strides = _indices("indices", indices, batch, s_q)
        if topk_length is not None:
            _int32_vector("topk_length", topk_length, batch)
        has_length = topk_length is not None
    else:
        assert block_table is not None  # for the type checker; refused above
        ok = block_table.dtype == "int32" and len(block_table.shape) == 2 and block_table.shape[0] == batch
        expect(ok, "block_table", f"int32 of shape [b={batch}, max_pages]", block_table)
        expect_dense_rows("block_table", block_table)
        if cache_seqlens is None:
            raise ValueError("cache_seqlens: needed together with block_table")
        _int32_vector("cache_seqlens", cache_seqlens, batch)
        width, table_strides, has_length = block_table.shape[1], (block_table.strides[0], 0), True
    if width + extra_width > INT32_MAX:
        raise ValueError(f"{'indices' if sparse else 'block_table'}: more than 2**31 - 1 entries a row")

    if attn_sink is not None:
        expect(
            attn_sink.dtype == "float32" and attn_sink.shape == (h_q,), "attn_sink", f"float32 of shape [h_q={h_q}]", attn_sink
        )
        expect_dense_rows("attn_sink", attn_sink)
    if num_splits is not None:
        positive_int("num_splits", num_splits)

    out_strides = None
    if out is not None:
        wanted = (batch, s_q, h_q, head_dim_v)
        expect(out.shape == wanted and out.dtype == q.dtype, "out", f"{q.dtype} of shape {list(wanted)}", out)
        expect_dense_rows("out", out)
        if out.strides != row_major_strides(out.shape):
            out_strides = (out.strides[0], out.strides[1], out.strides[2])
            expect_distinct("out", "element", out)

    return Problem(
        batch=batch,
        s_q=s_q,
        h_q=h_q,
        h_kv=h_kv,
        d_qk=d_qk,
        d_v=head_dim_v,
        dtype=q.dtype,
        cache=cache,
        q_strides=(q.strides[0], q.strides[1], q.strides[2]),
        sparse=sparse,
        causal=causal and s_q > 1,
        width=width,
        table_strides=table_strides,
        has_length=has_length,
        extra=extra,
        extra_width=extra_width,
        extra_table_strides=extra_strides,
        has_extra_length=extra_topk_length is not None,
        has_sink=attn_sink is not None,
        num_splits=num_splits,
        out_strides=out_strides,
        aligned=all(spec.aligned for spec in (q, kv_cache, extra_kv_cache) if spec is not None),
    )
