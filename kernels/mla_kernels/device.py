"""Facts about a device that planning depends on, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan may know of a device.

    Attributes:
      name: as the driver names it.
      capability: CUDA compute capability, `(9, 0)` for Hopper.
      multiprocessors: number of streaming multiprocessors.
      shared_memory: bytes of shared memory one block may ask for.
      interpreted: kernels run in Triton's interpreter on a CPU.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    interpreted: bool = False

    @property
    def compute_capability(self) -> int:
        """The capability as Triton and jax-triton write it: 90 for (9, 0)."""
        return self.capability[0] * 10 + self.capability[1]


KNOWN_DEVICES: dict[str, DeviceFacts] = {
    facts.name: facts
    for facts in (
        DeviceFacts("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912),
        DeviceFacts("NVIDIA L40S", (8, 9), 142, 101_376),
        DeviceFacts("NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448),
        DeviceFacts("NVIDIA H200", (9, 0), 132, 232_448),
        DeviceFacts("NVIDIA B200", (10, 0), 148, 232_448),
    )
}

# Few programs, so that small interpreted problems still split, share programs and combine.
INTERPRETER = DeviceFacts("interpreter", (0, 0), 6, 232_448, interpreted=True)
