"""What planning may know of the device that a traced call will run on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from mla_kernels.device import INTERPRETER, KNOWN_DEVICES, DeviceFacts

# Part of the key of every jit cache: a function traced for one device is traced again for another.
_given = jax.make_user_context(default_value=None)

# Bytes of shared memory that one block may ask for, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
_SHARED_MEMORY = {
    (7, 0): 98_304,
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (11, 0): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}
_LEAST_SHARED_MEMORY = 49_152  # what every device gives without asking


@contextmanager
def device_facts(facts: DeviceFacts | str) -> Iterator[DeviceFacts]:
    """Says which GPU the calls traced in this context are for, instead of asking the machine.

    With it a machine without a GPU can lower and compile the kernels::

        with mla_jax.device_facts("NVIDIA H200"):
            lowered = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",))

    Args:
      facts: of the device, or the name of one in `mla_kernels.device.KNOWN_DEVICES`.

    Raises:
      ValueError: for an unknown name.
    """
    if isinstance(facts, str):
        if facts not in KNOWN_DEVICES:
            raise ValueError(f"device_facts: expected DeviceFacts or one of {', '.join(KNOWN_DEVICES)}, got {facts!r}")
        facts = KNOWN_DEVICES[facts]
    if not isinstance(facts, DeviceFacts):
        raise ValueError(f"device_facts: expected DeviceFacts or the name of a known device, got {facts!r}")
    with _given(facts):
        yield facts


def interpreting() -> bool:
    """Whether the kernels of this process are interpreted (TRITON_INTERPRET=1 when they were imported)."""
    import triton

    from mla_kernels.attend import attend_kernel

    return not isinstance(attend_kernel, triton.JITFunction)


def facts_of(device: jax.Device) -> DeviceFacts:
    """The facts of a CUDA device, from what JAX says of it."""
    known = KNOWN_DEVICES.get(device.device_kind)
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if not (major.isdigit() and minor.isdigit()):
        if known is None:
            raise ValueError(f"device_facts: JAX does not say the compute capability of {device}; give its DeviceFacts")
        return known
    capability = (int(major), int(minor))
    shared_memory = known.shared_memory if known is not None else _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY)
    multiprocessors = getattr(device, "core_count", None) or (known.multiprocessors if known is not None else 1)
    return DeviceFacts(device.device_kind, capability, multiprocessors, shared_memory)


@functools.cache
def _local_facts() -> DeviceFacts | None:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no such backend here
        return None
    return facts_of(devices[0]) if devices else None


def _abstract_facts() -> DeviceFacts | None:
    """The device of the abstract mesh in use (jax 0.11 and later), if it is a known GPU."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return KNOWN_DEVICES.get(device.device_kind) if device is not None else None


def current_facts() -> DeviceFacts | None:
    """The device to plan for: the interpreter, the one given, that of the abstract mesh, or this machine's CUDA device."""
    if interpreting():
        return INTERPRETER
    return _given.value or _abstract_facts() or _local_facts()
