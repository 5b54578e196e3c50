"""What the adapter to jax-triton promises, and one test per fault that it cures."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
import triton
import triton.language as tl

from mla_jax import jax_triton_compat as compat
from mla_kernels.device import KNOWN_DEVICES, DeviceFacts
from mla_kernels.launch import Buffer, Launch, Plan
from tests.jax_lowered import kernel_calls, kernel_operations

ROOT = Path(__file__).resolve().parent.parent
JAX_TRITON = compat.version_of("jax-triton")
JAX = jax.__version_info__

needs_jax_triton = pytest.mark.skipif(not compat.available(), reason=f"kernels cannot be lowered: {compat.reason()}")
needs_gluon = pytest.mark.skipif(not compat.gluon_supported(), reason="Gluon kernels need jax-triton 0.4 or later")


def kernel_with_everything(x_ptr, bytes_ptr, before_ptr, one, n, y_ptr, after_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    x = tl.load(x_ptr + i * one, mask=ok, other=0.0)
    code = tl.load(bytes_ptr + i, mask=ok, other=0).to(tl.float32)
    tl.store(y_ptr + i, x * x + code, mask=ok)  # a product and a sum that fuse
    tl.store(after_ptr + i, tl.load(before_ptr + i, mask=ok, other=0.0) + x, mask=ok)


toy_kernel = triton.jit(kernel_with_everything, do_not_specialize=["one", "n"])


def toy_plan(kernel=toy_kernel, n=100, facts: DeviceFacts = KNOWN_DEVICES["NVIDIA H200"]) -> Plan:
    launch = Launch(
        kernel=kernel,
        inputs=("x", "codes", "lse"),
        scalars=(1, n),
        outputs=("out", "lse"),
        constexprs={"BLOCK": 64},
        grid=(2, 1, 1),
        num_warps=4,
        num_stages=2,
    )
    buffers = {"out": Buffer((n,), "float32"), "lse": Buffer((n,), "float32")}
    return Plan("toy", None, facts, (launch,), buffers)


def lower_toy(codes="uint8", n=100):
    from mla_jax import launcher

    arrays = {
        "x": jax.ShapeDtypeStruct((n,), jnp.float32),
        "codes": jax.ShapeDtypeStruct((n,), codes),
        "lse": jax.ShapeDtypeStruct((n,), jnp.float32),
    }
    plan = toy_plan(n=n)
    return jax.jit(lambda arrays: launcher.run(plan, arrays)).trace(arrays).lower(lowering_platforms=("cuda",))


def in_fresh_process(code: str, **environment: str) -> str:
    """What `code` prints in a process of its own."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"}
    env |= {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_does_not_import_jax_triton():
    code = "import sys, mla_jax; print('jax_triton' in sys.modules, 'torch' in sys.modules)"
    assert in_fresh_process(code) == "False False"


@pytest.mark.parametrize("value", [None, "", "/somewhere/else"])
def test_triton_cache_dir_survives(value):
    code = (
        "import os; from mla_jax import jax_triton_compat as c; c.available(); print(repr(os.environ.get('TRITON_CACHE_DIR')))"
    )
    environment = {} if value is None else {"TRITON_CACHE_DIR": value}
    assert in_fresh_process(code, **environment) == repr(value)


def test_without_jax_triton():
    """A CPU user without jax-triton is served, and a kernel asked for says what is missing."""
    code = """
import sys
sys.modules["jax_triton"] = None
import jax, jax.numpy as jnp, mla_jax
from mla_jax import jax_triton_compat
assert not jax_triton_compat.available()
assert "jax-triton" in jax_triton_compat.reason()
q = jnp.ones((1, 1, 4, 576), jnp.bfloat16)
cache = jnp.ones((2, 4, 1, 576), jnp.bfloat16)
call = q, cache, jnp.zeros((1, 1), jnp.int32), jnp.full(1, 3, jnp.int32)
out, lse = mla_jax.decode(*call)
assert (out == 1).all()
try:
    with mla_jax.device_facts("NVIDIA H200"):
        jax.eval_shape(lambda *a: mla_jax.decode(*a), *call)
except NotImplementedError as error:
    print(error)
"""
    assert "jax-triton" in in_fresh_process(code, TRITON_INTERPRET="0")


def test_without_gpu_plugin():
    """A machine whose jaxlib has no GPU parts: the reason says so and nothing else is lost."""
    code = """
import sys
for name in ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_plugins"):
    sys.modules[name] = None
import mla_jax
from mla_jax import jax_triton_compat
assert not jax_triton_compat.available(), "a plugin was found"
print(jax_triton_compat.reason())
"""
    assert in_fresh_process(code)


@pytest.mark.parametrize("text", ["0.4.1", "3.6.0+git123", "1.2rc1"])
def test_version_of(monkeypatch, text):
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: text)
    assert compat.version_of("anything") == {"0.4.1": (0, 4, 1), "3.6.0+git123": (3, 6, 0), "1.2rc1": (1,)}[text]


