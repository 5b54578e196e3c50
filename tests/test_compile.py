"""What the compiler makes of every kind of launch that plans consist of, on GPUs that need not be here."""

import pytest

from tests.compiling import (
    Compilation,
    Compiled,
    compilations,
    compile_launch,
    covering_configs,
    cuobjdump,
    instructions,
    loops,
)

pytestmark = pytest.mark.compile

HOPPER = "NVIDIA H200"
OTHERS = ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA B200")
REGISTERS = 65_536  # of a multiprocessor


def compiled(launches: list[Compilation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in launches])


def others() -> list[Compilation]:
    """The attention of every call, and all launches of one call."""
    found = {}
    for device in OTHERS:
        configs = covering_configs()
        cases = [case for case in compilations(configs, device) if case.launch.name == "attend_kernel"]
        for case in (*compilations(configs[:1], device), *cases):
            found[case.id] = case
    return list(found.values())


def check(case: Compilation) -> Compiled:
    """Compiles a launch and checks what holds everywhere."""
    result = compile_launch(case.plan, case.launch)
    assert result.shared_memory <= case.facts.shared_memory
    assert result.num_warps == case.launch.num_warps
    assert result.threads == 32 * case.launch.num_warps
    assert result.registers * result.threads <= REGISTERS
    return result


def check_spills(result: Compiled, code: list[tuple[int, str]], most: int) -> None:
    """What the loops around the inner one need may be spilled, up to `most` bytes, but not where keys are multiplied."""
    assert result.spill_stores <= most
    products = [body for body in loops(code) if any("MMA" in text for text in body)]
    if products:
        assert not [text for text in products[0] if "STL" in text or "LDL" in text]


@compiled(compilations(covering_configs(), HOPPER))
def test_hopper(case):
    result = check(case)
    wgmma = case.launch.name == "attend_kernel" and case.launch.constexprs["BLOCK_H"] >= 64
    assert ("wgmma.mma_async" in result.ptx) == wgmma
    assert result.spill_stores <= 8
    if cuobjdump() is not None:
        code = instructions(result.cubin)
        assert any("HGMMA" in text for _, text in code) == wgmma
        # A tile of 64 rows takes all 255 registers, and the compiler keeps a loop counter or two in local memory.
        check_spills(result, code, most=8)


@compiled(others())
def test_other_gpus(case):
    result = check(case)
    # For some kernels ptxas aims at 128 registers, so that two blocks fit a multiprocessor, and is one short of that.
    assert result.spill_stores <= 4
    if result.spill_stores and cuobjdump() is not None:
        check_spills(result, instructions(result.cubin), most=4)
