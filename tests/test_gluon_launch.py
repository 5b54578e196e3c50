"""Launches of Gluon kernels on TMA descriptors: compiled as Triton compiles them, and as JAX lowers them."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mla_kernels.device import KNOWN_DEVICES
from mla_kernels.launch import TileDescriptor
from tests.compiling import Config, compile_launch

H200 = KNOWN_DEVICES["NVIDIA H200"]

pytestmark = pytest.mark.compile

if importlib.util.find_spec("jax") is None:
    gluon_supported = False
else:
    import jax

    from mla_jax import jax_triton_compat as compat
    from mla_jax import launcher
    from tests.jax_lowered import Descriptor, kernel_calls

    gluon_supported = compat.gluon_supported()

needs_gluon = pytest.mark.skipif(not gluon_supported, reason="Gluon kernels need jax-triton 0.4 or later")


def toy_plan(format="bf16"):
    from tests.gluon_toy import fetching_plan

    return fetching_plan(Config(format, 64).problem(), H200)


def with_tile(plan, **changes):
    (launch,) = plan.launches
    tile, *others = launch.inputs
    return replace(plan, launches=(replace(launch, inputs=(replace(tile, **changes), *others)),))


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_compiled(format):
    plan = toy_plan(format)
    (launch,) = plan.launches
    result = compile_launch(plan, launch)
    assert "cp.async.bulk.tensor.2d" in result.ptx
    assert result.num_warps > launch.num_warps
    assert result.threads == 32 * result.num_warps
    assert 64 * 64 * 2 < result.shared_memory <= H200.shared_memory


def test_the_type_of_a_descriptor_is_what_tritons_launcher_makes_of_it():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tests.compiling import _input_type

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tensor = SimpleNamespace(data_ptr=lambda: 0, dtype="bf16")
    descriptor = TensorDescriptor(tensor, [256, 576], [576, 1], [64, 64], layout=layout)
    kind, _ = native_specialize_impl(CUDABackend, descriptor, False, True, True)
    assert _input_type(toy_plan(), TileDescriptor("q", (256, 576), 576, (64, 64))) == kind


def lower(plan):
    problem = plan.problem
    q = jax.ShapeDtypeStruct((problem.batch, problem.s_q, problem.h_q, problem.d_qk), problem.dtype)

    def call(q):
        # The toy does not write `lse`.
        return launcher.run(plan, {"q": q, "lse": q})

    return jax.jit(call).trace(q).lower(lowering_platforms=("cuda",))


@needs_gluon
@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_lowered(format):
    plan = toy_plan(format)
    (launch,) = plan.launches
    lowered = lower(plan)
    (call,) = kernel_calls(lowered)
    compiled = compile_launch(plan, launch)
    assert call.ptx == compiled.ptx
    assert f".reqntid {32 * call.num_warps}" in call.ptx
    assert call.num_warps == compiled.num_warps
    assert call.shared_memory == compiled.shared_memory
    assert call.grid == launch.grid
    # The scalar that is 1 is still an argument.
    assert call.params == ("descriptor", "pointer", 1, "pointer")
    assert call.descriptors == (Descriptor((256, 576), (576, 1), (64, 64)),)
    # The kernel reads the caller's own array.
    dtype = {"bf16": "bf16", "fp16": "f16"}[format]
    assert call.operands == (f"tensor<4x1x64x576x{dtype}>",) * 2
    assert "reshape" not in lowered.as_text()


@needs_gluon
def test_views_within_an_array_are_lowered():
    """Rows may be wider apart than the view is wide, and the last of them may be cut off behind it."""
    plan = with_tile(toy_plan(), shape=(128, 64), row_stride=2 * 576)
    (call,) = kernel_calls(lower(plan))
    assert call.descriptors == (Descriptor((128, 64), (1152, 1), (64, 64)),)


@needs_gluon
@pytest.mark.parametrize("changes", [{"shape": (257, 576)}, {"row_stride": 584}], ids=["shape", "row_stride"])
def test_a_view_beyond_its_array_is_refused(changes):
    with pytest.raises(ValueError, match=r"^q: a view of .* does not lie within bfloat16 \[4, 1, 64, 576\]"):
        lower(with_tile(toy_plan(), **changes))


@pytest.mark.skipif(gluon_supported, reason="jax-triton 0.4 and later takes descriptors")
@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
def test_an_old_jax_triton_is_told_that_it_takes_no_descriptors():
    with pytest.raises(RuntimeError, match=r"cannot launch a Triton kernel: .*"):
        lower(toy_plan())