def test_version_of_what_is_not_installed():
    assert compat.version_of("no-such-distribution-here") == ()


def test_runtime_int():
    one = compat.RuntimeInt(1)
    assert not one == 1  # noqa: SIM201
    assert one != 1
    assert one == compat.RuntimeInt(1)
    assert hash(one) == hash(compat.RuntimeInt(1))
    assert isinstance(one, int)
    assert one + 1 == 2


@pytest.mark.compile
@needs_jax_triton
def test_lowered_call():
    (call,) = kernel_calls(lower_toy())
    assert call.name == "kernel_with_everything"
    assert (call.grid, call.num_warps, call.compute_capability) == ((2, 1, 1), 4, 90)
    # The in-place buffer comes twice, and the scalar that is 1 is still an argument.
    assert call.params == ("pointer", "pointer", "pointer", 1, 100, "pointer", "pointer")
    assert call.aliases == {2: 1}


@pytest.mark.interpret
@pytest.mark.parametrize("codes", ["uint8", "int8", "float8_e4m3fn"])
def test_interpreted_call(codes):
    """The same launch interpreted on numpy arrays: in place, in two pointers, and with bytes of any dtype."""
    import numpy as np

    from mla_jax import interpret

    x, before = np.arange(100, dtype=np.float32), np.full(100, 7, np.float32)
    code = np.arange(100, 200).astype(np.uint8)
    # `lse` is a buffer of the plan, so what it held before comes from a launch of its own.
    (launch,) = toy_plan().launches
    first = replace(launch, inputs=("x", "codes", "before"))
    plan = replace(toy_plan(), launches=(first, launch))
    out, lse = interpret.execute(plan, {"x": x, "codes": code.view(codes), "before": before})
    np.testing.assert_array_equal(out, x * x + code)
    np.testing.assert_array_equal(lse, before + 2 * x)


@pytest.mark.compile
@needs_jax_triton
def test_call_without_aliases():
    plan = toy_plan()
    (launch,) = plan.launches

    def f(x, codes, before):
        outputs = [jax.ShapeDtypeStruct((100,), jnp.float32)] * 2
        return compat.triton_call(
            launch.kernel,
            [x, codes, before],
            launch.scalars,
            outputs,
            launch.constexprs,
            grid=launch.grid,
            num_warps=4,
            num_stages=2,
            compute_capability=90,
            aliases={},
            name="toy",
        )

    x, codes = jax.ShapeDtypeStruct((100,), jnp.float32), jax.ShapeDtypeStruct((100,), jnp.uint8)
    (call,) = kernel_calls(jax.jit(f).trace(x, codes, x).lower(lowering_platforms=("cuda",)))
    assert call.aliases == {}
    assert call.params == ("pointer", "pointer", "pointer", 1, 100, "pointer", "pointer")
    (aliased,) = kernel_calls(lower_toy())
    assert call.ptx == aliased.ptx


