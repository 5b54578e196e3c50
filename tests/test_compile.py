"""What the compiler makes of every kind of launch that plans consist of, on GPUs that need not be here."""

import re
import warnings

import pytest
import triton
from triton.experimental.gluon._runtime import GluonJITFunction

from tests.compiling import (
    FACTORS,
    MORE_CONFIGS,
    Compilation,
    Compiled,
    allowed,
    compilations,
    compile_launch,
    covering_configs,
    covering_configs_of,
    cuobjdump,
    direct_bytes,
    instructions,
    loops,
)
from tests.pairwise import all_pairs, pairs_of

pytestmark = pytest.mark.compile

HOPPER = "NVIDIA H200"
OTHERS = ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA B200")
REGISTERS = 65_536  # of a multiprocessor
# Later versions allocate registers differently: some of the tiles spill there, which the tests report but do not refuse.
TILES_CHOSEN_FOR_THIS_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


def compiled(launches: list[Compilation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in launches])


def hopper() -> list[Compilation]:
    return compilations(covering_configs(), HOPPER)


def others() -> list[Compilation]:
    """The attention of calls that cover every pair of device and factor and of two factors, and all launches of one call."""
    found = {}
    for device, configs in covering_configs_of(OTHERS).items():
        cases = [case for case in compilations(configs, device) if case.launch.name == "attend_kernel"]
        for case in (*compilations(covering_configs()[:1], device), *cases):
            found[case.id] = case
    return list(found.values())


def check(case: Compilation) -> Compiled:
    """Compiles a launch and checks what holds everywhere."""
    result = compile_launch(case.plan, case.launch)
    assert result.shared_memory <= case.facts.shared_memory
    specialised = isinstance(case.launch.kernel, GluonJITFunction)  # its launch says the warps of the first partition
    assert result.num_warps > case.launch.num_warps if specialised else result.num_warps == case.launch.num_warps
    assert result.threads == 32 * result.num_warps
    assert result.registers * result.threads <= REGISTERS
    assert direct_bytes(case.launch, result.binary) == result.parameter_bytes
    # Of additions to pairs of 16-bit integers ptxas 13.4 made some that lost the sum on an H200 (VIADD.16x2, of a constant
    # to one half).
    assert not re.search(r"\.[su]16x2", result.ptx)
    return result


def check_spills(result: Compiled, most: int = 0) -> None:
    """Nothing is spilled, or up to `most` bytes of what the loops around the inner one need."""
    if result.spill_stores and not TILES_CHOSEN_FOR_THIS_TRITON:
        warnings.warn(f"spills {result.spill_stores} bytes with Triton {triton.__version__}", stacklevel=2)
        return
    assert result.spill_stores <= most
    if result.spill_stores and cuobjdump() is not None:
        products = [body for body in loops(instructions(result.cubin)) if any("MMA" in text for text in body)]
        assert not [text for text in products[0] if "STL" in text or "LDL" in text]


def check_queries(result: Compiled) -> None:
    """Queries are moved to shared memory once an item, not once a block of keys."""
    ttgir = result.binary.asm["ttgir"]
    inner = ttgir[ttgir.rindex("scf.for") :]
    queries = r"%q_c\S* = ttg.local_alloc %q_c"
    assert "dot" in inner or "tc_gen5_mma" in inner
    assert re.search(queries, ttgir)
    assert not re.search(queries, inner)


@compiled(hopper())
def test_hopper(case):
    result = check(case)
    constants = case.launch.constexprs
    wgmma = case.launch.name == "attend_kernel" and constants["BLOCK_H"] >= 64
    assert ("wgmma.mma_async" in result.ptx) == wgmma
    if wgmma:  # each warpgroup multiplies half of the keys, once, and again only in a branch that nothing takes
        products = result.ptx.count(f"wgmma.mma_async.sync.aligned.m64n{constants['BLOCK_N'] // 2}k16")
        assert products == (constants["BLOCK_C"] + 2 * constants["BLOCK_R"]) // 16
    if cuobjdump() is not None:
        assert any("HGMMA" in text for _, text in instructions(result.cubin)) == wgmma
    if case.launch.name == "attend_kernel":
        check_queries(result)
    check_spills(result)


def test_the_other_gpus_get_every_pair_of_device_and_factors():
    factors = {"device": OTHERS, **FACTORS}
    shown = set()
    for device, configs in covering_configs_of(OTHERS).items():
        for config in configs:
            if config not in MORE_CONFIGS:
                shown |= pairs_of({"device": device, **{name: getattr(config, name) for name in FACTORS}}, factors)
    # Everywhere but where two values contradict each other, which no device changes.
    assert {pair for pair in all_pairs(factors) if "device" in (pair[0], pair[2])} <= shown
    assert {pair for pair in all_pairs(factors) if allowed({pair[0]: pair[1], pair[2]: pair[3]})} <= shown


@compiled(others())
def test_other_gpus(case):
    result = check(case)
    if case.launch.name == "attend_kernel":
        check_queries(result)
    check_spills(result)
