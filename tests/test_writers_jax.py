"""The writers under JAX's transformations: in place where the cache is donated, functional where not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp

import mla_jax
from mla_jax import jax_triton_compat as compat
from mla_kernels.cache_plan import plan
from mla_kernels.cache_problem import make_append, make_copy_pages, make_read
from mla_kernels.device import KNOWN_DEVICES, DeviceFacts
from mla_kernels.formats import get_format
from mla_kernels.problem import TensorSpec
from tests.compiling import compile_launch
from tests.jax_lowered import TARGETS, kernel_calls, ptx_of_calls
from tests.test_compile_jax import uses

DEVICE = "NVIDIA H200"
FORMATS = ("bf16", "fp16", "v32_fp8", "model1_fp8")
IMPLEMENTATIONS = [pytest.param("triton", marks=pytest.mark.interpret), "reference"]

lowers = [
    pytest.mark.compile,
    pytest.mark.skipif(not compat.available(), reason=f"kernels cannot be lowered: {compat.reason()}"),
]


def shapes(fmt: str, n: int = 6, pages: int = 8, page_size: int = 16) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes and dtypes of the arrays of `append`, and its options."""
    form = get_format(fmt)
    options = {}
    if form.scale_in_page:
        cache: tuple[int, ...] = (pages, form.page_bytes(page_size))
        options["page_size"] = page_size
    else:
        cache = (pages, page_size, 1, form.token_bytes or 576)
    arrays = {
        "kv_cache": (cache, form.dtype),
        "latent": ((n, form.d_nope or 512), "bfloat16"),
        "rope": ((n, 64), "bfloat16"),
        "slots": ((n,), "int32"),
    }
    return {name: jax.ShapeDtypeStruct(*array) for name, array in arrays.items()}, options


def arrays_of(fmt: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    structs, options = shapes(fmt, **more)
    rng = np.random.default_rng(0)
    made = {}
    for name, struct in structs.items():
        if name == "kv_cache":
            made[name] = jnp.zeros(struct.shape, struct.dtype)
        elif name == "slots":
            made[name] = jnp.asarray(rng.permutation(64)[: struct.shape[0]].astype(np.int32))
        else:
            made[name] = jnp.asarray(rng.standard_normal(struct.shape), struct.dtype)
    return made, options


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_eager_jit_and_scan_write_the_same_bytes(fmt: str, implementation: str) -> None:
    arrays, options = arrays_of(fmt)
    before = np.array(arrays["kv_cache"])

    def write(kv_cache: Any, latent: Any, rope: Any, slots: Any) -> Any:
        return mla_jax.append(kv_cache, latent, rope, slots, implementation=implementation, **options)

    expected = write(**arrays)
    np.testing.assert_array_equal(bits(arrays["kv_cache"]), bits(before))  # functional
    assert (bits(expected) != bits(before)).any()
    np.testing.assert_array_equal(bits(jax.jit(write)(**arrays)), bits(expected))
    donated = jax.jit(write, donate_argnums=0)(arrays["kv_cache"] + 0, arrays["latent"], arrays["rope"], arrays["slots"])
    np.testing.assert_array_equal(bits(donated), bits(expected))

    def step(kv_cache: Any, token: Any) -> Any:
        return write(kv_cache, *(part[None] for part in token)), None

    tokens = (arrays["latent"], arrays["rope"], arrays["slots"])
    carried, _ = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens))(arrays["kv_cache"], tokens)
    np.testing.assert_array_equal(bits(carried), bits(expected))


@pytest.mark.parametrize("fmt", ["fp16", "v32_fp8", "model1_fp8"])
def test_the_reference_writes_a_donated_cache_in_place(fmt: str) -> None:
    structs, options = shapes(fmt, pages=4000)
    write = jax.jit(lambda c, a, r, s: mla_jax.append(c, a, r, s, implementation="reference", **options), donate_argnums=0)
    memory = write.lower(*structs.values()).compile().memory_analysis()
    cache = structs["kv_cache"]
    size = int(np.prod(cache.shape)) * cache.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size // 100


@pytest.mark.parametrize("name", ["latent", "rope"])
def test_gradients_are_refused_in_words(name: str) -> None:
    arrays, options = arrays_of("bf16")

    def loss(x: Any) -> Any:
        return mla_jax.append(**arrays | {name: x}, **options).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=r"^mla_jax.append is forward-only"):
        jax.grad(loss)(arrays[name].astype(jnp.float32))


