"""The interpreted kernels through both front ends: right by fp64, and bitwise equal."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from tests.arg_specs import small_specs, spec_id
from tests.inputs import make_inputs
from tests.kernel_runs import INTERPRET, check

pytestmark = INTERPRET


@pytest.mark.parametrize("spec", small_specs(), ids=spec_id)
def test_small_specs(spec):
    check(make_inputs(spec))
