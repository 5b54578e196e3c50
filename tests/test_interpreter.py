"""What `tests/interpreter.py` takes out of Triton's interpreter changes no bit, and is taken out."""

import pytest
from triton.runtime import interpreter as triton_interpreter

from tests import interpreter
from tests.arg_specs import small_specs, spec_id
from tests.inputs import make_inputs
from tests.kernel_runs import INTERPRET, assert_same_bits, decode_either

pytestmark = INTERPRET


@pytest.mark.parametrize("spec", small_specs()[::40], ids=spec_id)
def test_results_are_those_of_the_interpreter_as_it_comes(spec):
    inputs = make_inputs(spec)
    results = decode_either(inputs)
    parts = interpreter.parts()
    with interpreter.stock():
        assert not set(map(id, interpreter.parts())) & set(map(id, parts))
        assert not triton_interpreter.interpreter_builder.options.debug  # or sums would have been looked at
        assert_same_bits(results, decode_either(inputs))
    assert interpreter.parts() == parts