@pytest.mark.compile
@needs_jax_triton
@pytest.mark.skipif(JAX < (0, 11), reason="XLA before that of jax 0.11 fuses no calls with slices")
def test_xla_sees_no_slices_around_a_call_that_updates_in_place():
    module = lower_toy().compiler_ir("stablehlo")
    (call,) = kernel_operations(module)
    before = {getattr(operand.owner, "name", "argument") for operand in call.operands}
    after = {use.owner.operation.name for result in call.results for use in result.uses}
    assert before == after == {"stablehlo.optimization_barrier"}


@pytest.mark.compile
@needs_jax_triton
def test_same_binary_as_tritons_launcher():
    """Triton compiles a kernel to the same PTX when it launches it itself, its scalars not specialised."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x_ptr": "*fp32", "bytes_ptr": "*u8", "before_ptr": "*fp32", "one": "i32", "n": "i32"}
    signature |= {"y_ptr": "*fp32", "after_ptr": "*fp32", "BLOCK": "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 5, 6)}
    source = ASTSource(toy_kernel, signature, {"BLOCK": 64}, attrs)
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # a cached result may name the files of another checkout
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (call,) = kernel_calls(lower_toy())
    assert call.ptx == compiled.asm["ptx"]


@pytest.mark.compile
@needs_jax_triton
@pytest.mark.parametrize(("codes", "mlir"), [("float8_e4m3fn", "f8E4M3FN"), ("int8", "i8")])
def test_bytes_of_any_dtype_are_passed_without_a_copy(codes, mlir):
    lowered = lower_toy(codes)
    (call,) = kernel_calls(lowered)
    (plain,) = kernel_calls(lower_toy("uint8"))
    assert call.ptx == plain.ptx
    assert call.aliases == plain.aliases
    assert call.operands[1] == f"tensor<100x{mlir}>"  # the caller's own array, not a converted one
    assert "bitcast" not in lowered.as_text()
    assert "convert" not in lowered.as_text()


@pytest.mark.compile
@needs_jax_triton
@pytest.mark.skipif(JAX < (0, 12), reason="dead-code rules changed in jax 0.12")
def test_dead_code_elimination_on_jax_0_12():
    """Without the rule every jitted call fails there."""
    lowered = lower_toy()
    assert len(kernel_calls(lowered)) == 1


def test_dead_code_rule_is_replaced_only_where_it_must_be(monkeypatch):
    from jax._src.interpreters import partial_eval

    class Lib:
        triton_kernel_call_p = object()

    rules = {Lib.triton_kernel_call_p: lambda used, eqn: ("kept", eqn)}
    monkeypatch.setattr(partial_eval, "dce_rules", rules)
    compat.register_dce_rule(Lib)
    assert rules[Lib.triton_kernel_call_p]([True], [False], "equation") == ("kept", "equation")
    replaced = rules[Lib.triton_kernel_call_p]
    compat.register_dce_rule(Lib)
    assert rules[Lib.triton_kernel_call_p] is replaced


@pytest.mark.skipif(JAX_TRITON < (0, 4), reason="jax-triton before 0.4 does not import TMA_TF32")
def test_tma_tf32_is_lent_and_taken_back(monkeypatch):
    import triton.backends.nvidia.driver as driver

    monkeypatch.delattr(driver, "TMA_TF32", raising=False)
    with compat.provide_tma_tf32():
        assert driver.TMA_TF32 == 11
    assert not hasattr(driver, "TMA_TF32")


@needs_jax_triton
@pytest.mark.skipif(JAX_TRITON < (0, 4), reason="jax-triton before 0.4 has no stub of the NVIDIA backend")
def test_nvidia_backend_is_not_a_stub():
    from jax_triton import triton_lib

    assert triton_lib.cb.__name__ == "triton.backends.nvidia.compiler"


@needs_gluon
def test_compiler_is_adapted_once():
    from jax_triton import triton_lib

    before = triton_lib.TritonFunction._compile_kernel
    compat.adapt_compiler(triton_lib)
    assert triton_lib.TritonFunction._compile_kernel is before


@pytest.mark.compile
@needs_gluon
def test_gluon_kernel_is_compiled_as_triton_compiles_it():
    """Passes and launch size of a warp-specialised Gluon kernel: those of Triton, not those of a plain kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from tests.gluon_toy import specialised_kernel

    x = jax.ShapeDtypeStruct((256,), jnp.float32)

    def f(x):
        return compat.triton_call(
            specialised_kernel, [x], [256], [x], {"BLOCK": 128},
            grid=(2, 1, 1), num_warps=4, num_stages=1, compute_capability=90, aliases={}, name="toy",
        )  # fmt: skip

    (call,) = kernel_calls(jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)))
    signature = {"x_ptr": "*fp32", "n": "i32", "y_ptr": "*fp32", "BLOCK": "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i in (0, 2)}
    source = GluonASTSource(specialised_kernel, signature, {"BLOCK": 128}, attrs)
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # a cached result may name the files of another checkout
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert call.ptx == compiled.asm["ptx"]
    assert call.shared_memory == compiled.metadata.shared
    assert call.num_warps == compiled.metadata.num_warps > 4
    assert f".reqntid {32 * call.num_warps}" in call.ptx


@pytest.mark.compile
@needs_gluon
def test_tensor_descriptor():
    """Triton before 3.8 leaves `is_im2col` out of a descriptor's metadata, which jax-triton 0.4 insists on."""
    from jax_triton import triton_lib
    from triton.experimental.gluon import language as gl

    from tests.gluon_toy import descriptor_kernel

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def f(x):
        return triton_lib.triton_call(
            triton_lib.TensorDescriptor.from_array(x, (64, 64), layout),
            kernel=descriptor_kernel,
            out_type=jax.ShapeDtypeStruct((64, 64), x.dtype),
            grid=(1,),
            num_warps=4,
            compute_capability=90,
        )

    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    (call,) = kernel_calls(jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)))
    assert "cp.async.bulk.tensor" in call.ptx