def test_vmap_is_refused_in_words() -> None:
    arrays, options = arrays_of("v32_fp8")
    slots = jnp.stack([arrays["slots"]] * 2)
    with pytest.raises(NotImplementedError, match=r"^mla_jax.append under vmap: one cache"):
        jax.vmap(lambda slots: mla_jax.append(**arrays | {"slots": slots}, **options))(slots)
    with pytest.raises(NotImplementedError, match=r"^mla_jax.read under vmap: one cache"):
        jax.vmap(lambda slots: mla_jax.read(arrays["kv_cache"], slots))(slots)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shards_have_pages_of_their_own(implementation: str) -> None:
    arrays, options = arrays_of("v32_fp8")
    expected = mla_jax.append(**arrays, implementation=implementation)
    rows = mla_jax.read(expected, arrays["slots"], implementation=implementation)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("x")

    def step(kv_cache: Any, latent: Any, rope: Any, slots: Any) -> Any:
        kv_cache = mla_jax.append(kv_cache, latent, rope, slots, implementation=implementation, **options)
        return kv_cache, mla_jax.read(kv_cache, slots, implementation=implementation)

    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(split,) * 4, out_specs=(split, split)))
    found = sharded(*(arrays[name] for name in ("kv_cache", "latent", "rope", "slots")))
    np.testing.assert_array_equal(bits(found[0]), bits(expected))
    np.testing.assert_array_equal(bits(found[1]), bits(rows))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_bytes_of_other_dtypes_are_read_and_not_written(dtype: str) -> None:
    arrays, _ = arrays_of("v32_fp8")
    written = mla_jax.append(**arrays)
    other = written.view(dtype)
    np.testing.assert_array_equal(bits(mla_jax.read(other, arrays["slots"])), bits(mla_jax.read(written, arrays["slots"])))
    with pytest.raises(NotImplementedError, match=rf"^kv_cache: written as uint8 alone, got {dtype}"):
        mla_jax.append(**arrays | {"kv_cache": other})
    with pytest.raises(NotImplementedError, match=rf"^kv_cache: written as uint8 alone, got {dtype}"):
        mla_jax.copy_pages(other, arrays["slots"], arrays["slots"])


def test_arrays_of_numpy() -> None:
    arrays, _ = arrays_of("v32_fp8")
    expected = mla_jax.append(**arrays)
    found = mla_jax.append(**{name: np.asarray(x) for name, x in arrays.items()})
    np.testing.assert_array_equal(bits(found), bits(expected))


def test_slots_beyond_int32() -> None:
    """As numpy has them: without 64-bit types JAX would write to others."""
    cache = jnp.zeros((2, 16, 1, 576), jnp.bfloat16)
    slots = np.array([2**32 + 5, -(2**32) + 6, 7], np.int64)
    written = mla_jax.append(cache, jnp.ones((3, 512)), jnp.ones((3, 64)), slots)
    assert np.asarray(written.astype(jnp.float32)).any((2, 3)).nonzero()[1].tolist() == [7]
    assert (mla_jax.read(written, slots)[:, 0] == jnp.array([0, 0, 1])).all()
    copied = mla_jax.copy_pages(written, np.array([0, 2**32], np.int64), np.array([2**32 + 1, 1], np.int64))
    assert (copied == written).all()


def test_pages_as_a_whole_and_by_token_are_the_same() -> None:
    arrays, options = arrays_of("model1_fp8", page_size=72)  # 72 * 584 bytes need no padding
    expected = mla_jax.append(**arrays, **options)
    by_token = arrays["kv_cache"].reshape(8, 72, 1, 584)
    found = mla_jax.append(**arrays | {"kv_cache": by_token})
    np.testing.assert_array_equal(bits(found).reshape(8, -1), bits(expected))
    rows = mla_jax.read(found, arrays["slots"])
    np.testing.assert_array_equal(bits(rows), bits(mla_jax.read(expected, arrays["slots"], **options)))


def lower(function: Any, arrays: dict[str, Any], donate: bool = True) -> Any:
    """`function(arrays)` for CUDA, its `kv_cache` donated."""
    rest = {name: x for name, x in arrays.items() if name != "kv_cache"}
    jitted = jax.jit(lambda kv_cache, rest: function({"kv_cache": kv_cache, **rest}), donate_argnums=(0,) if donate else ())
    with mla_jax.device_facts(DEVICE):
        return jitted.trace(arrays["kv_cache"], rest).lower(lowering_platforms=("cuda",))


def spec(array: Any) -> TensorSpec:
    return TensorSpec(tuple(array.shape), str(array.dtype))


