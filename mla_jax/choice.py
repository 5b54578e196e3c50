"""Which implementation serves a call, and what it plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mla_kernels.choose import Refusals, choose, requested
from mla_kernels.device import DeviceFacts
from mla_kernels.hopper import plan as hopper
from mla_kernels.launch import Plan, Refusal
from mla_kernels.plan import plan_decode, refusals
from mla_kernels.problem import Problem

from . import jax_triton_compat


@dataclass(frozen=True)
class Implementation:
    """One way to serve a call.

    Attributes:
      refusals: why it does not serve a problem on a device (facts None: no device that the kernels run on is known).
      automatic: whether it is tried on such a device when the caller names none.
      plan: what it launches; None for an implementation made of JAX operations.
    """

    refusals: Callable[[Problem, DeviceFacts | None], Refusals]
    automatic: Callable[[DeviceFacts | None], bool]
    plan: Callable[[Problem, DeviceFacts], Plan] | None = None


def _hopper_refusals(problem: Problem, facts: DeviceFacts | None) -> Refusals:
    if facts is None:
        return (Refusal("q", "the kernels need a CUDA device (or mla_jax.device_facts to lower for one elsewhere)"),)
    if not facts.interpreted and not jax_triton_compat.gluon_supported():
        reason = jax_triton_compat.reason() or "Gluon kernels need jax-triton 0.4 or later"
        return (Refusal("implementation", reason),)
    return hopper.refusals(problem, facts)


def _triton_refusals(problem: Problem, facts: DeviceFacts | None) -> Refusals:
    if facts is None:
        reason = (
            "the kernels need a CUDA device (or mla_jax.device_facts to lower for one elsewhere, "
            "or the CPU, where TRITON_INTERPRET=1 was set before the import)"
        )
        return (Refusal("q", reason),)
    if not facts.interpreted and not jax_triton_compat.available():
        return (Refusal("q", f"the kernels need jax-triton: {jax_triton_compat.reason()}"),)
    return refusals(problem, facts)


# Best first.  An implementation is one entry here; all else follows from the entry.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "hopper": Implementation(_hopper_refusals, automatic=lambda facts: facts is not None, plan=hopper.plan_decode),
    "triton": Implementation(_triton_refusals, automatic=lambda facts: facts is not None, plan=plan_decode),
    # A GPU user who gets the reference has asked for it: it is slow enough to be taken for a fault.
    "reference": Implementation(lambda problem, facts: (), automatic=lambda facts: facts is None or facts.interpreted),
}


@dataclass(frozen=True)
class Call:
    """All about a call that is static; the key of its compiled form.

    Attributes:
      names: implementations that are tried in turn.
      falls_back: a call that takes the kernels on CUDA takes the reference on other platforms.
    """

    problem: Problem
    names: tuple[str, ...]
    falls_back: bool
    facts: DeviceFacts | None


def make_call(problem: Problem, implementation: str | Sequence[str] | None, facts: DeviceFacts | None) -> Call:
    """The same for all ways to ask for the same.

    Raises:
      ValueError: `implementation` is no name of one, and no sequence of names.
    """
    names = requested(implementation, tuple(IMPLEMENTATIONS))
    falls_back = "reference" in names
    if implementation is None:
        names = tuple(name for name in names if IMPLEMENTATIONS[name].automatic(facts))
    return Call(problem, names, falls_back, facts)


@functools.lru_cache(maxsize=4096)
def choose_for(call: Call) -> tuple[str, dict[str, Refusals]]:
    """The implementation of a call, and the refusals of all that refuse it."""
    if call.problem.empty:
        return call.names[0], {}
    reasons = {name: entry.refusals(call.problem, call.facts) for name, entry in IMPLEMENTATIONS.items()}
    return choose(call.names, reasons), {name: found for name, found in reasons.items() if found}


def plan_for(call: Call) -> Plan | None:
    entry = IMPLEMENTATIONS[choose_for(call)[0]]
    if entry.plan is None or call.facts is None or call.problem.empty:
        return None
    return entry.plan(call.problem, call.facts)
