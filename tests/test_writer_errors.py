"""What `append`, `read` and `copy_pages` refuse, before anything is launched, and in which words."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_kernels.cache_plan import plan, refusals
from mla_kernels.cache_problem import make_append, make_copy_pages
from mla_kernels.device import KNOWN_DEVICES, DeviceFacts
from mla_kernels.problem import TensorSpec
from tests.test_cache import convert
from tests.writer_calls import FRAMEWORKS, module_of

BF16 = ml_dtypes.bfloat16


def call(fmt: str = "v32_fp8", n: int = 5) -> dict[str, Any]:
    """Arguments of `append`."""
    d, shape = {
        "bf16": (512, (4, 16, 1, 576)),
        "v32_fp8": (512, (4, 16, 1, 656)),
        "model1_fp8": (448, (4, 16, 1, 584)),
    }[fmt]
    return {
        "kv_cache": np.zeros(shape, BF16 if fmt == "bf16" else np.uint8),
        "latent": np.zeros((n, d), BF16),
        "rope": np.zeros((n, 64), BF16),
        "slots": np.zeros(n, np.int32),
    }


def zeros(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


WRONG: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "cache-width": ("v32_fp8", {"kv_cache": zeros(4, 16, 1, 600, dtype=np.uint8)}, ValueError, "^kv_cache: 600 bytes a token"),
    "cache-rank": (
        "v32_fp8",
        {"kv_cache": zeros(4, 16, 656, dtype=np.uint8)},
        ValueError,
        "^kv_cache: expected bytes of shape",
    ),
    "cache-dtype": (
        "v32_fp8",
        {"kv_cache": zeros(4, 16, 1, 656, dtype=np.int32)},
        ValueError,
        "^kv_cache: expected bfloat16, ",
    ),
    "cache-rank-16": ("bf16", {"kv_cache": zeros(4, 16, 576)}, ValueError, r"^kv_cache: expected bfloat16 of shape \[pages, "),
    "cache-heads": (
        "bf16",
        {"kv_cache": zeros(4, 16, 2, 576)},
        NotImplementedError,
        "^kv_cache: only caches with one key-value head",
    ),
    "reserved": ("v32_fp8", {"cache_format": "v41_fp8"}, NotImplementedError, "^cache_format: 'v41_fp8' is reserved"),
    "format": ("v32_fp8", {"cache_format": "v33"}, ValueError, "^cache_format: expected one of"),
    "format-list": ("v32_fp8", {"cache_format": ["v32_fp8"]}, ValueError, "^cache_format: expected one of"),
    "other-format": ("v32_fp8", {"cache_format": "model1_fp8"}, ValueError, "^kv_cache: expected bytes of shape"),
    "page-size": ("v32_fp8", {"page_size": 8}, ValueError, "^page_size: expected 16, as kv_cache has, got 8"),
    "page-size-zero": ("v32_fp8", {"page_size": 0}, ValueError, "^page_size: expected a positive int, got 0"),
    "page-size-needed": (
        "model1_fp8",
        {"kv_cache": zeros(4, 9792, dtype=np.uint8), "cache_format": "model1_fp8"},
        ValueError,
        "^page_size: needed for a cache given as",
    ),
    "page-too-small": (
        "model1_fp8",
        {"kv_cache": zeros(4, 9343, dtype=np.uint8), "cache_format": "model1_fp8", "page_size": 16},
        ValueError,
        r"^kv_cache: expected at least 16 \* 584 bytes a page",
    ),
    "latent-width": (
        "v32_fp8",
        {"latent": zeros(5, 448)},
        ValueError,
        r"^latent: expected bfloat16, float16 or float32 of shape \[n, 512\] for a v32_fp8 cache, got bfloat16 \[5, 448\]",
    ),
    "latent-rank": ("v32_fp8", {"latent": zeros(5, 1, 512)}, ValueError, r"^latent: expected .*\[n, 512\].* got bfloat16"),
    "latent-scalar": ("v32_fp8", {"latent": zeros()}, ValueError, r"^latent: expected .*\[n, 512\].* got bfloat16 \[\]"),
    "latent-dtype": ("v32_fp8", {"latent": zeros(5, 512, dtype=np.int32)}, ValueError, "^latent: expected .*got int32"),
    "latent-too-wide": ("bf16", {"latent": zeros(5, 600)}, ValueError, "^latent: expected fewer than d_qk=576 columns"),
    "latent-all": (
        "bf16",
        {"rope": None},
        ValueError,
        r"^latent: expected .* of shape \[n, 576\] where rope is None \(the cache has d_qk=576\), got bfloat16 \[5, 512\]",
    ),
    "rope-needed": ("v32_fp8", {"rope": None}, ValueError, r"^rope: needed for a v32_fp8 cache, of shape \[n=5, 64\]"),
    "rope-width": ("model1_fp8", {"rope": zeros(5, 32)}, ValueError, r"^rope: expected .*\[n=5, 64\] for a model1_fp8 cache"),
    "rope-rows": ("v32_fp8", {"rope": zeros(4, 64)}, ValueError, r"^rope: expected .*\[n=5, 64\].*got bfloat16 \[4, 64\]"),
    "rope-width-16": (
        "bf16",
        {"rope": zeros(5, 32)},
        ValueError,
        r"^rope: expected .*\[n=5, 64\] \(d_qk=576 less the 512 columns of latent\), got bfloat16 \[5, 32\]",
    ),
    "slots-dtype": (
        "v32_fp8",
        {"slots": zeros(5, dtype=np.int16)},
        ValueError,
        r"^slots: expected int32 or int64 of shape \[n=5\], got int16 \[5\]",
    ),
    "slots-rank": ("v32_fp8", {"slots": zeros(5, 1, dtype=np.int32)}, ValueError, r"^slots: expected .*\[n=5\]"),
    "slots-count": ("v32_fp8", {"slots": zeros(6, dtype=np.int32)}, ValueError, r"^slots: expected .*\[n=5\], got int32 \[6\]"),
    "scales-e8m0": (
        "model1_fp8",
        {"power_of_two_scales": False},
        ValueError,
        "^power_of_two_scales: a model1_fp8 cache has no other scales, got False",
    ),
    "scales-none": (
        "bf16",
        {"power_of_two_scales": False},
        ValueError,
        "^power_of_two_scales: a bf16 cache has none, got False",
    ),
    "scales-number": ("v32_fp8", {"power_of_two_scales": 1}, ValueError, "^power_of_two_scales: .*takes None, True or False"),
    "implementation": ("v32_fp8", {"implementation": "cuda"}, ValueError, "^implementation: expected None, one of 'triton'"),
}


def converted(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: convert(framework, x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", WRONG)
def test_append_refuses(name: str, framework: str) -> None:
    fmt, changes, error, message = WRONG[name]
    arguments = converted(framework, call(fmt) | changes)
    with pytest.raises(error, match=message):
        module_of(framework).append(**arguments)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_read_and_copy_pages_refuse(framework: str) -> None:
    module = module_of(framework)
    cache = convert(framework, call()["kv_cache"])
    good = convert(framework, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"^slots: expected int32 or int64 of shape \[n\], got float32 \[3\]"):
        module.read(cache, convert(framework, np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match=r"^dtype: expected None, bfloat16, float16 or float32, got float64"):
        module.read(cache, good, dtype=__import__("torch").float64 if framework == "torch" else "float64")
    with pytest.raises(ValueError, match=r"^dtype: expected None or a"):
        module.read(cache, good, dtype="no dtype")
    with pytest.raises(ValueError, match=r"^target_pages: expected int32 or int64 of shape \[n=3\], got int32 \[2\]"):
        module.copy_pages(cache, good, good[:2])
    with pytest.raises(ValueError, match=r"^source_pages: expected int32 or int64 of shape \[n\], got int32 \[3, 1\]"):
        module.copy_pages(cache, good[:, None], good)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["kv_cache", "latent", "rope", "slots"])
def test_what_is_no_array_is_named(name: str, framework: str) -> None:
    arguments = converted(framework, call()) | {name: [1, 2]}
    kind = "a torch.Tensor" if framework == "torch" else "a jax.Array or numpy.ndarray"
    with pytest.raises(ValueError, match=rf"^{name}: expected {re.escape(kind)}, got builtins.list"):
        module_of(framework).append(**arguments)


class TestTorch:
    @pytest.fixture(autouse=True)
    def _needs_torch(self) -> None:
        pytest.importorskip("torch", reason="PyTorch is not installed")

    def append(self, fmt: str = "v32_fp8", **changes: Any) -> Any:
        import mla_torch

        return mla_torch.append(**converted("torch", call(fmt)) | changes)

    @pytest.mark.parametrize("name", ["latent", "rope", "slots"])
    def test_tensors_of_two_devices_are_named(self, name: str) -> None:
        other = converted("torch", call())[name].to("meta")
        with pytest.raises(ValueError, match=rf"^{name}: expected device cpu, as kv_cache has, got meta"):
            self.append(**{name: other})

    def test_the_meta_device_is_refused_in_words(self) -> None:
        tensors = {name: tensor.to("meta") for name, tensor in converted("torch", call()).items()}
        with pytest.raises(NotImplementedError, match="reference: kv_cache: a tensor on the meta device holds no values"):
            self.append(**tensors)

    @pytest.mark.parametrize("name", ["kv_cache", "latent", "rope"])
    def test_gradients_are_refused_in_words(self, name: str) -> None:
        import torch

        tensor = converted("torch", call("bf16"))[name].requires_grad_()
        with pytest.raises(ValueError, match=rf"^{name}: requires a gradient; append is forward-only"):
            self.append("bf16", **{name: tensor})
        with torch.no_grad():
            self.append("bf16", **{name: tensor})

    def test_tangents_and_transforms_are_refused_in_words(self) -> None:
        import torch
        from torch.autograd import forward_ad

        latent = converted("torch", call())["latent"]
        with forward_ad.dual_level():
            with pytest.raises(ValueError, match=r"^latent: has a tangent, which append would lose"):
                self.append(latent=forward_ad.make_dual(latent, latent))
        with pytest.raises(ValueError, match=r"^latent: belongs to a transform of torch.func"):
            torch.func.vmap(lambda latent: self.append(latent=latent))(torch.stack([latent, latent]))
        with pytest.raises(ValueError, match=r"^append: does not run in a transform of torch.func"):
            torch.func.vmap(lambda _: self.append())(torch.zeros(2))

    @pytest.mark.parametrize("name", ["latent", "rope", "slots"])
    def test_innermost_strides(self, name: str) -> None:
        import torch

        tensor = converted("torch", call())[name]
        wide = torch.cat([tensor, tensor], -1)[..., ::2]
        with pytest.raises(ValueError, match=rf"^{name}: the innermost dimension must be dense \(stride 1\)"):
            self.append(**{name: wide})

    def test_memory_that_is_shared_is_not_written(self) -> None:
        cache = converted("torch", call())["kv_cache"]
        with pytest.raises(ValueError, match=r"^kv_cache: expected every token at an address of its own, got strides"):
            self.append(kv_cache=cache[:1].expand(4, -1, -1, -1))
        with pytest.raises(ValueError, match=r"^kv_cache: expected every token at an address of its own, got strides"):
            self.append(kv_cache=cache.as_strided(cache.shape, (656, 656, 656, 1)))

    def test_bytes_out_of_alignment(self) -> None:
        import torch

        memory = torch.zeros(4 * 16 * 656 + 4, dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"^kv_cache: its first byte must lie at a multiple of 16"):
            self.append(kv_cache=memory[4:].view(4, 16, 1, 656))

    def test_strides_that_are_no_words(self) -> None:
        import torch

        memory = torch.zeros(4 * (16 * 656 + 2), dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"^kv_cache: expected page and token strides that are multiples of 4 bytes"):
            self.append(kv_cache=memory.as_strided((4, 16, 1, 656), (16 * 656 + 2, 656, 656, 1)))

    @pytest.mark.parametrize(("name", "good", "wrong"), [("power_of_two_scales", False, 0), ("page_size", 16, 16.0)])
    def test_a_kept_call_does_not_let_a_wrong_one_pass(self, name: str, good: Any, wrong: Any) -> None:
        self.append(**{name: good})
        with pytest.raises(ValueError, match=rf"^{name}: "):
            self.append(**{name: wrong})

    def test_nothing_is_written_by_a_call_that_is_refused(self) -> None:
        import torch

        cache = torch.full((4, 16, 1, 656), 7, dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"^rope: "):
            self.append(kv_cache=cache, rope=torch.zeros(5, 65))
        assert (cache == 7).all()

    @pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
    def test_bytes_of_other_dtypes(self, dtype: str) -> None:
        import torch

        import mla_torch

        tensors = converted("torch", call())
        tensors["latent"] = torch.randn(5, 512)
        tensors["slots"] = torch.arange(5, dtype=torch.int32)
        expected = mla_torch.append(**tensors).clone()
        other = torch.zeros_like(expected).view(getattr(torch, dtype))
        assert mla_torch.append(**tensors | {"kv_cache": other}) is other
        assert torch.equal(other.view(torch.uint8), expected)
        rows = mla_torch.read(other, tensors["slots"])
        assert torch.equal(rows, mla_torch.read(expected, tensors["slots"]))


def specs(n: int, page_size: int = 16, index: str = "int32") -> dict[str, TensorSpec]:
    return {
        "kv_cache": TensorSpec((100, page_size, 1, 656), "uint8"),
        "latent": TensorSpec((n, 512), "bfloat16"),
        "rope": TensorSpec((n, 64), "bfloat16"),
        "slots": TensorSpec((n,), index),
    }


def test_nothing_compiles_anew_for_another_number_of_tokens() -> None:
    """What a binary depends on is the same for every n: constants, warps, and no integer that is specialised."""
    launches = [plan(make_append(**specs(n)), KNOWN_DEVICES["NVIDIA H200"]).launches[0] for n in (1, 2, 16, 127, 128, 65536)]
    for launch in launches:
        assert launch.constexprs == launches[0].constexprs
        assert (launch.num_warps, launch.num_stages) == (launches[0].num_warps, launches[0].num_stages)
    if hasattr(launches[0].kernel, "params"):
        runtime = [p for p in launches[0].kernel.params if p.name in ("n", "num_pages")]
        assert len(runtime) == 2 and all(p.do_not_specialize for p in runtime)
    assert [launch.grid for launch in launches[-2:]] == [(32, 1, 1), (16384, 1, 1)]


def test_a_decode_step_is_one_wave() -> None:
    launch = plan(make_append(**specs(128)), KNOWN_DEVICES["NVIDIA H200"]).launches[0]
    assert launch.grid[0] <= KNOWN_DEVICES["NVIDIA H200"].multiprocessors


def test_old_gpus_are_refused_in_words() -> None:
    old = DeviceFacts("Tesla T4", (7, 5), 40, 65_536)
    (refusal,) = refusals(make_append(**specs(4)), old)
    assert str(refusal) == "kv_cache: needs a GPU of compute capability 8.0 or more, Tesla T4 has (7, 5)"


def test_more_copies_than_a_grid_holds_are_refused_in_words() -> None:
    pages = TensorSpec((2**30,), "int32")
    problem = make_copy_pages(TensorSpec((100, 64, 1, 656), "uint8"), pages, pages)
    (refusal,) = refusals(problem, KNOWN_DEVICES["NVIDIA H200"])
    assert str(refusal).startswith("source_pages: fewer than 2**31 blocks of 8192 bytes, got 6442450944")


def test_more_pages_than_an_index_counts_are_refused_in_words() -> None:
    cache = TensorSpec((2**31, 1, 1, 16), "bfloat16")
    with pytest.raises(NotImplementedError, match=r"^kv_cache: at most 2\*\*31 - 1 pages, got bfloat16"):
        make_append(cache, TensorSpec((4, 16), "bfloat16"), None, TensorSpec((4,), "int64"))
