"""Launches through the CUDA driver: what it is told, what is left to Triton, and threads; without a GPU, with fakes."""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from mla_kernels import direct

TESTS = Path(__file__).parent
SIGNATURE = {"x_desc": "tensordesc<bf16[64, 64]>", "q_ptr": "*bf16", "n": "i32", "out_ptr": "*fp32", "BLOCK": "constexpr"}
SIZES = [128, 4, 4, 8, 8, 8, 4, 8, 8, 8]
ARGUMENTS = [lambda base: SimpleNamespace(base=base, shape=[8, 576], strides=[576, 1]), None, 7, None]


def binary(signature=None, **metadata):
    usual = {
        "target": SimpleNamespace(backend="cuda", warp_size=32),
        "num_warps": 12,
        "num_ctas": 1,
        "shared": 1024,
        "launch_pdl": False,
        "launch_cooperative_grid": False,
        "instrumentation_mode": "",
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "tensordesc_meta": [{"swizzle": 3}],
    }
    source = SimpleNamespace(signature=SIGNATURE if signature is None else signature)
    return SimpleNamespace(name="kernel", function=0x7FFF_1234_5678, src=source, metadata=SimpleNamespace(**usual | metadata))


class FakeCuda:
    """The driver's functions; `launches` notes the configuration, the function and the bytes of each parameter."""

    def __init__(self, sizes=tuple(SIZES), during=lambda: None):
        self.sizes, self.during, self.launches = sizes, during, []

    def cuFuncGetParamInfo(self, function, index, offset, size):  # noqa: N802
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, reference, function, parameters, extra):  # noqa: N802
        config = reference._obj
        before = [ctypes.string_at(at, size) for at, size in zip(parameters, self.sizes, strict=True)]
        self.during()
        after = [ctypes.string_at(at, size) for at, size in zip(parameters, self.sizes, strict=True)]
        assert before == after
        assert all(at % 64 == 0 for at, size in zip(parameters, self.sizes, strict=True) if size == 128)
        attributes = [(config.attributes[i].id, config.attributes[i].value[0]) for i in range(config.num_attributes)]
        self.launches.append(
            (tuple(config.grid), tuple(config.block), config.shared_memory, config.stream, attributes, function.value, after)
        )
        return 0


@pytest.fixture
def _maps(monkeypatch):
    """Tensor maps that repeat the address."""
    monkeypatch.setattr(direct, "_map_encoder", lambda describe, meta: lambda address: address.to_bytes(8, "little") * 16)


def words(*integers):
    return [integer.to_bytes(size, "little") for integer, size in integers]


@pytest.mark.usefixtures("_maps")
@pytest.mark.parametrize(("pdl", "overlaps"), [(False, False), (True, False), (False, True)])
def test_the_driver_gets_all_of_a_launch(pdl, overlaps):
    cuda = FakeCuda()
    launch = direct.DirectLaunch(binary(launch_pdl=pdl), (3, 2, 1), ARGUMENTS, overlaps, cuda)
    for stream in (0, 0x7F00_0000_0010):
        assert launch([0x7F00_0000_0100 + stream, 0x7F00_0000_0200, 0x7F00_0000_0300], stream)
    for stream, launched in zip((0, 0x7F00_0000_0010), cuda.launches, strict=True):
        grid, block, shared, given_stream, attributes, function, parameters = launched
        assert (grid, block, shared, given_stream or 0) == ((3, 2, 1), (12 * 32, 1, 1), 1024, stream)
        assert attributes == [(6, 1)] * (pdl or overlaps)
        assert function == 0x7FFF_1234_5678
        expected = words(
            (8, 4), (576, 4), (576, 8), (1, 8), (0x7F00_0000_0200, 8), (7, 4), (0x7F00_0000_0300, 8), (0, 8), (0, 8)
        )
        assert parameters == [(0x7F00_0000_0100 + stream).to_bytes(8, "little") * 16, *expected]


@pytest.mark.usefixtures("_maps")
def test_an_integer_that_the_kernel_is_specialised_on_is_no_parameter():
    cuda = FakeCuda([*SIZES[:6], *SIZES[7:]])
    assert direct.DirectLaunch(binary(SIGNATURE | {"n": "constexpr"}), (1, 1, 1), ARGUMENTS, cuda=cuda)([16, 32, 48], 0)


