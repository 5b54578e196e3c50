"""The launches that plans choose for the shared specs, one of each kind, through the compiler without a GPU.

Kinds that tests/test_compile.py compiles are not compiled again with other numbers in them.
"""

from __future__ import annotations

import pytest

from mla_kernels.device import KNOWN_DEVICES
from mla_kernels.launch import Launch
from mla_kernels.plan import plan_decode
from mla_kernels.problem import TensorSpec, make_problem
from tests.arg_specs import ArgSpec, production_specs, real_specs, small_specs
from tests.compiling import Compilation
from tests.inputs import make_inputs
from tests.test_compile import HOPPER, OTHERS, TILES_CHOSEN_FOR_THIS_TRITON, check, check_spills, hopper, others

pytestmark = pytest.mark.compile

# What of a launch makes other code than a number in it does.
STRUCTURE = ("SPARSE", "HAS_EXTRA", "BLOCK_H", "BLOCK_N", "BLOCK_C", "BLOCK_R", "SCALE_TILE")


def kind(launch: Launch) -> tuple:
    return (*(launch.constexprs[name] for name in STRUCTURE), launch.num_warps, launch.num_stages)


def problem_of(spec: ArgSpec):
    """As PyTorch's arrays of the spec describe it, strides included."""
    arrays = make_inputs(spec, filled=False).as_call()
    specs, options = {}, {}
    for name, x in arrays.items():
        if hasattr(x, "strides"):
            specs[name] = TensorSpec(x.shape, x.dtype.name, tuple(stride // x.itemsize for stride in x.strides))
        else:
            options[name] = x
    return make_problem(**specs, **options)


def chosen(specs: list[ArgSpec], device: str) -> list[Compilation]:
    """The first of each kind of attention that the plans of `specs` launch on a device."""
    facts = KNOWN_DEVICES[device]
    elsewhere = {
        kind(case.launch) for case in (*hopper(), *others()) if case.facts == facts and case.launch.name == "attend_kernel"
    }
    found: dict[tuple, Compilation] = {}
    for spec in specs:
        plan = plan_decode(problem_of(spec), facts)
        for launch in plan.launches:
            if launch.name == "attend_kernel" and kind(launch) not in elsewhere:
                name = f"sm_{facts.compute_capability}-{spec.id}"
                found.setdefault(kind(launch), Compilation(name, facts, plan, launch))
    return list(found.values())


def cases() -> list:
    everything = [*production_specs(), *real_specs(), *small_specs()]
    launches = chosen(everything, HOPPER)
    # Every third one of other GPUs with a Triton that tiles are not chosen for.
    turns = 1 if TILES_CHOSEN_FOR_THIS_TRITON else 3
    for device in OTHERS:
        launches += chosen(production_specs(), device)[::turns]
    return [pytest.param(case, id=case.id) for case in launches]


@pytest.mark.parametrize("case", cases())
def test_chosen_for_a_spec(case):
    check_spills(check(case))
