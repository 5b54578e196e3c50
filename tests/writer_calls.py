"""Calls of `append`, `read` and `copy_pages`: their arrays, made with numpy, and what they must leave in memory."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_kernels.formats import get_format
from tests.arg_specs import ArgSpec
from tests.inputs import PagedCache, Rows, empty_cache, jax_array
from tests.judge import to_numpy
from tests.test_cache import convert, expected_bytes

NP_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
CANONICAL_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}
IMPLEMENTATIONS = [pytest.param("triton", marks=pytest.mark.interpret), "reference"]
FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("torch", "jax")
]


@dataclass(frozen=True)
class WriterCase:
    """One cache and the dtypes of what is written into it.

    Attributes:
      scales: `pow2` or `unrounded` (v32_fp8 only).
      layout: as in `ArgSpec`.
      dtype, rope_dtype, index_dtype: of latent, rope and slots.
      widths: d_qk and columns of latent, of a 16-bit cache.
      n: tokens, those included that are skipped.
    """

    format: str = "bf16"
    scales: str = "pow2"
    page_size: int = 16
    pages: int = 4
    layout: str = "contiguous"
    dtype: str = "bfloat16"
    rope_dtype: str | None = None
    index_dtype: str = "int32"
    widths: tuple[int, int] = (576, 512)
    n: int = 21

    @property
    def id(self) -> str:
        words = [self.format, f"p{self.page_size}", self.layout, self.dtype, self.index_dtype]
        words += [self.scales] * (self.scales != "pow2") + ["d{}_{}".format(*self.widths)] * (self.widths != (576, 512))
        words += [f"rope-{self.rope_dtype}"] * (self.rope_dtype is not None)
        return "-".join(words)

    @property
    def d_qk(self) -> int:
        return get_format(self.format).d_qk or self.widths[0]

    @property
    def d_latent(self) -> int:
        return get_format(self.format).d_nope or self.widths[1]

    @property
    def num_slots(self) -> int:
        return self.pages * self.page_size

    @property
    def options(self) -> dict[str, Any]:
        return {"power_of_two_scales": False} if self.scales == "unrounded" else {}

    def cache(self) -> PagedCache:
        """Full of poison."""
        return empty_cache(ArgSpec(format=self.format, d_qk=self.d_qk, layout=self.layout), self.pages, self.page_size)


@dataclass
class Tokens:
    """latent [n, d], rope [n, d_rope] (None if there is none) and slots [n]."""

    latent: np.ndarray
    rope: np.ndarray | None
    slots: np.ndarray


def split_rows(case: WriterCase, x: np.ndarray, slots: np.ndarray) -> Tokens:
    """Tokens whose rows are `x`, fp32 [n, d_qk], rounded to the dtypes of the case."""
    with np.errstate(over="ignore"):
        latent = x[:, : case.d_latent].astype(NP_DTYPES[case.dtype])
        rope = x[:, case.d_latent :].astype(NP_DTYPES[case.rope_dtype or case.dtype])
    return Tokens(latent, rope if rope.shape[1] else None, slots.astype(case.index_dtype))


def make_tokens(case: WriterCase, seed: int = 0) -> Tokens:
    """Rows of many magnitudes, some of them with NaN, infinities and zeros; distinct slots, and some to be skipped."""
    rng = np.random.default_rng(seed)
    n = case.n
    x = rng.standard_normal((n, case.d_qk)) * np.exp2(rng.integers(-14, 14, (n, 1)))
    x[0] = 0
    x[1, ::7] = np.nan
    x[2, 5::64], x[2, -3:] = np.inf, -np.inf
    x[3] = np.nan
    x[4, : case.d_latent], x[4, case.d_latent :] = -np.inf, 0
    x[5] = -0.0
    x[6] *= 1e30  # beyond fp16
    x[7] = rng.choice([1e-40, -1e-30, 1e-38], case.d_qk)
    slots = rng.permutation(np.resize(rng.permutation(case.num_slots), max(n, case.num_slots)))[:n].astype(np.int64)
    _, first = np.unique(slots, return_index=True)
    slots[np.setdiff1d(np.arange(n), first)] = -1  # where there are fewer slots than tokens
    wrong = [-1, case.num_slots, case.num_slots + 5, 2**31 - 1, -(2**31)]
    wrong += [2**40, -(2**40), 2**32] if case.index_dtype == "int64" else []
    places = rng.choice(np.arange(8, n), min(6, n - 8), replace=False)
    slots[places] = np.resize(wrong, len(places))
    return split_rows(case, x.astype(np.float32), slots)


def converted(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to nearest even; a NaN that is converted becomes the positive quiet one."""
    if x.dtype == NP_DTYPES[dtype]:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        found = x.astype(np.float32).astype(NP_DTYPES[dtype])
    bits = found.view(f"u{found.itemsize}").copy()
    bits[np.isnan(x)] = CANONICAL_NAN[dtype]
    return bits.view(found.dtype)


