"""The interpreted kernels through both front ends: right by fp64, and bitwise equal."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from tests.arg_specs import small_specs, spec_id
from tests.inputs import make_inputs
from tests.kernel_runs import INTERPRET, check

pytestmark = INTERPRET

# test_kernels_torch.py judges the other specs through PyTorch; test_kernels_jax.py judges all through JAX in an environment
# without PyTorch, which is CI's second one.
SPECS = small_specs()[::3]


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_small_specs(spec):
    check(make_inputs(spec))
