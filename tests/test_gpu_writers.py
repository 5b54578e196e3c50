"""The writers on a GPU: bytes, graphs, streams, large caches, what is compiled and allocated, and JAX against PyTorch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import mla_torch
from mla_kernels.cache_kernels import append_kernel, copy_pages_kernel, read_kernel
from mla_torch import cache_ops
from tests.gpu_tools import DEVICE, capture, much_memory
from tests.judge import to_numpy
from tests.test_cache import special_rows
from tests.test_writers import CASES, EACH_KIND, KINDS, ids
from tests.writer_calls import (
    Tokens,
    WriterCase,
    assert_same_memory,
    converted,
    encode,
    make_tokens,
    split_rows,
    store,
    torch_cache,
    torch_rows,
)

pytestmark = pytest.mark.gpu

GIB = 2**30


def on_device(case: WriterCase, tokens: Tokens) -> dict[str, Any]:
    """latent, rope and slots as tensors, with strides where the case has some."""
    strided = case.layout != "contiguous"
    return {
        "latent": torch_rows(tokens.latent, DEVICE, strided),
        "rope": torch_rows(tokens.rope, DEVICE, strided),
        "slots": torch.from_numpy(tokens.slots).to(DEVICE),
    }


def without_native_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the kernels convert to and from e4m3 in integers, as on devices without the type."""
    plan = cache_ops.plan

    def changed(problem: Any, facts: Any) -> Any:
        made = plan(problem, facts)
        launches = tuple(
            replace(launch, constexprs={**launch.constexprs, "NATIVE_FP8": False})
            if "NATIVE_FP8" in launch.constexprs
            else launch
            for launch in made.launches
        )
        return replace(made, launches=launches)

    monkeypatch.setattr(cache_ops, "plan", changed)
    monkeypatch.setattr(cache_ops, "_prepare_cached", functools.lru_cache(cache_ops._prepare))


@pytest.fixture(params=["native", "integers"])
def conversions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "integers":
        without_native_fp8(monkeypatch)
    return request.param


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_append_is_byte_exact(case: WriterCase) -> None:
    cache, tokens = case.cache(), make_tokens(case)
    expected = store(cache, tokens.slots, encode(case, tokens))
    kv_cache, memory = torch_cache(cache, DEVICE)
    mla_torch.append(kv_cache, **on_device(case, tokens), **case.options)
    assert_same_memory(memory.cpu().numpy(), expected.buffer)


@pytest.mark.parametrize("case", CASES[::2], ids=ids)
def test_read_is_bit_exact(case: WriterCase) -> None:
    """Against the reference on the CPU."""
    tokens = make_tokens(case)
    cache = store(case.cache(), tokens.slots, encode(case, tokens))
    slots = torch.cat([torch.from_numpy(tokens.slots), torch.arange(case.num_slots).to(torch.from_numpy(tokens.slots).dtype)])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = mla_torch.read(torch_cache(cache, DEVICE)[0], slots.to(DEVICE), dtype=dtype)
        expected = mla_torch.read(torch_cache(cache)[0], slots, dtype=dtype, implementation="reference")
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("case", CASES[::3], ids=ids)
def test_copy_pages(case: WriterCase) -> None:
    """Against the reference on the CPU, every byte of the memory."""
    rng = np.random.default_rng(3)
    cache = case.cache()
    cache = replace(cache, buffer=rng.integers(0, 256, cache.buffer.shape, dtype=np.uint8))
    source = torch.tensor([0, case.pages - 1, 1, 1, -1, case.pages])
    target = torch.tensor([2, 3, -1, case.pages, 0, 1])
    (here, expected), (there, found) = torch_cache(cache), torch_cache(cache, DEVICE)
    mla_torch.copy_pages(here, source, target, implementation="reference")
    mla_torch.copy_pages(there, source.to(DEVICE), target.to(DEVICE))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("fmt", "scales"), KINDS[2:], ids=["v32", "v32-unrounded", "model1"])
