"""What `mla_torch.decode` refuses, and in which words."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad

import mla_torch
from mla_kernels.device import INTERPRETER
from mla_torch import launcher
from tests.torch_calls import dense, fresh_cache, recording, sparse

# Errors


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "cache_seqlens", "attn_sink", "out"])
@pytest.mark.parametrize("value", [np.zeros(3, np.float32), [1, 2], 3], ids=["ndarray", "list", "int"])
def test_what_is_no_tensor_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected a torch.Tensor, got "):
        mla_torch.decode(**dense() | {name: value})


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_what_is_needed_is_named(name):
    with pytest.raises(ValueError, match=rf"^{name}: expected a torch.Tensor, got builtins.NoneType"):
        mla_torch.decode(**dense() | {name: None})


ALL_SPARSE = ("kv_cache", "indices", "topk_length", "extra_kv_cache", "extra_indices", "extra_topk_length", "attn_sink", "out")


def everything_sparse():
    out = torch.empty(2, 1, 4, 512, dtype=torch.bfloat16)
    return sparse(extra=True) | {"attn_sink": torch.zeros(4), "out": out}


@pytest.mark.parametrize("name", ALL_SPARSE)
def test_tensors_of_two_devices_are_named(name):
    call = everything_sparse()
    call[name] = call[name].to("meta")
    with pytest.raises(ValueError, match=rf"^{name}: expected device cpu, as q has, got meta"):
        mla_torch.decode(**call)


def test_a_call_on_the_meta_device_is_refused_in_words():
    call = {name: tensor.to("meta") for name, tensor in dense().items()}
    with pytest.raises(NotImplementedError, match="reference: q: a tensor on the meta device holds no values"):
        mla_torch.decode(**call)


@pytest.mark.parametrize("name", ["q", "kv_cache", "extra_kv_cache", "attn_sink", "softmax_scale", "out"])
def test_tensors_that_require_a_gradient_are_refused(name):
    call = everything_sparse() | {"softmax_scale": torch.tensor(0.1)}
    call[name] = call[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: requires a gradient; decode is forward-only: detach it or call under"):
        mla_torch.decode(**call)
    if name != "out":  # autograd itself forbids writing into a leaf only where gradients are on
        with torch.no_grad():
            out, _ = mla_torch.decode(**call)
        assert not out.requires_grad


@pytest.mark.parametrize("name", ["q", "kv_cache", "extra_kv_cache", "attn_sink", "softmax_scale", "out"])
def test_tensors_with_a_tangent_are_refused(name):
    call = everything_sparse() | {"softmax_scale": torch.tensor(0.1)}
    with forward_ad.dual_level():
        mla_torch.decode(**call)
        call[name] = forward_ad.make_dual(call[name], torch.ones_like(call[name]))
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"^{name}: has a tangent, which decode would lose: detach it"):
                mla_torch.decode(**call)
        mla_torch.decode(**call | {name: call[name].detach()})


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("function", [mla_torch.decode, mla_torch.explain], ids=["decode", "explain"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["q", "attn_sink", "softmax_scale", None])
def test_transforms_of_torch_func_are_refused(name, transform, function):
    def transformed(x):
        changed = {} if name is None else {name: x * call[name]}
        function(**call | changed)

    call = everything_sparse() | {"softmax_scale": torch.tensor(0.1)}
    expected = f"^{name}: belongs to a tr" if name else "^decode: does not run in a tr"
    with pytest.raises(ValueError, match=rf"{expected}ansform of torch.func .* call it outside"):
        TRANSFORMS[transform](transformed, torch.tensor(1.0))


WRONG = {
    "q-rank": (
        lambda: dense() | {"q": torch.zeros(2, 4, 576, dtype=torch.bfloat16)},
        ValueError,
        r"^q: .*bfloat16 \[2, 4, 576\]",
    ),
    "q-dtype": (
        lambda: dense() | {"q": torch.zeros(2, 1, 4, 576)},
        ValueError,
        "^q: expected bfloat16 or float16, got float32",
    ),
    "q-columns": (
        lambda: dense() | {"q": torch.zeros(2, 1, 4, 1152, dtype=torch.bfloat16)[..., ::2]},
        ValueError,
        "^q: the innermost dimension must be dense",
    ),
    "cache-dtype": (lambda: dense() | {"kv_cache": dense(dtype=torch.float16)["kv_cache"]}, ValueError, "^kv_cache: "),
    "cache-width": (lambda: dense() | {"kv_cache": dense(d_qk=512)["kv_cache"]}, ValueError, "^kv_cache: .*d_qk=576"),
    "table-dtype": (lambda: dense() | {"block_table": dense()["block_table"].long()}, ValueError, "^block_table: .*got int64"),
    "table-missing": (lambda: dense() | {"block_table": None}, ValueError, "^block_table: needed"),
    "table-and-indices": (lambda: sparse() | {"block_table": dense()["block_table"]}, ValueError, "^block_table: "),
    "lengths-shape": (
        lambda: dense() | {"cache_seqlens": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        r"^cache_seqlens: .*b=2",
    ),
    "lengths-missing": (lambda: dense() | {"cache_seqlens": None}, ValueError, "^cache_seqlens: needed"),
    "lengths-sparse": (lambda: sparse() | {"cache_seqlens": dense()["cache_seqlens"]}, ValueError, "^cache_seqlens: "),
    "indices-shape": (
        lambda: sparse() | {"indices": torch.zeros(2, 64, dtype=torch.int64)},
        ValueError,
        r"^indices: expected int32 of shape \[b=2, s_q=1, topk\], got int64 \[2, 64\]",
    ),
    "topk_length-dense": (lambda: dense() | {"topk_length": dense()["cache_seqlens"]}, ValueError, "^topk_length: "),
    "topk_length-shape": (lambda: sparse() | {"topk_length": torch.zeros(1, dtype=torch.int32)}, ValueError, "^topk_length: "),
    "extra-alone": (lambda: sparse() | {"extra_kv_cache": sparse()["kv_cache"]}, ValueError, "^extra_indices: needed"),
    "extra_indices-alone": (lambda: sparse() | {"extra_indices": sparse()["indices"]}, ValueError, "^extra_kv_cache: needed"),
    "extra_topk_length-alone": (
        lambda: sparse() | {"extra_topk_length": sparse()["topk_length"]},
        ValueError,
        "^extra_topk_length: ",
    ),
    "sink-dtype": (lambda: dense() | {"attn_sink": torch.zeros(4, dtype=torch.bfloat16)}, ValueError, "^attn_sink: .*float32"),
    "sink-shape": (lambda: dense() | {"attn_sink": torch.zeros(5)}, ValueError, r"^attn_sink: .*h_q=4"),
    "head_dim_v-large": (lambda: dense() | {"head_dim_v": 577}, ValueError, "^head_dim_v: "),
    "head_dim_v-type": (lambda: dense() | {"head_dim_v": 512.0}, ValueError, "^head_dim_v: "),
    "head_dim_v-needed": (lambda: dense(d_qk=320), ValueError, "^head_dim_v: must be given"),
    "causal-type": (lambda: dense() | {"causal": 1}, ValueError, "^causal: expected a bool"),
    "causal-sparse": (lambda: sparse() | {"causal": True}, ValueError, "^causal: "),
    "format-unknown": (lambda: dense() | {"cache_format": "fp4"}, ValueError, "^cache_format: expected one of"),
    "format-list": (lambda: dense() | {"cache_format": ["bf16"]}, ValueError, "^cache_format: expected one of"),
    "format-reserved": (lambda: dense() | {"cache_format": "v41_fp8"}, NotImplementedError, "^cache_format: 'v41_fp8'"),
    "page_size": (lambda: dense() | {"page_size": 32}, ValueError, "^page_size: "),
    "page_size-list": (lambda: dense() | {"page_size": [16]}, ValueError, "^page_size: "),
    "num_splits-zero": (lambda: dense() | {"num_splits": 0}, ValueError, "^num_splits: "),
    "num_splits-bool": (lambda: dense() | {"num_splits": True}, ValueError, "^num_splits: "),
    "num_splits-list": (lambda: dense() | {"num_splits": [1]}, ValueError, "^num_splits: "),
    "out-shape": (lambda: dense() | {"out": torch.zeros(2, 1, 4, 576, dtype=torch.bfloat16)}, ValueError, "^out: expected"),
    "out-dtype": (lambda: dense() | {"out": torch.zeros(2, 1, 4, 512)}, ValueError, "^out: expected bfloat16"),
    "out-repeated": (
        lambda: dense() | {"out": torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16).expand(2, 1, 4, 512)},
        ValueError,
        "^out: ",
    ),
    "out-overlapping": (
        lambda: dense() | {"out": torch.zeros(600, dtype=torch.bfloat16).as_strided((2, 1, 4, 512), (16, 16, 8, 1))},
        ValueError,
        r"^out: expected every element at an address of its own, got strides \[16, 16, 8, 1\]",
    ),
    "v32-pages-of-bytes": (
        lambda: dense() | {"kv_cache": torch.zeros(6, 16 * 656, dtype=torch.uint8)},
        ValueError,
        r"^kv_cache: expected bytes of shape \[pages, page_size, 1, bytes of a token\], or .* with page_size=, got uint8",
    ),
    "fp16-queries": (
        lambda: sparse("v32_fp8") | {"q": sparse()["q"].half()},
        NotImplementedError,
        "^q: a v32_fp8 cache takes bfloat16 queries",
    ),
    "sparse-layout": (
        lambda: dense() | {"q": torch.zeros(2, 1, 4, 576).to_sparse()},
        ValueError,
        "^q: expected a strided tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_before_any_launch(case, monkeypatch):
    kernel = recording(monkeypatch)
    monkeypatch.setattr(launcher, "allocate", None)
    call, error, message = WRONG[case]
    call = call()
    with pytest.raises(error, match=message):
        mla_torch.decode(**call)
    with pytest.raises(error, match=message):
        mla_torch.explain(**call)
    assert kernel.launches == []


def test_a_kept_call_does_not_let_a_wrong_one_pass(monkeypatch):
    recording(monkeypatch)
    mla_torch.decode(**dense(), num_splits=1, causal=True)
    with pytest.raises(ValueError, match=r"^num_splits: "):
        mla_torch.decode(**dense(), num_splits=True, causal=True)
    with pytest.raises(ValueError, match=r"^causal: "):
        mla_torch.decode(**dense(), num_splits=1, causal=1)
    mla_torch.decode(**dense(), page_size=(16, None))
    with pytest.raises(ValueError, match=r"^page_size: "):
        mla_torch.decode(**dense(), page_size=(16.0, None))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", ["kv_cache", "extra_kv_cache"])
def test_a_quantised_cache_starts_at_a_multiple_of_16(name, implementation, monkeypatch):
    fresh_cache(monkeypatch)
    monkeypatch.setattr(launcher, "device_facts", lambda device: INTERPRETER)
    call = sparse("v32_fp8", extra=True)
    storage = torch.empty(call[name].numel() + 16, dtype=torch.uint8)
    offset = 8 - storage.data_ptr() % 8 + 4
    call[name] = storage[offset : offset + call[name].numel()].view(call[name].shape)
    with pytest.raises(ValueError, match=rf"^{name}: its first byte must lie at a multiple of 16"):
        mla_torch.decode(**call, implementation=implementation)


@pytest.mark.parametrize(
    "named",
    {
        "bool": True,
        "str": "0.5",
        "complex": 1j,
        "list": [0.5],
        "array-of-two": np.zeros(2),
        "nan": float("nan"),
        "inf": float("inf"),
        "beyond-float32": 1e39,
        "beyond-float64": 10**400,
        "two-elements": torch.zeros(2),
        "no-element": torch.zeros(0),
        "integer-tensor": torch.tensor(1),
        "bool-tensor": torch.tensor(True),
        "other-device": torch.zeros(1, device="meta"),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_wrong_scales_are_named(named, monkeypatch):
    _, scale = named
    kernel = recording(monkeypatch)
    with pytest.raises(ValueError, match=r"^softmax_scale: expected"):
        mla_torch.decode(**dense(), softmax_scale=scale)
    assert kernel.launches == []