def test_slim_ptx():
    ptx = """// Generated by a compiler
.version 9.0
.target sm_90a
\t.file\t1 "/some//where.py"
.visible .entry kernel(
\t.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 128
{
\t.local .align 8 .b8 \t__local_depot0[16];
\t.loc\t1 14 0                          // where.py:14:0
$L__func_begin0:
\tmov.b32 \t%r1, 0x0; // a comment

\tret;
}
\t.section\t.debug_abbrev
\t{
.b8 1                                   // Abbreviation Code
\t}
\t.section\t.debug_macinfo\t{\t}
"""
    slim = """.version 9.0
.target sm_90a
.visible .entry kernel(
.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 128
{
.local .align 8 .b8 \t__local_depot0[16];
$L__func_begin0:
mov.b32 \t%r1, 0x0;
ret;
}
"""
    assert compat.slim_ptx(ptx) == slim


@pytest.mark.compile
def test_slim_ptx_is_the_same_program(tmp_path):
    from mla_kernels.device import KNOWN_DEVICES
    from tests.compiling import Config, compile_launch, cuobjdump

    plan = Config("bf16", 16).plan(KNOWN_DEVICES["NVIDIA H200"])
    ptx = compile_launch(plan, plan.launches[-1]).ptx
    assert len(compat.slim_ptx(ptx)) < 0.8 * len(ptx)

    disassembler = cuobjdump()
    if disassembler is None:
        pytest.skip("Triton's wheel has no cuobjdump here")
    tools = [disassembler.parent / name for name in ("ptxas-blackwell", "ptxas")]  # the newer one first, where there are two
    ptxas = next(tool for tool in tools if tool.exists())

    def machine_code(text: str) -> str:
        source, binary = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
        source.write_text(text)
        subprocess.run([ptxas, "--gpu-name=sm_90a", source, "-o", binary], check=True)
        return subprocess.run([disassembler, "-sass", binary], check=True, capture_output=True, text=True).stdout

    assert machine_code(compat.slim_ptx(ptx)) == machine_code(ptx)
