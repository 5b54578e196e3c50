"""The launches of a plan as JAX lowers them on a machine without a GPU: the same kernels, to the last instruction."""

import pytest

jax = pytest.importorskip("jax")

import mla_jax
from mla_jax import jax_triton_compat as compat
from mla_jax.choice import IMPLEMENTATIONS
from mla_kernels.device import KNOWN_DEVICES
from tests.compiling import Config, compile_launch
from tests.jax_lowered import TARGETS, kernel_calls, ptx_of_calls

DEVICE = "NVIDIA H200"

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not compat.available(), reason=f"kernels cannot be lowered: {compat.reason()}"),
]

NEEDS_GLUON = pytest.mark.skipif(not compat.gluon_supported(), reason="Gluon kernels need jax-triton 0.4 or later")
PORTABLE = (
    Config("bf16", 64),
    Config("fp16", 16, fixed=True, one_page=False, causal=True, sink=True),
    Config("bf16", 32, sparse=True, sink=True),
    Config("v32_fp8", 128, sparse=True),
    Config("v32_fp8", 16, one_page=False),
    Config("model1_fp8", 64, sparse=True, fixed=True, extra=True, sink=True),
)
HOPPER = (
    Config("bf16", 128, sink=True),
    Config("fp16", 32, fixed=True, one_page=False, causal=True, widths=(512, 512)),
    Config("v32_fp8", 128, sparse=True, sink=True),
    Config("model1_fp8", 64, sparse=True, extra=True),
)
CONFIGS = [
    *(pytest.param(config, "triton", id=config.id) for config in PORTABLE),
    *(pytest.param(config, "hopper", id=f"hopper-{config.id}", marks=NEEDS_GLUON) for config in HOPPER),
]
CACHES = ("kv_cache", "extra_kv_cache")


def lower(config: Config, implementation: str):
    arrays, options = config.call()
    arguments = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in arrays.items()}

    def call(arrays):
        return mla_jax.decode(**arrays, **options, implementation=implementation)

    with mla_jax.device_facts(DEVICE):
        return jax.jit(call).trace(arguments).lower(lowering_platforms=("cuda",)), arguments


def signed(value: int) -> int:
    """An integer from the 64 bits that a protocol buffer has for it."""
    return value - 2**64 if value >= 2**63 else value


def uses(module, arguments) -> dict[str, set[str]]:
    """Names of the operations that read each cache, followed through the calls of functions within the module."""
    functions = {operation.name.value: operation for operation in module.body.operations}
    found: dict[str, set[str]] = {}

    def follow(value) -> set[str]:
        names = set()
        for use in value.uses:
            operation = use.owner.operation
            if operation.name == "func.call":
                callee = functions[operation.attributes["callee"].value]
                names |= follow(callee.regions[0].blocks[0].arguments[use.operand_number])
            elif operation.name == "stablehlo.optimization_barrier":  # around what is updated in place
                names |= follow(operation.results[use.operand_number])
            elif operation.name == "stablehlo.custom_call":
                names.add(operation.attributes["call_target_name"].value)
            else:
                names.add(operation.name)
        return names

    main = functions["main"].regions[0].blocks[0].arguments
    order = sorted(arguments)  # the leaves of a dict
    assert len(main) == len(order), "an argument was dropped"
    for name in CACHES:
        if name in order:
            found[name] = follow(main[order.index(name)])
    return found


@pytest.mark.parametrize(("config", "implementation"), CONFIGS)
def test_lowered(config, implementation):
    plan = IMPLEMENTATIONS[implementation].plan(config.problem(), KNOWN_DEVICES[DEVICE])
    lowered, arguments = lower(config, implementation)
    calls = kernel_calls(lowered)
    assert [call.name for call in calls] == [launch.name for launch in plan.launches]
    for call, launch in zip(calls, plan.launches, strict=True):
        assert call.grid == launch.grid
        assert call.compute_capability == 90
        assert call.aliases == launch.aliases
        scalars = [signed(value) for value in call.params if isinstance(value, int)]
        assert scalars == list(launch.scalars)
        arrays = [value for value in call.params if isinstance(value, str)]
        assert len(arrays) == len(launch.inputs) + len(launch.outputs)
        compiled = compile_launch(plan, launch)
        assert call.ptx == ptx_of_calls(compiled.ptx)
        assert call.num_warps == compiled.num_warps
        assert call.shared_memory == compiled.shared_memory
    for name, operations in uses(lowered.compiler_ir("stablehlo"), arguments).items():
        assert operations <= set(TARGETS), name
        assert operations, name