def test_the_edges_of_the_definition(fmt: str, scales: str, dtype: str, conversions: str) -> None:
    x = special_rows(fmt)[0, :, 0]
    case = WriterCase(fmt, scales, page_size=8, dtype=dtype, n=len(x))
    tokens = split_rows(case, x, np.arange(len(x))[::-1])
    expected = store(case.cache(), tokens.slots, encode(case, tokens))
    kv_cache, memory = torch_cache(case.cache(), DEVICE)
    mla_torch.append(kv_cache, **on_device(case, tokens), **case.options)
    assert_same_memory(memory.cpu().numpy(), expected.buffer)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_values_of_16_bits(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Into a 16-bit cache; every NaN, subnormal and infinity too."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(128, 512)
    cache = torch.zeros(8, 16, 1, 512, dtype=cache_dtype, device=DEVICE)
    slots = torch.arange(128, device=DEVICE)
    mla_torch.append(cache, every.to(DEVICE), None, slots)
    name = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    expected = converted(to_numpy(every), name[cache_dtype])
    np.testing.assert_array_equal(to_numpy(cache).view(np.uint16).reshape(128, 512), expected.view(np.uint16))
    back = mla_torch.read(cache, slots, dtype=torch.float32)
    np.testing.assert_array_equal(to_numpy(back).view(np.uint32), converted(expected, "float32").view(np.uint32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("fmt", "scales"), KINDS[2:], ids=["v32", "v32-unrounded", "model1"])
def test_many_tokens_are_those_of_the_helper(fmt: str, scales: str, dtype: torch.dtype, conversions: str) -> None:
    """All values of bf16 and 10 million others in tiles of all magnitudes, with NaN and infinities, at random slots."""
    case = WriterCase(fmt, scales)
    generator = torch.Generator(DEVICE).manual_seed(0)
    n, page_size = 20_480, 64
    x = torch.randn(n, case.d_qk, generator=generator, device=DEVICE)
    x *= torch.exp2(torch.randint(-40, 40, (n, 1), generator=generator, device=DEVICE).float())
    x *= torch.exp2(torch.randint(-8, 2, x.shape, generator=generator, device=DEVICE).float())
    patterns = torch.arange(2**16, device=DEVICE, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x.view(-1)[: 2**16] = patterns
    x.view(-1)[2**16 : 2**17] = patterns[torch.randperm(2**16, generator=generator, device=DEVICE)]
    x = x.to(dtype)
    slots = torch.randperm(n, generator=generator, device=DEVICE)
    paged = torch.empty_like(x)
    paged[slots] = x
    expected = mla_torch.quantize_cache(paged.view(-1, page_size, 1, case.d_qk), fmt, power_of_two_scales=scales == "pow2")
    found = torch.zeros(expected.shape[0], expected.stride(0), dtype=torch.uint8, device=DEVICE)
    cache = found.as_strided(expected.shape, expected.stride())
    mla_torch.append(cache, x[:, : case.d_latent], x[:, case.d_latent :], slots, **case.options)
    whole = expected.as_strided(found.shape, found.stride())
    wrong = (found != whole).nonzero()
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0].tolist()}"
    rows = mla_torch.read(cache, slots, dtype=torch.float32)
    wanted = mla_torch.dequantize_cache(expected, fmt, dtype=torch.float32).view(n, -1)[slots]
    wanted = torch.where(wanted.isnan(), torch.nan, wanted)
    assert torch.equal(rows.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("case", EACH_KIND, ids=ids)
def test_a_graph_is_replayed_with_other_slots(case: WriterCase) -> None:
    """Captured once, without a wait; then other slots, other values and fewer live tokens."""
    first, second = make_tokens(case), make_tokens(case, seed=7)
    second.slots[::3] = -1
    kv_cache, memory = torch_cache(case.cache(), DEVICE)
    tensors = on_device(case, first)
    pages = {name: torch.tensor(page, device=DEVICE) for name, page in (("source_pages", [0, -1]), ("target_pages", [1, 2]))}

    def step() -> Any:
        mla_torch.append(kv_cache, **tensors, **case.options)
        rows = mla_torch.read(kv_cache, tensors["slots"])
        mla_torch.copy_pages(kv_cache, **pages)
        return rows

    replay, rows = capture(step)
    for tokens, target in ((first, 1), (second, 3), (first, -1)):
        memory.copy_(torch.from_numpy(case.cache().buffer))
        for name, value in on_device(case, tokens).items():
            tensors[name].copy_(value)
        pages["target_pages"].copy_(torch.tensor([target, 2]))
        rows.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        expected = store(case.cache(), tokens.slots, encode(case, tokens))
        here, wanted = torch_cache(expected)
        slots = torch.from_numpy(tokens.slots)
        wanted_rows = mla_torch.read(here, slots, implementation="reference")
        mla_torch.copy_pages(here, torch.tensor([0, -1]), torch.tensor([target, 2]), implementation="reference")
        assert torch.equal(memory.cpu(), wanted)
        assert torch.equal(rows.cpu().view(torch.uint8), wanted_rows.view(torch.uint8))


def test_no_call_waits_for_the_device() -> None:
    case = WriterCase("v32_fp8")
    kv_cache, _ = torch_cache(case.cache(), DEVICE)
    tensors = on_device(case, make_tokens(case))
    pages = torch.tensor([0, 1], device=DEVICE)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mla_torch.append(kv_cache, **tensors)
        mla_torch.read(kv_cache, tensors["slots"])
        mla_torch.copy_pages(kv_cache, pages, pages + 2)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("case", [case for case in EACH_KIND if case.dtype == "bfloat16"], ids=ids)
def test_nothing_is_compiled_twice(case: WriterCase) -> None:
    """Numbers of tokens of every kind (1, multiples of 16, others), slots and pages in the cache."""
    kernels = (append_kernel, read_kernel, copy_pages_kernel)
    kv_cache, _ = torch_cache(replace(case, pages=300).cache(), DEVICE)
    counts = []
    for n in (128, 1, 2, 16, 17, 127, 4096):
        tokens = make_tokens(replace(case, n=max(n, 9), pages=300))
        tensors = {name: None if x is None else x[:n] for name, x in on_device(case, tokens).items()}
        mla_torch.append(kv_cache, **tensors, **case.options)
        mla_torch.append(kv_cache[:-1], **tensors, **case.options)
        mla_torch.read(kv_cache, tensors["slots"])
        pages = torch.arange(min(n, 100), device=DEVICE)
        mla_torch.copy_pages(kv_cache, pages, pages + 100)
        counts.append(sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values()))
    assert counts == counts[:1] * len(counts)


@pytest.mark.parametrize("case", [case for case in EACH_KIND if case.dtype == "bfloat16"], ids=ids)
def test_a_cache_beyond_4_gib(case: WriterCase) -> None:
    """Its last slots, the first, and slots on both sides of 2**31 and 2**32 bytes; nothing else, and nothing is allocated."""
    page_size = 64
    page = case.cache().page_stride // case.page_size * page_size
    pages = (4 * GIB + GIB // 2) // page
    case = replace(case, page_size=page_size, pages=pages, layout="contiguous", index_dtype="int64")
    with much_memory(pages * page + GIB):
        one = replace(case, pages=1).cache()
        stride = one.page_stride
        memory = torch.full((pages, stride), 0xFF, dtype=torch.uint8, device=DEVICE)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.format, torch.uint8)
        flat = memory.view(-1).view(dtype)
        kv_cache = flat.as_strided((pages, *one.shape[1:]), one.strides)
        edges = [0, 2**31 // stride, 2**32 // stride, pages - 1]
        chosen = sorted({max(min(at + step, pages - 1), 0) for at in edges for step in (-1, 0, 1)})
        n = len(chosen) * page_size
        rng = np.random.default_rng(1)
        x = rng.standard_normal((n, case.d_qk)).astype(np.float32)
        slots = (np.array(chosen)[:, None] * page_size + np.arange(page_size)).reshape(-1)
        tokens = split_rows(replace(case, n=n), x, rng.permutation(slots))
        tensors = on_device(case, tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        mla_torch.append(kv_cache, **tensors, **case.options)
        assert torch.cuda.max_memory_allocated() == held
        rows = mla_torch.read(kv_cache, tensors["slots"])
        # the same pages in a small cache
        small = replace(case, pages=len(chosen))
        place = np.searchsorted(chosen, tokens.slots // page_size) * page_size + tokens.slots % page_size
        expected = store(small.cache(), place, encode(small, tokens))
        found = memory[torch.tensor(chosen, device=DEVICE)].cpu().numpy()
        assert_same_memory(found, expected.buffer.reshape(len(chosen), -1))
        wanted = mla_torch.read(torch_cache(expected)[0], torch.from_numpy(place), implementation="reference")
        assert torch.equal(rows.cpu().view(torch.uint8), wanted.view(torch.uint8))
        target = torch.tensor([pages - 3, 2**32 // stride - 5], device=DEVICE)
        mla_torch.copy_pages(kv_cache, torch.tensor([pages - 1, 0], device=DEVICE), target)
        width = page_size * one.token_bytes
        assert torch.equal(memory[target[0], :width], memory[pages - 1, :width])
        assert torch.equal(memory[target[1], :width], memory[0, :width])
        untouched = torch.ones(pages, dtype=torch.bool, device=DEVICE)
        untouched[torch.tensor(chosen, device=DEVICE)] = False
        untouched[target] = False
        for part, keep in zip(memory.split(1024), untouched.split(1024), strict=True):
            assert bool(((part == 0xFF).all(1) | ~keep).all())
        del memory, flat, kv_cache


def test_streams_and_slots_of_other_streams() -> None:
    """On a stream of its own, after work that the current stream of the caller has queued."""
    case = WriterCase("model1_fp8")
    tokens = make_tokens(case)
    expected = store(case.cache(), tokens.slots, encode(case, tokens))
    kv_cache, memory = torch_cache(case.cache(), DEVICE)
    tensors = on_device(case, tokens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mla_torch.append(kv_cache, **tensors)
    stream.synchronize()
    assert_same_memory(memory.cpu().numpy(), expected.buffer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_device_that_is_not_the_current_one() -> None:
    case = WriterCase("v32_fp8")
    tokens = make_tokens(case)
    kv_cache, memory = torch_cache(case.cache(), "cuda:1")
    mla_torch.append(kv_cache, **{name: x.to("cuda:1") for name, x in on_device(case, tokens).items()})
    assert_same_memory(memory.cpu().numpy(), store(case.cache(), tokens.slots, encode(case, tokens)).buffer)


def test_rows_out_of_alignment() -> None:
    """Latents that start anywhere give the same bytes."""
    case = WriterCase("v32_fp8", n=40)
    tokens = make_tokens(case)
    expected = store(case.cache(), tokens.slots, encode(case, tokens))
    tensors = on_device(case, tokens)
    for name, x in tensors.items():
        flat = x.new_empty(x.numel() + 1)
        tensors[name] = flat[1:].view(x.shape).copy_(x)
    kv_cache, memory = torch_cache(case.cache(), DEVICE)
    mla_torch.append(kv_cache, **tensors)
    assert_same_memory(memory.cpu().numpy(), expected.buffer)


@pytest.mark.parametrize("case", [case for case in EACH_KIND if case.dtype == "bfloat16"], ids=ids)
def test_jax_writes_the_same_bytes_in_place(case: WriterCase) -> None:
    """Under donation the buffer stays where it is; without it, and eagerly, the argument stays as it was."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import mla_jax
    from tests.test_cache import convert
    from tests.writer_calls import jax_cache, memory_of

    case = replace(case, layout="contiguous")
    tokens = make_tokens(case)
    expected = memory_of("jax", store(case.cache(), tokens.slots, encode(case, tokens)))
    kv_cache, options = jax_cache(case.cache())
    options |= case.options
    parts = [convert("jax", x) for x in (tokens.latent, tokens.rope, tokens.slots)]
    before = np.asarray(kv_cache).view(np.uint8).copy()

    def write(kv_cache: Any, *parts: Any) -> Any:
        return mla_jax.append(kv_cache, *parts, implementation="triton", **options)

    def memory(x: Any) -> np.ndarray:
        return np.asarray(x).view(np.uint8).reshape(case.pages, -1)

    assert_same_memory(memory(write(kv_cache, *parts)), expected)
    np.testing.assert_array_equal(np.asarray(kv_cache).view(np.uint8), before)
    donating = jax.jit(write, donate_argnums=0)
    mine = jax.numpy.array(kv_cache, copy=True)  # bit for bit: a sum would change NaN
    where = mine.unsafe_buffer_pointer()
    for _ in range(2):
        mine = donating(mine, *parts)
        assert mine.unsafe_buffer_pointer() == where
    assert_same_memory(memory(mine), expected)
    rows = mla_jax.read(mine, parts[2], **{k: v for k, v in options.items() if k != "power_of_two_scales"})
    there, _ = torch_cache(store(case.cache(), tokens.slots, encode(case, tokens)), DEVICE)
    same = mla_torch.read(there, torch.from_numpy(tokens.slots).to(DEVICE))
    np.testing.assert_array_equal(np.asarray(rows).view(np.uint16), to_numpy(same).view(np.uint16))


@pytest.mark.parametrize("way", ["layer", "scan", "loop"])
@pytest.mark.parametrize("case", [case for case in EACH_KIND if case.dtype == "bfloat16"], ids=ids)
def test_jax_writes_one_layer_of_many(case: WriterCase, way: str) -> None:
    """Caches of layers in one array: what nobody writes is there in the result, also where XLA knows of the slices."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import mla_jax
    from tests.test_cache import convert
    from tests.writer_calls import jax_cache, memory_of

    case = replace(case, layout="contiguous", pages=16)
    tokens = [make_tokens(case, seed) for seed in range(3)]
    cache = case.cache()
    cache = replace(cache, buffer=cache.buffer & 0x3F)  # no NaN, whose bits XLA need not keep
    expected = [memory_of("jax", store(cache, x.slots, encode(case, x))) for x in tokens]
    kv_cache, options = jax_cache(cache)
    options |= case.options
    parts = [jax.numpy.stack([convert("jax", getattr(x, name)) for x in tokens]) for name in ("latent", "rope", "slots")]
    caches = jax.numpy.stack([kv_cache] * 3)

    def write(kv_cache: Any, *parts: Any) -> Any:
        return mla_jax.append(kv_cache, *parts, implementation="triton", **options)

    def layer(caches: Any, *parts: Any) -> Any:
        return [write(caches[i], *(x[i] for x in parts)) for i in range(3)]

    def scan(caches: Any, *parts: Any) -> Any:
        return jax.lax.scan(lambda _, xs: (None, write(*xs)), None, (caches, *parts))[1]

    def loop(caches: Any, *parts: Any) -> Any:
        def body(i: Any, caches: Any) -> Any:
            written = write(caches[i], *(x[i] for x in parts))
            return jax.lax.dynamic_update_index_in_dim(caches, written, i, 0)

        return jax.lax.fori_loop(0, 3, body, caches)

    found = jax.jit({"layer": layer, "scan": scan, "loop": loop}[way])(caches, *parts)
    for x, wanted in zip(found, expected, strict=True):
        assert_same_memory(np.asarray(x).view(np.uint8).reshape(case.pages, -1), wanted)


def test_jax_has_no_room_for_a_copy() -> None:
    """A cache of 4 GiB, compiled and not allocated: the compiled step keeps no second one."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import mla_jax

    pages = 4 * GIB // (64 * 656)
    shapes = [
        jax.ShapeDtypeStruct((pages, 64, 1, 656), "uint8"),
        jax.ShapeDtypeStruct((128, 512), "bfloat16"),
        jax.ShapeDtypeStruct((128, 64), "bfloat16"),
        jax.ShapeDtypeStruct((128,), "int32"),
    ]

    def step(kv_cache: Any, latent: Any, rope: Any, slots: Any) -> Any:
        kv_cache = mla_jax.append(kv_cache, latent, rope, slots)
        kv_cache = mla_jax.copy_pages(kv_cache, slots[:2], slots[2:4])
        return kv_cache, mla_jax.read(kv_cache, slots)

    compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**24


def test_decode_of_what_was_appended() -> None:
    """One decode step over a cache that `append` made, against one that the helper made."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    x = torch.randn(8 * 64, 576, generator=generator, device=DEVICE).bfloat16()
    q = torch.randn(2, 1, 64, 576, generator=generator, device=DEVICE).bfloat16()
    expected = mla_torch.quantize_cache(x.view(8, 64, 1, 576), "v32_fp8")
    cache = torch.full_like(expected, 0xFF)
    mla_torch.append(cache, x[:, :512], x[:, 512:], torch.arange(8 * 64, device=DEVICE))
    assert torch.equal(cache, expected)
    indices = torch.randperm(512, generator=generator, device=DEVICE).to(torch.int32).view(2, 1, 256)
    for a, b in zip(mla_torch.decode(q, cache, indices=indices), mla_torch.decode(q, expected, indices=indices), strict=True):
        assert torch.equal(a, b)
