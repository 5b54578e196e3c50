"""Launches as Triton's launcher and `DirectLaunch` make them, byte by byte: run it where libcuda.so.1 is tests/fake_cuda.c."""

from __future__ import annotations

import ctypes
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.backends.nvidia.driver import CudaDriver

from mla_kernels import direct
from mla_kernels.device import KNOWN_DEVICES
from mla_kernels.launch import Launch, Plan, TileDescriptor
from tests.compiling import Config, compile_launch, direct_arguments
from tests.gluon_toy import fetching_plan

STREAM = 0x5EED
ARRAYS = 0x7F00_0000_0000


class Note(ctypes.Structure):
    _fields_ = (("launches", ctypes.c_int), ("size", ctypes.c_size_t), ("data", ctypes.c_ubyte * 16384))


class FakeDriver:
    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.fake_note.restype = ctypes.c_void_p
        self.note = Note.from_address(self.library.fake_note())

    def set_parameters(self, sizes: list[int]) -> None:
        self.library.fake_set_params(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))

    def launched(self) -> bytes:
        """All that the only launch since the last call was."""
        assert self.note.launches == 1, self.note.launches
        self.note.launches = 0
        return bytes(self.note.data[: self.note.size])


def activate() -> None:
    """Makes Triton take the fake for an H200, and ask no framework of it."""
    GPUDriver.__init__ = lambda self: None
    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(driver)


def compare(fake: FakeDriver, plan: Plan, launch: Launch, pdl: bool) -> None:
    compiled = compile_launch(plan, launch, launch_pdl=pdl)
    binary = compiled.binary
    fake.set_parameters(compiled.parameter_bytes)
    by_triton = binary[launch.grid]
    arguments = direct_arguments(launch)
    by_us = direct.DirectLaunch(binary, launch.grid, arguments)
    constants = [launch.constexprs[name] for name in launch.kernel.arg_names[len(arguments) :]]

    # More addresses than maps are kept of, and each of the first ones again.
    starts = [ARRAYS + 0x1000 * i for i in range(direct.MAPS_KEPT + 5)]
    for start in starts + starts[:3]:
        given, addresses = [], []
        for argument in arguments:
            if isinstance(argument, int):
                given.append(argument)
                continue
            addresses.append(start + 0x100_0000_0000 * len(addresses))
            given.append(addresses[-1] if argument is None else argument(direct._At(addresses[-1])))
        by_triton(*given, *constants, stream=STREAM)
        expected = fake.launched()
        assert by_us(addresses, STREAM)
        found = fake.launched()
        assert found == expected, (launch.name, found.hex(" "), expected.hex(" "))
    assert all(encode.cache_info().currsize == direct.MAPS_KEPT for _, encode in by_us._maps)

    fake.library.fake_fail(700)
    with pytest.raises(RuntimeError, match=rf"^{binary.name}: the CUDA driver returned CUDA_ERROR_FAKE \(700\)"):
        by_us(addresses, STREAM)
    fake.library.fake_fail(direct.CUDA_ERROR_INVALID_CONTEXT)
    assert not by_us(addresses, STREAM)
    fake.library.fake_fail(0)

    fake.set_parameters(compiled.parameter_bytes[:-1])
    with pytest.raises(direct.Refused, match="the binary has"):
        direct.DirectLaunch(binary, launch.grid, arguments)
    print(launch.name, "pdl" if pdl else "", len(found), "bytes")


def main() -> None:
    activate()
    fake = FakeDriver()
    facts = KNOWN_DEVICES["NVIDIA H200"]
    plan = Config("bf16", 64).plan(facts)
    toy = fetching_plan(Config("bf16", 64).problem(), facts)
    assert any(isinstance(item, TileDescriptor) for launch in toy.launches for item in launch.inputs)
    for pdl in (False, True):
        compare(fake, toy, toy.launches[0], pdl)
        compare(fake, plan, plan.launches[-1], pdl)


if __name__ == "__main__":
    sys.exit(main())
