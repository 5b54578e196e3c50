"""The interpreted kernels through `mla_jax.decode` against fp64."""

import pytest

jax = pytest.importorskip("jax")

import mla_jax
from tests.arg_specs import ArgSpec, small_specs, spec_id
from tests.inputs import make_inputs
from tests.kernel_runs import HAS_TORCH, INTERPRET, assert_judged, assert_same_bits, decode_jax

pytestmark = INTERPRET

# Where PyTorch is installed, too, test_parity.py judges every third one: environments without it judge all of them.
SPECS = small_specs()[::12] if HAS_TORCH else small_specs()


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_small_specs_under_jit(spec):
    inputs = make_inputs(spec, seed=1)
    assert_judged(decode_jax(inputs), inputs)


@pytest.mark.parametrize("spec", small_specs()[::12], ids=spec_id)
def test_eager_and_jitted_calls_give_the_same_bits(spec):
    inputs = make_inputs(spec, seed=1)
    assert_same_bits(decode_jax(inputs), decode_jax(inputs, jit=False))


def test_steps_of_a_scan_give_the_bits_of_single_calls():
    inputs = make_inputs(ArgSpec(batch=2, h_q=4, length=70, lengths="ragged", d_qk=192, d_v=128))
    call = inputs.to_jax()
    lengths = call.pop("cache_seqlens")
    steps = jax.numpy.stack([lengths, lengths // 2, lengths * 0])

    def step(carry, lengths):
        return carry, mla_jax.decode(**call, cache_seqlens=lengths, implementation="triton")

    _, (out, lse) = jax.jit(lambda steps: jax.lax.scan(step, 0, steps))(steps)
    for i, now in enumerate(steps):
        alone = mla_jax.decode(**call, cache_seqlens=now, implementation="triton")
        assert_same_bits([jax.device_get(x) for x in (out[i], lse[i])], [jax.device_get(x) for x in alone])
    assert (out[2] == 0).all()
    assert jax.numpy.isposinf(lse[2]).all()
