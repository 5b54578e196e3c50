"""The default path of every shared spec, traced for a CUDA device that need not be here: which kernels it calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import mla_jax
from mla_jax import jax_triton_compat as compat
from tests.arg_specs import real_specs, spec_id, through_jax
from tests.inputs import make_inputs

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not compat.available(), reason=f"kernels cannot be lowered: {compat.reason()}"),
]


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a traced function, those of the functions within it included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("spec", through_jax(real_specs()), ids=spec_id)
def test_default_path(spec):
    """`tests/test_compile_jax.py` compiles and reads such calls; here every spec is seen to make them."""
    call = make_inputs(spec, filled=False).to_jax()
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items() if hasattr(x, "shape")}
    options = {name: x for name, x in call.items() if name not in arrays}
    with mla_jax.device_facts("NVIDIA H200"):
        plan = mla_jax.explain(**arrays, **options).plan
        traced = jax.make_jaxpr(lambda arrays: mla_jax.decode(**arrays, **options))(arrays)
    calls = [equation for equation in equations(traced.jaxpr) if equation.primitive.name.startswith("triton_kernel_call")]
    assert [equation.params["name"] for equation in calls] == [launch.name for launch in plan.launches]
    assert [tuple(equation.params["grid"]) for equation in calls] == [launch.grid for launch in plan.launches]
    (kernel,) = [launch.name for launch in plan.launches if "kv_cache" in launch.input_arrays]
    (attend,) = [equation for equation in calls if equation.params["name"] == kernel]
    assert any(x.aval.shape == arrays["kv_cache"].shape for x in attend.invars if hasattr(x, "aval"))
