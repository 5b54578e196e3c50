"""What `append`, `read` and `copy_pages` write and read, byte for byte, in both front ends, by kernels and reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mla_kernels.formats import get_format
from tests.inputs import POISON
from tests.judge import to_numpy
from tests.test_cache import convert, helpers, special_rows
from tests.writer_calls import (
    FRAMEWORKS,
    IMPLEMENTATIONS,
    NP_DTYPES,
    Tokens,
    WriterCase,
    append_by,
    assert_same_memory,
    converted,
    encode,
    jax_cache,
    make_tokens,
    memory_after,
    memory_of,
    module_of,
    read_by,
    split_rows,
    store,
    torch_cache,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

KINDS = (("bf16", "pow2"), ("fp16", "pow2"), ("v32_fp8", "pow2"), ("v32_fp8", "unrounded"), ("model1_fp8", "pow2"))
LAYOUTS = ("contiguous", "padded", "skewed", "interleaved")
DTYPES = tuple(NP_DTYPES)


def cases() -> list[WriterCase]:
    """Every kind of cache with every page size and every layout; dtypes take turns."""
    found = []
    for i, ((fmt, scales), page_size, layout) in enumerate(itertools.product(KINDS, (1, 2, 16, 53, 64), LAYOUTS)):
        found.append(
            WriterCase(
                fmt,
                scales,
                page_size,
                pages=max(4, 40 // page_size),
                layout=layout,
                dtype=DTYPES[i % 3],
                rope_dtype=DTYPES[i // 3 % 3] if i % 2 else None,
                index_dtype=("int32", "int64")[i // 5 % 2],
            )
        )
    for widths in ((512, 512), (288, 256), (320, 256), (192, 128), (33, 20), (1030, 1024)):
        found.append(WriterCase(widths=widths, dtype="float32"))
        found.append(WriterCase("fp16", widths=widths, dtype="float16", layout="padded"))
    return found


CASES = cases()
EACH_KIND = [WriterCase(fmt, scales, dtype=dtype, page_size=16, layout="padded") for (fmt, scales) in KINDS for dtype in DTYPES]


def ids(case: WriterCase) -> str:
    return case.id


def skip_layout(framework: str, case: WriterCase) -> None:
    if framework == "jax" and case.layout != "contiguous" and not (case.format == "model1_fp8" and case.layout == "padded"):
        pytest.skip("a JAX array has no strides")
    if framework == "jax" and case.index_dtype == "int64":
        pytest.skip("JAX has no int64 unless jax_enable_x64 is set")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_append_is_byte_exact(case: WriterCase, framework: str, implementation: str) -> None:
    """Every byte of the cache's memory, padding and slots that nobody names included."""
    skip_layout(framework, case)
    cache, tokens = case.cache(), make_tokens(case)
    expected = store(cache, tokens.slots, encode(case, tokens))
    assert (expected.buffer != cache.buffer).any()
    found = append_by(framework, case, cache, tokens, implementation)
    assert_same_memory(found, memory_of(framework, expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_read_is_bit_exact(case: WriterCase, framework: str, implementation: str) -> None:
    """Rows as the helpers decode them, converted once; zeros for what is no slot, and poison in all other memory."""
    skip_layout(framework, case)
    tokens = make_tokens(case, seed=1)
    cache = store(case.cache(), tokens.slots, encode(case, tokens))
    unwritten = np.setdiff1d(np.arange(case.num_slots), tokens.slots)[:3].astype(case.index_dtype)  # NaN, in odd bits
    slots = np.concatenate([tokens.slots, unwritten])
    inside = (slots >= 0) & (slots < case.num_slots)
    dtype = case.dtype
    found = read_by(framework, cache, slots, dtype, implementation)
    assert found.shape == (len(slots), case.d_qk) and found.dtype == NP_DTYPES[dtype]
    assert not found[~inside].view(np.uint8).any()
    page, token = slots[inside] // case.page_size, slots[inside] % case.page_size
    if get_format(case.format).quantised:
        rows = _helper_rows(cache, "torch" if framework == "torch" else "jax")[page, token, 0]
        rows = np.where(np.isnan(rows), np.float32(np.nan), rows)
    else:
        rows = np.ascontiguousarray(cache.array())[page, token, 0]
    expected = converted(rows, dtype)
    bits = f"u{expected.itemsize}"
    np.testing.assert_array_equal(found[inside].view(bits), expected.view(bits))


def _helper_rows(cache: Any, framework: str) -> np.ndarray:
    """fp32 [pages, page_size, 1, d_qk] by `dequantize_cache`."""
    if framework == "torch":
        import torch

        return to_numpy(helpers("torch").dequantize_cache(torch_cache(cache)[0], cache.format, dtype=torch.float32))
    kv_cache, options = jax_cache(cache)
    return to_numpy(helpers("jax").dequantize_cache(kv_cache, dtype="float32", **{"cache_format": cache.format, **options}))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", CASES[::3], ids=ids)
def test_copy_pages(case: WriterCase, framework: str, implementation: str) -> None:
    """The tokens of pages and nothing else; pairs with a page that the cache does not have are skipped."""
    skip_layout(framework, case)
    rng = np.random.default_rng(3)
    cache = case.cache()
    cache = replace(cache, buffer=rng.integers(0, 256, cache.buffer.shape, dtype=np.uint8))
    p = case.pages
    source = np.array([0, p - 1, 1, 1, -1, p, -(2**31)], case.index_dtype)
    target = np.array([2, 3, -1, p, 0, 1, 1], case.index_dtype)
    expected = replace(cache, buffer=cache.buffer.copy())
    width = case.page_size * cache.token_bytes
    part = expected.part(0, 0, width)[:, 0]
    part[2], part[3] = part[0].copy(), part[p - 1].copy()

    def change(module: Any, kv_cache: Any, **options: Any) -> Any:
        pages = [convert(framework, source), convert(framework, target)]
        return module.copy_pages(kv_cache, *pages, implementation=implementation, **options)

    assert_same_memory(memory_after(framework, cache, change), memory_of(framework, expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fmt", "scales"), KINDS[2:], ids=["v32", "v32-unrounded", "model1"])
def test_the_edges_of_the_definition(fmt: str, scales: str, dtype: str, framework: str, implementation: str) -> None:
    """Tiles whose largest value lies next to where a scale changes, zeros, NaN, infinities, the largest and least values."""
    x = special_rows(fmt)[0, :, 0]
    case = WriterCase(fmt, scales, page_size=8, dtype=dtype, n=len(x))
    tokens = split_rows(case, x, np.arange(len(x))[::-1])
    expected = store(case.cache(), tokens.slots, encode(case, tokens))
    found = append_by(framework, case, case.cache(), tokens, implementation)
    assert_same_memory(found, memory_of(framework, expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("fmt", "scales"), KINDS[2:], ids=["v32", "v32-unrounded", "model1"])
def test_every_place_between_two_codes(fmt: str, scales: str, framework: str, implementation: str) -> None:
    """Values at, just below and just above the middle between any two codes of e4m3, at scales 1 and 2 ** -13."""
    grid = np.arange(0x7F, dtype=np.uint8).view("u1")
    values = np.array([_e4m3(code) for code in grid], np.float32)
    middle = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))])
    points = np.concatenate([points, -points])
    d_nope, tile = get_format(fmt).d_nope, get_format(fmt).scale_tile
    n = -(-len(points) // (d_nope - d_nope // tile))
    x = np.zeros((n, d_nope // tile, tile), np.float32)
    x[..., 0] = 448
    x[..., 1:] = np.resize(points, (n, d_nope // tile, tile - 1))
    x = np.concatenate([x.reshape(n, d_nope), np.zeros((n, 64), np.float32)], 1)
    x = np.concatenate([x, x * np.float32(2.0**-13)])
    case = WriterCase(fmt, scales, page_size=16, dtype="float32", n=len(x))
    tokens = split_rows(case, x, np.arange(len(x)))
    expected = store(case.cache(), tokens.slots, encode(case, tokens))
    found = append_by(framework, case, case.cache(), tokens, implementation)
    assert_same_memory(found, memory_of(framework, expected))


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", [case for case in EACH_KIND if case.format != "bf16"], ids=ids)
def test_a_cache_written_by_append_is_that_of_the_helper(case: WriterCase, framework: str, implementation: str) -> None:
    if not get_format(case.format).quantised:
        pytest.skip("the helpers quantise")
    case = replace(case, n=case.num_slots, layout="contiguous")
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((case.n, case.d_qk)) * np.exp2(rng.integers(-9, 9, (case.n, 1)))).astype(np.float32)
    tokens = split_rows(case, x, rng.permutation(case.n))
    rows = np.concatenate([tokens.latent, tokens.rope], 1)
    paged = np.empty_like(rows)
    paged[tokens.slots] = rows
    paged = paged.reshape(case.pages, case.page_size, 1, case.d_qk)
    power_of_two = case.scales == "pow2"
    made = helpers(framework).quantize_cache(convert(framework, paged), case.format, power_of_two_scales=power_of_two)
    cache = case.cache()
    cache.buffer[:] = 0  # as the helper leaves its padding
    found = append_by(framework, case, cache, tokens, implementation)
    if framework == "torch":
        made = made.as_strided((case.pages, made.stride(0)), (made.stride(0), 1))
    assert_same_memory(found.reshape(case.pages, -1), to_numpy(made).reshape(case.pages, -1))


@pytest.mark.interpret
@pytest.mark.parametrize("case", EACH_KIND, ids=ids)
def test_both_front_ends_write_the_same_bytes(case: WriterCase) -> None:
    pytest.importorskip("torch", reason="compares with PyTorch")
    pytest.importorskip("jax", reason="compares with JAX")
    case = replace(case, layout="contiguous")
    tokens = make_tokens(case, seed=2)
    memory = [append_by(framework, case, case.cache(), tokens, "triton") for framework in ("torch", "jax")]
    assert_same_memory(memory[1].reshape(-1), memory[0])
    cache = replace(case.cache(), buffer=memory[0])
    rows = [read_by(framework, cache, tokens.slots, "float32", "triton") for framework in ("torch", "jax")]
    np.testing.assert_array_equal(rows[0].view(np.uint32), rows[1].view(np.uint32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", EACH_KIND[::3], ids=ids)
def test_tokens_of_one_slot(case: WriterCase, framework: str, implementation: str) -> None:
    """Which one wins is not specified, but neither other slots nor padding are touched."""
    case = replace(case, layout="contiguous", n=40)
    tokens = make_tokens(case)
    tokens.slots[:] = 7
    found = append_by(framework, case, case.cache(), tokens, implementation)
    tokens.slots[1:] = -1
    untouched = memory_of(framework, store(case.cache(), tokens.slots, encode(case, tokens))) == POISON
    tokens.slots[:] = -1
    nothing = append_by(framework, case, case.cache(), tokens, implementation)
    assert (nothing == POISON).all()
    changed = np.argwhere(found.reshape(-1) != POISON)[:, 0]
    rows = store(replace(case.cache(), buffer=np.zeros_like(case.cache().buffer)), np.array([7]), _ones(case))
    written = np.argwhere(memory_of(framework, rows).reshape(-1))[:, 0]
    assert len(changed) and set(changed) <= set(written)
    assert untouched.any()


def _ones(case: WriterCase) -> Any:
    rows = encode(case, Tokens(*_zeros(case)))
    return replace(rows, data=np.full_like(rows.data, 1), scales=None if rows.scales is None else np.full_like(rows.scales, 1))


def _zeros(case: WriterCase) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    tokens = split_rows(case, np.zeros((1, case.d_qk), np.float32), np.array([7]))
    return tokens.latent, tokens.rope, tokens.slots


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", [c for c in EACH_KIND if c.dtype == "bfloat16" and c.format != "fp16"], ids=ids)
def test_what_was_appended_is_decoded(case: WriterCase, framework: str, implementation: str) -> None:
    """A step of attention over a cache made by `append` gives the bits of one over a cache made otherwise."""
    case = replace(case, layout="contiguous", n=40)
    rng = np.random.default_rng(6)
    x = rng.standard_normal((case.n, case.d_qk)).astype(np.float32)
    tokens = split_rows(case, x, rng.permutation(case.num_slots)[: case.n])
    cache = case.cache()
    expected = store(cache, tokens.slots, encode(case, tokens))
    found = append_by(framework, case, cache, tokens, implementation)
    written = replace(cache, buffer=found.reshape(-1))
    q = rng.standard_normal((1, 1, 4, case.d_qk)).astype(NP_DTYPES["bfloat16"])
    results = []
    for other in (expected, written):
        kv_cache, more = (torch_cache(other)[0], {}) if framework == "torch" else jax_cache(other)
        indices = convert(framework, tokens.slots[None, None].astype(np.int32))
        out, lse = module_of(framework).decode(convert(framework, q), kv_cache, indices=indices, **more)
        results.append((to_numpy(out), to_numpy(lse)))
    for a, b in zip(*results, strict=True):
        assert np.isfinite(a.astype(np.float32)).all()
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", EACH_KIND[::3], ids=ids)
def test_what_was_appended_is_read(case: WriterCase, framework: str, implementation: str) -> None:
    """Within half a step of the format; exactly where the cache holds what it is given."""
    case = replace(case, layout="contiguous", dtype="bfloat16")
    rng = np.random.default_rng(8)
    x = rng.standard_normal((case.n, case.d_qk)).astype(np.float32)
    tokens = split_rows(case, x, rng.permutation(case.num_slots)[: case.n])
    given = np.concatenate([tokens.latent, tokens.rope], 1).astype(np.float32)
    memory = append_by(framework, case, case.cache(), tokens, implementation)
    cache = replace(case.cache(), buffer=memory.reshape(-1))
    found = read_by(framework, cache, tokens.slots, None, implementation).astype(np.float32)
    if case.format == "bf16":
        np.testing.assert_array_equal(found, given)
        return
    # half a step: 2 ** -4 of a normal e4m3 value; bf16 adds 2 ** -9, and below the normal ones it is 2 ** -10 of the scale
    step = 2.0**-11 if case.format == "fp16" else 2.0**-4 + 2.0**-9
    np.testing.assert_allclose(found, given, rtol=step, atol=2.0**-16 * np.abs(given).max())
    if get_format(case.format).quantised:
        np.testing.assert_array_equal(found[:, case.d_latent :], given[:, case.d_latent :])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", EACH_KIND[::3], ids=ids)
def test_nothing_to_do(case: WriterCase, framework: str) -> None:
    """No tokens, or no pages: no launch and no error."""
    case = replace(case, layout="contiguous")
    none = replace(case, n=0)
    tokens = split_rows(none, np.zeros((0, case.d_qk), np.float32), np.zeros(0))
    assert (append_by(framework, none, case.cache(), tokens, None) == POISON).all()
    assert read_by(framework, case.cache(), tokens.slots, "float16", None).shape == (0, case.d_qk)
    empty = replace(case, pages=0)
    tokens = make_tokens(case)
    assert append_by(framework, case, empty.cache(), tokens, None).size == 0
    rows = read_by(framework, empty.cache(), tokens.slots, None, None)
    assert rows.shape == (case.n, case.d_qk) and not rows.astype(np.float32).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["padded", "interleaved"])
def test_pages_of_bytes_in_torch(layout: str, implementation: str) -> None:
    """`uint8 [pages, page_bytes]`, with any page stride."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import mla_torch

    case = WriterCase("model1_fp8", layout=layout)
    tokens = make_tokens(case)
    expected = store(case.cache(), tokens.slots, encode(case, tokens))
    by_token, memory = torch_cache(case.cache())
    width = case.page_size * 584
    pages = by_token.as_strided((case.pages, width), (by_token.stride(0), 1))
    options = {"cache_format": case.format, "page_size": case.page_size, "implementation": implementation}
    slots = torch.from_numpy(tokens.slots)
    mla_torch.append(pages, convert("torch", tokens.latent), convert("torch", tokens.rope), slots, **options)
    assert_same_memory(memory.numpy(), expected.buffer)
    rows = mla_torch.read(pages, slots, **options)
    assert torch.equal(rows.view(torch.int16), mla_torch.read(by_token, slots, implementation=implementation).view(torch.int16))
    mla_torch.copy_pages(pages, torch.tensor([0]), torch.tensor([3]), **options)
    expected.part(0, 0, width)[3, 0] = expected.part(0, 0, width)[0, 0].copy()
    assert_same_memory(memory.numpy(), expected.buffer)
