"""`mla_torch.flash_mla` called as FlashMLA's users call FlashMLA."""

import inspect
from dataclasses import fields

import pytest

torch = pytest.importorskip("torch")

import mla_torch
import mla_torch.flash_mla as flash_mla
from mla_torch import api

PAGES = 3


@pytest.fixture(autouse=True)
def fresh_cache():
    api._prepare_cached.cache_clear()
    yield
    api._prepare_cached.cache_clear()


def dense_call(b=2, s_q=1, h_q=4, d_qk=576, page_size=16, h_k=1):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(b, s_q, h_q, d_qk, generator=generator).to(torch.bfloat16)
    k_cache = torch.randn(b * PAGES, page_size, h_k, d_qk, generator=generator).to(torch.bfloat16)
    block_table = torch.arange(b * PAGES, dtype=torch.int32).view(b, PAGES)
    cache_seqlens = 5 + 10 * torch.arange(b, dtype=torch.int32)
    return {"q": q, "k_cache": k_cache, "block_table": block_table, "cache_seqlens": cache_seqlens, "head_dim_v": 512}


def sparse_call(cache_format="v32_fp8", topk=9, extra=False, **sizes):
    call = dense_call(d_qk=512 if cache_format == "model1_fp8" else 576, **sizes)
    b, s_q = call["q"].shape[:2]
    slots = call["k_cache"].shape[0] * call["k_cache"].shape[1]
    call["indices"] = torch.arange(b * s_q * topk, dtype=torch.int32).view(b, s_q, topk) % slots
    if cache_format != "bf16":
        call["k_cache"] = mla_torch.quantize_cache(call["k_cache"], cache_format)
    if extra:
        call["extra_k_cache"] = call["k_cache"]
        call["extra_indices_in_kvcache"] = call["indices"].flip(-1).contiguous()
        call["extra_topk_length"] = torch.full((b,), 3, dtype=torch.int32)
    return call


def run(call, meta=None, **more):
    return flash_mla.flash_mla_with_kvcache(tile_scheduler_metadata=meta or flash_mla.get_mla_metadata()[0], **{**call, **more})


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.fixture
def decoded(monkeypatch):
    """The arguments that reached `decode`, which then computes nothing."""
    seen = []

    def decode(q, kv_cache, block_table=None, cache_seqlens=None, **options):
        seen.append({"q": q, "kv_cache": kv_cache, "block_table": block_table, "cache_seqlens": cache_seqlens, **options})
        return q, q

    monkeypatch.setattr(flash_mla, "decode", decode)
    return seen


def test_the_signature_is_flash_mlas():
    wanted = (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal is_fp8_kvcache "
        "indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length out later"
    )
    parameters = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    assert list(parameters) == wanted.split()
    assert all(p.default is None for name, p in list(parameters.items())[6:-1] if name != "causal")
    assert parameters["causal"].default is False


def test_metadata_takes_the_arguments_of_every_version():
    for args, kwargs in (((), {}), ((torch.ones(2), 128, 1), {}), ((torch.ones(2), 128), {"num_heads_k": 1, "topk": 64})):
        meta, num_splits = flash_mla.get_mla_metadata(*args, **kwargs)
        assert num_splits is None
        assert isinstance(meta, flash_mla.FlashMLASchedMeta)
        assert (meta.have_initialized, meta.config, meta.tile_scheduler_metadata, meta.num_splits) == (False, None, None, None)
    assert flash_mla.get_mla_metadata()[0] is not flash_mla.get_mla_metadata()[0]


