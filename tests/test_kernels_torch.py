"""The interpreted kernels through `mla_torch.decode` against fp64."""

import pytest

pytest.importorskip("torch")

from tests.arg_specs import small_specs, spec_id
from tests.inputs import make_inputs
from tests.kernel_runs import HAS_JAX, INTERPRET, assert_judged, assert_same_bits, decode_torch

pytestmark = INTERPRET

# Where JAX is installed, too, test_parity.py judges every third one.
SPECS = [spec for i, spec in enumerate(small_specs()) if i % 3 or not HAS_JAX]


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_small_specs(spec):
    inputs = make_inputs(spec, seed=1)
    assert_judged(decode_torch(inputs), inputs)


@pytest.mark.parametrize("spec", small_specs()[::40], ids=spec_id)
def test_the_same_call_twice_gives_the_same_bits(spec):
    inputs = make_inputs(spec, seed=1)
    assert_same_bits(decode_torch(inputs), decode_torch(inputs))