@pytest.mark.usefixtures("_maps")
def test_threads_share_no_memory_of_a_launch():
    barrier = threading.Barrier(4)
    cuda = FakeCuda(during=lambda: barrier.wait(timeout=30))
    launch = direct.DirectLaunch(binary(), (1, 1, 1), ARGUMENTS, cuda=cuda)

    def work(thread):
        for i in range(100):
            assert launch([1000 * thread + i, 2000 * thread + i, 3000 * thread + i], thread)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, thread) for thread in range(1, 5)]:
            done.result()
    assert len(cuda.launches) == 400
    for *_, stream, _, _, parameters in cuda.launches:
        i = int.from_bytes(parameters[0][:8], "little") - 1000 * stream
        assert [int.from_bytes(parameters[n], "little") for n in (5, 7)] == [2000 * stream + i, 3000 * stream + i]
    assert len(launch._memory) == 4


@pytest.mark.parametrize(
    ("changes", "grid", "reason"),
    [
        ({"target": SimpleNamespace(backend="hip", warp_size=64)}, (1, 1, 1), "for hip"),
        ({}, (4, 0, 1), "empty grid"),
        ({"num_ctas": 2}, (1, 1, 1), "clusters"),
        ({"launch_cooperative_grid": True}, (1, 1, 1), "cooperative"),
        ({"instrumentation_mode": "gsan"}, (1, 1, 1), "instrumentation"),
        ({"global_scratch_size": 8}, (1, 1, 1), "scratch"),
        ({"profile_scratch_size": 8}, (1, 1, 1), "scratch"),
        ({"shared": 256 * 1024}, (1, 1, 1), "shared memory"),
        ({"tensordesc_meta": None}, (1, 1, 1), "as a tensor map"),
        ({"signature": SIGNATURE | {"n": "fp32"}}, (1, 1, 1), "an integer as fp32"),
        ({"signature": SIGNATURE | {"q_ptr": "i64"}}, (1, 1, 1), "an array or a descriptor as i64"),
        ({"signature": SIGNATURE | {"more": "i32"}}, (1, 1, 1), "without an argument"),
        ({"signature": SIGNATURE | {"n": "i64"}}, (1, 1, 1), "the binary has"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("_maps")
def test_what_is_left_to_triton(changes, grid, reason):
    with pytest.raises(direct.Refused, match=reason):
        direct.DirectLaunch(binary(**changes), grid, ARGUMENTS, cuda=FakeCuda())


def test_other_versions_and_no_driver_are_left_to_triton(monkeypatch):
    def no_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    direct.load_driver.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", no_library)
        with pytest.raises(direct.Refused, match=r"no CUDA driver.*libcuda\.so\.1"):
            direct.DirectLaunch(binary(), (1, 1, 1), ARGUMENTS)
    for version in ("3.5.1", "3.10.0", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        with pytest.raises(direct.Refused, match="is not known"):
            direct.check(binary(), (1, 1, 1))
    monkeypatch.setattr(direct, "TURNED_OFF", True)
    with pytest.raises(direct.Refused, match="MLA_DECODE_DIRECT=0"):
        direct.check(binary(), (1, 1, 1))


def test_hooks_are_seen_whichever_way_they_are_set(monkeypatch):
    runtime = triton.knobs.runtime
    assert not direct.hooked()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(runtime, name)
        hook.add(print)
        assert direct.hooked()
        hook.remove(print)
        assert not direct.hooked()
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, print)
            assert direct.hooked()
            patch.setattr(runtime, name, None)
            assert not direct.hooked()


@pytest.mark.compile
def test_the_driver_is_told_what_triton_tells_it(tmp_path):
    """Grid, block, shared memory, stream, attributes, function and parameters, tensor maps among them, bit by bit."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python, which Triton's launcher is compiled with")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([compiler, *library, "-I", headers, TESTS / "fake_cuda.c"], check=True, timeout=60)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.direct_launches"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bytes") == 4