class TestLowered:
    pytestmark = lowers

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_append_is_one_kernel_in_place(self, fmt: str) -> None:
        """The kernel of the plan, to the last instruction; the cache goes to it alone, and what is donated is the result."""
        arrays, options = shapes(fmt, n=128)
        lowered = lower(lambda arrays: mla_jax.append(**arrays, **options), arrays)
        (call,) = kernel_calls(lowered)
        made = plan(make_append(**{name: spec(x) for name, x in arrays.items()}, **options), KNOWN_DEVICES[DEVICE])
        (launch,) = made.launches
        assert call.aliases == launch.aliases == {0: 0}
        assert call.operands[0] == call.results[0]
        assert call.grid == launch.grid == (32, 1, 1)
        assert call.ptx == ptx_of_calls(compile_launch(made, launch).ptx)
        module = lowered.compiler_ir("stablehlo")
        donated = str(module.body.operations[0].attributes["arg_attrs"][0])
        assert "tf.aliasing_output = 0" in donated or "jax.buffer_donor" in donated
        (operations,) = uses(module, arrays_in_order(arrays)).values()
        assert operations and operations <= set(TARGETS)

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_copy_pages_is_one_kernel_in_place(self, fmt: str) -> None:
        arrays, options = shapes(fmt)
        pages = jax.ShapeDtypeStruct((3,), jnp.int32)
        arrays = {"kv_cache": arrays["kv_cache"], "source_pages": pages, "target_pages": pages}
        lowered = lower(lambda arrays: mla_jax.copy_pages(**arrays, **options), arrays)
        (call,) = kernel_calls(lowered)
        made = plan(make_copy_pages(**{name: spec(x) for name, x in arrays.items()}, **options), KNOWN_DEVICES[DEVICE])
        assert call.aliases == {0: 0}
        assert call.ptx == ptx_of_calls(compile_launch(made, made.launches[0]).ptx)

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_read_copies_no_cache(self, fmt: str) -> None:
        arrays, options = shapes(fmt)
        arrays = {name: arrays[name] for name in ("kv_cache", "slots")}
        lowered = lower(lambda arrays: mla_jax.read(**arrays, **options), arrays, donate=False)
        (call,) = kernel_calls(lowered)
        made = plan(make_read(**{name: spec(x) for name, x in arrays.items()}, **options), KNOWN_DEVICES[DEVICE])
        assert call.aliases == {}
        assert call.ptx == ptx_of_calls(compile_launch(made, made.launches[0]).ptx)
        (operations,) = uses(lowered.compiler_ir("stablehlo"), arrays_in_order(arrays)).values()
        assert operations <= set(TARGETS)

    def test_a_step_writes_and_decodes(self) -> None:
        """The cache goes to the writer, and what the writer gives to the decoding kernels."""
        arrays, _ = shapes("v32_fp8", n=4)
        arrays["q"] = jax.ShapeDtypeStruct((4, 1, 16, 576), jnp.bfloat16)
        arrays["indices"] = jax.ShapeDtypeStruct((4, 1, 64), jnp.int32)

        def step(arrays: dict[str, Any]) -> Any:
            kv_cache = mla_jax.append(*(arrays[name] for name in ("kv_cache", "latent", "rope", "slots")))
            return kv_cache, mla_jax.decode(arrays["q"], kv_cache, indices=arrays["indices"], implementation="triton")

        lowered = lower(step, arrays)
        calls = kernel_calls(lowered)
        assert [call.name for call in calls][:1] == ["append_kernel"]
        (operations,) = uses(lowered.compiler_ir("stablehlo"), arrays_in_order(arrays)).values()
        assert operations <= set(TARGETS)

    def test_a_gpu_gets_the_reference_only_by_name(self) -> None:
        arrays, options = shapes("v32_fp8")
        old = DeviceFacts("Tesla T4", (7, 5), 40, 65_536)
        with mla_jax.device_facts(old):
            with pytest.raises(NotImplementedError, match=r"triton: kv_cache: needs a GPU of compute capability 8.0"):
                jax.eval_shape(lambda arrays: mla_jax.append(**arrays, **options), arrays)
            jax.eval_shape(lambda arrays: mla_jax.append(**arrays, **options, implementation="reference"), arrays)

    def test_kernels_alone_are_refused_elsewhere(self) -> None:
        arrays, options = shapes("v32_fp8")
        with mla_jax.device_facts(DEVICE):
            write = jax.jit(lambda arrays: mla_jax.append(**arrays, **options, implementation="triton")).trace(arrays)
            with pytest.raises(
                NotImplementedError, match=r"^implementation: 'triton' needs a CUDA device and got platform cpu"
            ):
                write.lower(lowering_platforms=("cpu",))
            default = jax.jit(lambda arrays: mla_jax.append(**arrays, **options)).trace(arrays)
            default.lower(lowering_platforms=("cpu",)).compile()


def arrays_in_order(arrays: dict[str, Any]) -> list[str]:
    """The names as `uses` sorts them: those of the cache first, as it is the first argument."""
    return ["kv_cache", *(f"z_{name}" for name in arrays if name != "kv_cache")]