def test_a_dense_caller_is_served_unchanged():
    call = dense_call(s_q=2)
    meta, num_splits = flash_mla.get_mla_metadata(call["cache_seqlens"], 2 * 4, 1)
    positional = (call["q"], call["k_cache"], call["block_table"], call["cache_seqlens"], 512, meta, num_splits)
    out, lse = flash_mla.flash_mla_with_kvcache(*positional, 0.05, True)
    assert (out.shape, lse.shape) == ((2, 2, 4, 512), (2, 4, 2))
    given = (call["q"], call["k_cache"], call["block_table"], call["cache_seqlens"])
    assert_same((out, lse), mla_torch.decode(*given, softmax_scale=0.05, causal=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize("cache_format", ["v32_fp8", "model1_fp8"])
def test_a_sparse_caller_is_served_unchanged(cache_format, dtype):
    call = sparse_call(cache_format, extra=True)
    sink = torch.tensor([0.0, -torch.inf, torch.inf, 2.0])
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    cache = call["k_cache"].view(dtype)
    meta, _ = flash_mla.get_mla_metadata()
    found = flash_mla.flash_mla_with_kvcache(
        call["q"],
        cache,
        None,
        None,
        512,
        meta,
        None,
        0.05,
        False,
        True,
        call["indices"],
        sink,
        cache,
        call["extra_indices_in_kvcache"],
        lengths,
        call["extra_topk_length"],
    )
    expected = mla_torch.decode(
        call["q"],
        call["k_cache"],
        indices=call["indices"],
        topk_length=lengths,
        extra_kv_cache=call["k_cache"],
        extra_indices=call["extra_indices_in_kvcache"],
        extra_topk_length=call["extra_topk_length"],
        attn_sink=sink,
        softmax_scale=0.05,
    )
    assert_same(found, expected)


def test_a_sparse_call_ignores_table_and_lengths(decoded):
    run(sparse_call())
    assert decoded[0]["block_table"] is None
    assert decoded[0]["cache_seqlens"] is None


def test_every_argument_arrives_under_its_name(decoded):
    call = sparse_call(extra=True)
    more = {
        "attn_sink": torch.zeros(4),
        "topk_length": torch.ones(2, dtype=torch.int32),
        "softmax_scale": 0.5,
        "out": torch.empty(2, 1, 4, 512, dtype=torch.bfloat16),
    }
    run(call, **more)
    names = {"kv_cache": "k_cache", "extra_kv_cache": "extra_k_cache", "extra_indices": "extra_indices_in_kvcache"}
    for name in ("q", "head_dim_v", "indices", "extra_topk_length", *names):
        assert decoded[0][name] is call[names.get(name, name)]
    for name, value in more.items():
        assert decoded[0][name] is value
    assert decoded[0]["num_splits"] is None
    assert decoded[0]["cache_format"] is None


def test_out_is_written_in_place():
    call = dense_call()
    out = torch.full((2, 1, 4, 512), torch.nan, dtype=torch.bfloat16)
    found, lse = run(call, out=out)
    assert found is out
    assert_same((out, lse), run(call))


# is_fp8_kvcache


@pytest.mark.parametrize("given", [None, True])
def test_an_fp8_cache_may_be_announced(given, decoded):
    meta, _ = flash_mla.get_mla_metadata()
    run(sparse_call(), meta, is_fp8_kvcache=given)
    assert meta.config.is_fp8_kvcache is True


@pytest.mark.parametrize("given", [None, False])
def test_a_16_bit_cache_may_be_announced(given, decoded):
    meta, _ = flash_mla.get_mla_metadata()
    run(dense_call(), meta, is_fp8_kvcache=given)
    assert meta.config.is_fp8_kvcache is False


def test_an_announcement_that_the_dtype_contradicts_is_refused():
    with pytest.raises(ValueError, match=r"^is_fp8_kvcache: True, but k_cache is bfloat16"):
        run(dense_call(), is_fp8_kvcache=True)
    with pytest.raises(ValueError, match=r"^is_fp8_kvcache: False, but k_cache is uint8"):
        run(sparse_call(), is_fp8_kvcache=False)


# The metadata


@pytest.mark.parametrize(
    ("first", "second", "field", "values"),
    [
        (dense_call(), dense_call(b=3), "b", "2 .* 3"),
        (dense_call(), dense_call(s_q=2), "s_q", "1 .* 2"),
        (dense_call(), dense_call(h_q=8), "h_q", "4 .* 8"),
        (dense_call(), dense_call(page_size=32), "page_block_size", "16 .* 32"),
        (dense_call(), dense_call(h_k=2), "h_k", "1 .* 2"),
        (dense_call(), dense_call() | {"causal": True}, "causal", "False .* True"),
        (sparse_call("bf16"), sparse_call("v32_fp8"), "is_fp8_kvcache", "False .* True"),
        (sparse_call(), sparse_call(topk=8), "topk", "9 .* 8"),
        (dense_call(), sparse_call("bf16"), "topk", "None .* 9"),
        (
            sparse_call(extra=True),
            sparse_call(extra=True) | {"extra_k_cache": sparse_call(page_size=8)["k_cache"]},
            "extra_page_block_size",
            "16 .* 8",
        ),
        (
            sparse_call(extra=True),
            sparse_call(extra=True) | {"extra_indices_in_kvcache": sparse_call(topk=5)["indices"]},
            "extra_topk",
            "9 .* 5",
        ),
        (dense_call(), dense_call() | {"enable_batch_invariant": True}, "enable_batch_invariant", "False .* True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_contradiction_to_the_first_call_names_the_field(first, second, field, values, decoded):
    meta, _ = flash_mla.get_mla_metadata()
    run(first, meta)
    run(first, meta)
    assert len(decoded) == 2
    with pytest.raises(ValueError, match=rf"^tile_scheduler_metadata: {field} was {values} now"):
        run(second, meta)
    assert len(decoded) == 2
    run(second)  # a fresh object is free


def test_every_field_of_the_configuration_is_tested():
    rows = next(m for m in test_a_contradiction_to_the_first_call_names_the_field.pytestmark if m.name == "parametrize").args[1]
    assert {row[2] for row in rows} == {field.name for field in fields(flash_mla.FlashMLASchedMeta.Config)}


def test_the_metadata_carries_no_schedule():
    call = dense_call()
    meta, _ = flash_mla.get_mla_metadata()
    run(call, meta)
    assert meta.have_initialized
    assert (meta.tile_scheduler_metadata, meta.num_splits) == (None, None)
    changed = call | {
        "cache_seqlens": torch.tensor([48, 0], dtype=torch.int32),
        "block_table": call["block_table"].flip(-1).contiguous(),
    }
    assert_same(run(changed, meta), run(changed))


def test_a_call_that_fails_leaves_no_configuration():
    meta, _ = flash_mla.get_mla_metadata()
    with pytest.raises(ValueError, match="cache_seqlens"):
        run(dense_call() | {"cache_seqlens": None}, meta)
    assert (meta.have_initialized, meta.config) == (False, None)


@pytest.mark.parametrize("meta", [None, torch.zeros(2, 8, dtype=torch.int32), (flash_mla.FlashMLASchedMeta(), None)])
def test_another_kind_of_metadata_is_refused(meta):
    with pytest.raises(TypeError, match=r"^tile_scheduler_metadata: expected the FlashMLASchedMeta"):
        flash_mla.flash_mla_with_kvcache(tile_scheduler_metadata=meta, **dense_call())


def test_num_splits_of_the_older_interface_is_refused():
    with pytest.raises(ValueError, match=r"^num_splits: expected None"):
        run(dense_call(), num_splits=torch.zeros(3, dtype=torch.int32))


# Newer versions


def test_batch_invariance_means_no_splits(decoded):
    run(dense_call(), enable_batch_invariant=True)
    run(dense_call(), enable_batch_invariant=False)
    assert [call["num_splits"] for call in decoded] == [1, None]


@pytest.mark.interpret
def test_batch_invariance_holds_bit_for_bit():
    call = dense_call(b=3)
    out, lse = run(call, enable_batch_invariant=True)
    alone = call | {name: call[name][1:2] for name in ("q", "block_table", "cache_seqlens")}
    assert_same(run(alone, enable_batch_invariant=True), (out[1:2], lse[1:2]))


@pytest.mark.parametrize(("kv_format", "cache_format"), [("V32", "v32_fp8"), ("V4", "model1_fp8")])
def test_a_format_may_be_announced(kv_format, cache_format, decoded):
    run(sparse_call(cache_format), kv_format=kv_format)
    assert decoded[0]["cache_format"] == cache_format


@pytest.mark.parametrize("kv_format", ["V32_NO_ROPE", "V41", "V41_FP4"])
def test_a_format_that_is_not_built_is_named(kv_format):
    with pytest.raises(
        NotImplementedError, match=rf"^kv_format: '{kv_format}' is reserved and not built yet; built are V32, V4$"
    ):
        run(sparse_call(), kv_format=kv_format)


def test_a_wrong_format_is_refused():
    for wrong in ("v32", "v32_fp8", [], ["V32"], 32):
        with pytest.raises(ValueError, match=r"^kv_format: expected None or one of V32, V4, got"):
            run(sparse_call(), kv_format=wrong)
    with pytest.raises(ValueError, match=r"^q: expected a head dimension of 512 for a V4 cache"):
        run(sparse_call("v32_fp8"), kv_format="V4")
    with pytest.raises(ValueError, match=r"^k_cache: expected bytes .* for kv_format 'V32', got bfloat16"):
        run(sparse_call("bf16"), kv_format="V32")


@pytest.mark.parametrize("name", ["descale_q", "descale_k"])
def test_descaling_is_refused_by_name(name, decoded):
    run(dense_call(), **{name: None})
    with pytest.raises(NotImplementedError, match=rf"^{name}: "):
        run(dense_call(), **{name: torch.ones(1)})


def test_the_choice_of_flash_mlas_own_kernels_means_nothing(decoded):
    run(dense_call(), use_legacy=True)
    run(dense_call(), use_legacy=False)
    assert decoded[0].keys() == decoded[1].keys()


def test_an_unknown_argument_is_refused_by_name():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'fast'"):
        run(dense_call(), fast=True)
    with pytest.raises(ValueError, match=r"^enable_batch_invariant: expected a bool, got 1"):
        run(dense_call(), enable_batch_invariant=1)


# Errors in the words of this interface


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_cache": torch.zeros(6, 16, 1, 512, dtype=torch.bfloat16)}, ValueError, r"^k_cache: expected bfloat16 of shape"),
        ({"q": torch.zeros(2, 4, 576)}, ValueError, r"^q: expected a tensor of 4 dimensions, got \[2, 4, 576\]"),
        ({"k_cache": None}, ValueError, r"^k_cache: expected a tensor of 4 dimensions, got NoneType"),
        ({"extra_k_cache": torch.zeros(6)}, ValueError, r"^extra_k_cache: expected a tensor of 4 dimensions, got \[6\]"),
        ({"block_table": None}, ValueError, r"^block_table: needed"),
        ({"cache_seqlens": None}, ValueError, r"^cache_seqlens: needed"),
        ({"head_dim_v": 0}, ValueError, r"^head_dim_v: expected a positive int"),
        ({"attn_sink": torch.zeros(3)}, ValueError, r"^attn_sink: "),
        ({"out": torch.zeros(2, 1, 4, 576)}, ValueError, r"^out: "),
        ({"softmax_scale": "1"}, ValueError, r"^softmax_scale: "),
        ({"topk_length": torch.ones(2, dtype=torch.int32)}, ValueError, r"^topk_length: goes with indices"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_dense_errors(change, error, message):
    with pytest.raises(error, match=message):
        run(dense_call() | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"causal": True}, ValueError, r"^causal: does not go with indices"),
        (
            {"indices": torch.zeros(2, 9, dtype=torch.int32)},
            ValueError,
            r"^indices: expected int32 of shape \[b=2, s_q=1, topk\]",
        ),
        ({"extra_k_cache": None}, ValueError, r"^extra_k_cache: needed together with extra_indices_in_kvcache"),
        ({"extra_indices_in_kvcache": None}, ValueError, r"^extra_indices_in_kvcache: needed together with extra_k_cache"),
        (
            {"extra_indices_in_kvcache": torch.zeros(2, 1, 9)},
            ValueError,
            r"^extra_indices_in_kvcache: expected int32",
        ),
        ({"k_cache": torch.zeros(6, 16, 1, 528, dtype=torch.uint8)}, NotImplementedError, r"^k_cache: a cache of 528 bytes"),
        ({"q": torch.zeros(2, 1, 4, 576, dtype=torch.float16)}, NotImplementedError, r"^q: a V32 cache takes bfloat16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sparse_errors(change, error, message):
    with pytest.raises(error, match=message):
        run(sparse_call(extra=True) | change)


def test_refusals_of_implementations_use_these_names_too(monkeypatch):
    def decode(*args, **kwargs):
        raise NotImplementedError(
            "no implementation serves this call:\n  triton: extra_kv_cache: too large\n  triton: kv_cache: 2"
        )

    monkeypatch.setattr(flash_mla, "decode", decode)
    with pytest.raises(NotImplementedError) as caught:
        run(dense_call())
    assert str(caught.value).splitlines()[1:] == ["  triton: extra_k_cache: too large", "  triton: k_cache: 2"]
