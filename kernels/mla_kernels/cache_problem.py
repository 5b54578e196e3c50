"""What one call of a function that is not `decode` is, checked before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import CacheFormat, get_format
from .problem import (
    INT32_MAX,
    CacheSpec,
    TensorSpec,
    cache_spec,
    expect,
    expect_dense_rows,
    expect_distinct,
    infer_format,
    positive_int,
)

VALUE_DTYPES = ("bfloat16", "float16", "float32")
DEQUANTISED_DTYPES = (*VALUE_DTYPES, "float64")
INDEX_DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class Append:
    """New tokens are stored at slots.

    Attributes:
      n: tokens, skipped ones included.
      d_latent, d_rope: columns of the two parts of a row; `d_rope` is 0 where there is one part.
      latent_stride, rope_stride: elements from token to token.
      power_of_two_scales: whether scales are rounded up to powers of two.
      dtypes: of `latent`, `rope` and `slots`, in this order and without a `rope` that is not there.
    """

    cache: CacheSpec
    n: int
    d_latent: int
    latent_stride: int
    d_rope: int
    rope_stride: int
    power_of_two_scales: bool
    dtypes: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return self.n == 0 or self.cache.num_pages == 0


@dataclass(frozen=True)
class Read:
    """Rows of slots become numbers of `dtype`; `dtypes` are that of `slots`."""

    cache: CacheSpec
    n: int
    d_qk: int
    dtype: str
    dtypes: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return self.n == 0


@dataclass(frozen=True)
class CopyPages:
    """Pages become copies of other pages.

    Attributes:
      row: elements of a token.
      dtypes: of `source_pages` and `target_pages`.
    """

    cache: CacheSpec
    n: int
    row: int
    dtypes: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return self.n == 0 or self.cache.num_pages == 0


# All that selects and shapes kernels, and nothing that changes between steps of a server but `n`.
CacheProblem = Append | Read | CopyPages


def _cache(spec: TensorSpec, cache_format: str | None, page_size: int | None) -> tuple[CacheSpec, int]:
    """The cache and the width of a row in values."""
    if page_size is not None:
        positive_int("page_size", page_size)
    fmt = get_format(cache_format) if cache_format is not None else infer_format("kv_cache", spec, page_size)
    width = fmt.d_qk
    if width is None:
        expected = f"{fmt.dtype} of shape [pages, page_size, 1, d_qk]"
        expect(len(spec.shape) == 4 and spec.dtype == fmt.dtype and spec.shape[3] > 0, "kv_cache", expected, spec)
        width = spec.shape[3]
    cache, heads = cache_spec("kv_cache", spec, fmt.name, page_size, width, "bfloat16" if fmt.quantised else fmt.dtype)
    if heads != 1:
        raise NotImplementedError(f"kv_cache: only caches with one key-value head are written and read, got {spec}")
    if cache.num_pages > INT32_MAX:
        raise NotImplementedError(f"kv_cache: at most 2**31 - 1 pages, got {spec}")
    return cache, width


def _index_vector(argument: str, spec: TensorSpec, n: int | None = None) -> int:
    """The number of entries of a list of slots or pages."""
    shape = "[n]" if n is None else f"[n={n}]"
    ok = spec.dtype in INDEX_DTYPES and len(spec.shape) == 1 and n in (None, *spec.shape)
    expect(ok, argument, f"{' or '.join(INDEX_DTYPES)} of shape {shape}", spec)
    expect(spec.shape[0] <= INT32_MAX, argument, "at most 2**31 - 1 entries", spec)
    expect_dense_rows(argument, spec)
    return spec.shape[0]


def _values(argument: str, spec: TensorSpec, rows: str, n: int | None, width: int | None, why: str) -> None:
    """Checks a part of new tokens: `[n, width]`, either of them free where it is None."""
    ok = spec.dtype in VALUE_DTYPES and len(spec.shape) == 2 and n in (None, spec.shape[0]) and width in (None, spec.shape[-1])
    expect(ok, argument, f"{', '.join(VALUE_DTYPES[:-1])} or {VALUE_DTYPES[-1]} of shape {rows}{why}", spec)
    expect_dense_rows(argument, spec)


def make_append(
    kv_cache: TensorSpec,
    latent: TensorSpec,
    rope: TensorSpec | None,
    slots: TensorSpec,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    power_of_two_scales: bool | None = None,
) -> Append:
    """Checks a call of `append`.

    Raises:
      ValueError: a wrong shape, dtype, stride or combination; the message names the argument.
      NotImplementedError: a meaningful call that this version does not support.
    """
    cache, d_qk = _cache(kv_cache, cache_format, page_size)
    expect_distinct("kv_cache", "token", kv_cache)
    fmt = cache.format
    n = latent.shape[0] if latent.shape else None
    if fmt.quantised:
        why = f" for a {fmt.name} cache"
        _values("latent", latent, f"[n, {fmt.d_nope}]", None, fmt.d_nope, why)
        if rope is None:
            raise ValueError(f"rope: needed{why}, of shape [n={n}, {fmt.d_rope}]")
        _values("rope", rope, f"[n={n}, {fmt.d_rope}]", n, fmt.d_rope, why)
    else:
        _values("latent", latent, "[n, d_v]", None, None, "")
        rest = d_qk - latent.shape[1]
        if rope is None:
            why = f" where rope is None (the cache has d_qk={d_qk})"
            _values("latent", latent, f"[n, {d_qk}]", None, d_qk, why)
        else:
            expect(0 < rest < d_qk, "latent", f"fewer than d_qk={d_qk} columns, and at least one, beside rope", latent)
            why = f" (d_qk={d_qk} less the {latent.shape[1]} columns of latent)"
            _values("rope", rope, f"[n={n}, {rest}]", n, rest, why)
    _index_vector("slots", slots, n)
    return Append(
        cache=cache,
        n=latent.shape[0],
        d_latent=latent.shape[1],
        latent_stride=latent.strides[0],
        d_rope=rope.shape[1] if rope is not None else 0,
        rope_stride=rope.strides[0] if rope is not None else 0,
        power_of_two_scales=power_of_two(fmt, power_of_two_scales),
        dtypes=tuple(spec.dtype for spec in (latent, rope, slots) if spec is not None),
    )


def power_of_two(fmt: CacheFormat, power_of_two_scales: bool | None) -> bool:
    """Whether scales are powers of two, checked; None means True.  True for a format without scales."""
    allowed = (None, True, False) if fmt.scale_dtype == "float32" else (None, True)
    known = power_of_two_scales is None or isinstance(power_of_two_scales, bool)
    if not known or power_of_two_scales not in allowed:
        what = "has no other scales" if fmt.scale_dtype == "e8m0" else "has none"
        expected = "takes None, True or False" if fmt.scale_dtype == "float32" else what
        raise ValueError(f"power_of_two_scales: a {fmt.name} cache {expected}, got {power_of_two_scales!r}")
    return power_of_two_scales is not False


def make_read(
    kv_cache: TensorSpec,
    slots: TensorSpec,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
    dtype: str | None = None,
) -> Read:
    """Checks a call of `read`; the result is in the cache's dtype, for a quantised one in bfloat16, unless `dtype` is given.

    Raises:
      ValueError, NotImplementedError: as `make_append`.
    """
    cache, d_qk = _cache(kv_cache, cache_format, page_size)
    n = _index_vector("slots", slots)
    if dtype is None:
        dtype = "bfloat16" if cache.format.quantised else cache.format.dtype
    expect(dtype in VALUE_DTYPES, "dtype", f"None, {', '.join(VALUE_DTYPES[:-1])} or {VALUE_DTYPES[-1]}", dtype)
    return Read(cache, n, d_qk, dtype, (slots.dtype,))


def make_copy_pages(
    kv_cache: TensorSpec,
    source_pages: TensorSpec,
    target_pages: TensorSpec,
    *,
    cache_format: str | None = None,
    page_size: int | None = None,
) -> CopyPages:
    """Checks a call of `copy_pages`.

    Raises:
      ValueError, NotImplementedError: as `make_append`.
    """
    cache, d_qk = _cache(kv_cache, cache_format, page_size)
    expect_distinct("kv_cache", "token", kv_cache)
    n = _index_vector("source_pages", source_pages)
    _index_vector("target_pages", target_pages, n)
    return CopyPages(cache, n, cache.format.token_bytes or d_qk, (source_pages.dtype, target_pages.dtype))


def _quantised(cache_format: str) -> CacheFormat:
    fmt = get_format(cache_format)
    expect(fmt.quantised, "cache_format", "a quantised format", repr(cache_format))
    return fmt


def check_quantize(
    kv_cache: TensorSpec, cache_format: str, power_of_two_scales: bool | None = None
) -> tuple[CacheFormat, bool]:
    """Checks a call of `quantize_cache`.

    Returns:
      The format, and whether scales are powers of two.

    Raises:
      ValueError: a wrong shape, dtype or combination; the message names the argument.
      NotImplementedError: a format that is reserved.
    """
    fmt = _quantised(cache_format)
    expect(kv_cache.dtype in VALUE_DTYPES, "kv_cache", f"{', '.join(VALUE_DTYPES[:-1])} or {VALUE_DTYPES[-1]}", kv_cache)
    ok = len(kv_cache.shape) == 4 and kv_cache.shape[2:] == (1, fmt.d_qk) and kv_cache.shape[1] > 0
    expect(ok, "kv_cache", f"shape [pages, page_size, 1, {fmt.d_qk}] for {fmt.name}", kv_cache)
    return fmt, power_of_two(fmt, power_of_two_scales)


def check_dequantize(kv_cache: TensorSpec, cache_format: str, page_size: int | None = None) -> CacheSpec:
    """Checks a call of `dequantize_cache`, but for its dtype.

    Raises:
      ValueError, NotImplementedError: as `check_quantize`.
    """
    return _cache(kv_cache, _quantised(cache_format).name, page_size)[0]


def check_token_slots(block_table: TensorSpec, positions: TensorSpec, page_size: int) -> int:
    """Checks a call of `token_slots`.

    Returns:
      The last page of which int32 holds every slot.

    Raises:
      ValueError: a wrong shape, dtype or number; the message names the argument.
    """
    ok = block_table.dtype == "int32" and len(block_table.shape) == 2
    expect(ok, "block_table", "int32 of shape [b, max_pages]", block_table)
    b = block_table.shape[0]
    ok = positions.dtype in INDEX_DTYPES and positions.shape[:1] == (b,)
    expect(ok, "positions", f"{' or '.join(INDEX_DTYPES)} of shape [b={b}, ...]", positions)
    positive_int("page_size", page_size)
    expect(page_size <= INT32_MAX, "page_size", "at most 2**31 - 1", page_size)
    return (INT32_MAX + 1) // page_size - 1