def encode(case: WriterCase, tokens: Tokens) -> Rows:
    """The bytes of rows by the definition; scales apart where the format has them apart, without their padding."""
    fmt = get_format(case.format)
    n = len(tokens.slots)
    parts = [tokens.latent] if tokens.rope is None else [tokens.latent, tokens.rope]
    if not fmt.quantised:
        row = np.concatenate([converted(part, fmt.dtype) for part in parts], 1)
        return Rows(np.ascontiguousarray(row).view(np.uint8))
    with np.errstate(invalid="ignore", over="ignore"):
        wide = np.concatenate([part.astype(np.float32) for part in parts], 1)
        page = expected_bytes(wide[None, :, None], case.format, case.scales == "pow2")[0]
    data = page[: n * fmt.row_bytes].reshape(n, fmt.row_bytes)
    if not fmt.scale_in_page:
        return Rows(data)
    scales = page[n * fmt.row_bytes : n * fmt.token_bytes].reshape(n, fmt.scale_bytes)
    return Rows(data, scales[:, : fmt.num_scales])


def store(cache: PagedCache, slots: np.ndarray, rows: Rows) -> PagedCache:
    """The cache after rows were stored at those slots that it has."""
    cache = replace(cache, buffer=cache.buffer.copy())
    kept = (slots >= 0) & (slots < cache.num_pages * cache.page_size)
    page, token = slots[kept] // cache.page_size, slots[kept] % cache.page_size
    width = rows.data.shape[1]
    cache.part(0, width, width)[page, token] = rows.data[kept]
    if rows.scales is not None:
        fmt = get_format(cache.format)
        part = cache.part(cache.page_size * width, fmt.scale_bytes, fmt.scale_bytes)
        part[..., : rows.scales.shape[1]][page, token] = rows.scales[kept]
    return cache


def module_of(framework: str) -> Any:
    if framework == "torch":
        import mla_torch as module
    else:
        import mla_jax as module
    return module


def torch_cache(cache: PagedCache, device: str = "cpu") -> tuple[Any, Any]:
    """A tensor with the strides of the cache, and its whole memory as bytes."""
    import torch

    memory = torch.from_numpy(cache.buffer.copy()).to(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(cache.format, torch.uint8)
    if cache.num_pages == 0:
        return torch.empty(cache.shape, dtype=dtype, device=device), memory
    return memory.view(dtype).as_strided(cache.shape, cache.strides, cache.offset // cache.dtype.itemsize), memory


def jax_cache(cache: PagedCache) -> tuple[Any, dict[str, Any]]:
    """A row-major array, in pages of bytes where a page is laid out as a whole, and the options that say so."""
    if get_format(cache.format).scale_in_page:
        options = {"cache_format": cache.format, "page_size": cache.page_size}
        return jax_array(cache.pages()), options
    return jax_array(cache.array()), {}


def torch_rows(x: np.ndarray | None, device: str = "cpu", strided: bool = False) -> Any:
    """A part of tokens; `strided`: as columns of a wider tensor full of NaN."""
    if x is None:
        return None
    tensor = convert("torch", x).to(device)
    if not strided:
        return tensor
    return tensor.new_full((len(x), x.shape[1] + 16), float("nan"))[:, 8:-8].copy_(tensor)


def memory_after(framework: str, cache: PagedCache, change: Any, **options: Any) -> np.ndarray:
    """Bytes of the cache after `change(module, kv_cache, **options)`: all of its memory in torch, its pages in JAX."""
    module = module_of(framework)
    if framework == "torch":
        kv_cache, memory = torch_cache(cache)
        result = change(module, kv_cache, **options)
        assert result is kv_cache
        return memory.numpy()
    kv_cache, more = jax_cache(cache)
    result = change(module, kv_cache, **options, **more)
    assert result.shape == kv_cache.shape and result.dtype == kv_cache.dtype
    return np.asarray(result).view(np.uint8).reshape(cache.num_pages, kv_cache.nbytes // max(cache.num_pages, 1))


def memory_of(framework: str, cache: PagedCache) -> np.ndarray:
    """The same bytes of a cache as it is."""
    if framework == "torch":
        return cache.buffer
    fmt = get_format(cache.format)
    pages = cache.pages()
    return pages if fmt.scale_in_page else pages[:, : cache.page_size * cache.token_bytes]


def append_by(framework: str, case: WriterCase, cache: PagedCache, tokens: Tokens, implementation: Any) -> np.ndarray:
    """Memory after the tokens were appended."""

    def change(module: Any, kv_cache: Any, **options: Any) -> Any:
        if framework == "torch":
            strided = case.layout != "contiguous"
            parts = [torch_rows(tokens.latent, strided=strided), torch_rows(tokens.rope, strided=strided)]
        else:
            parts = [None if x is None else convert("jax", x) for x in (tokens.latent, tokens.rope)]
        return module.append(kv_cache, *parts, convert(framework, tokens.slots), implementation=implementation, **options)

    return memory_after(framework, cache, change, **case.options)


def read_by(framework: str, cache: PagedCache, slots: np.ndarray, dtype: str | None, implementation: Any) -> np.ndarray:
    module = module_of(framework)
    kv_cache, more = (torch_cache(cache)[0], {}) if framework == "torch" else jax_cache(cache)
    if dtype is not None:
        more["dtype"] = dtype if framework == "jax" else getattr(__import__("torch"), dtype)
    return to_numpy(module.read(kv_cache, convert(framework, slots), implementation=implementation, **more))


def assert_same_memory(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    wrong = np.argwhere(found != expected)
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(f"byte {list(map(int, at))} is {found[at]}, expected {expected[at]}; {len(wrong)} differ")
