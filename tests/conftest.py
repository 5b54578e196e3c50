"""What every test needs: which tier runs (see CONTRIBUTING.md), on which device, and with which versions."""

import ctypes
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Triton reads TRITON_INTERPRET when a kernel is defined, so it belongs to the process: this file only follows it.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRETED:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # What XLA makes of a program for a CPU takes longer than most tests: see XLA_OPTIMISES.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share one GPU
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if INTERPRETED:
    from tests import interpreter

    interpreter.speed_up()

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Interpreting a kernel takes long and varies; CI draws the same problems each time.
    settings.register_profile(
        "mla", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
    )
    settings.load_profile("mla")


# What XLA computes itself, it computes as for a user in the environment without PyTorch, where all of it is tested in JAX.
XLA_OPTIMISES = (
    "test_cache.py",
    "test_reference.py",
    "test_reference_each.py",
    "test_sparse_examples.py",
    "test_token_slots.py",
)
# Where it decides which arrays share memory, everywhere.
XLA_OPTIMISES_ALWAYS = ("test_jax_api.py", "test_writers_jax.py")

# What their tests compile or build serves several of them: one process runs all tests of such a file, or of one of its calls.
TOGETHER = (
    "test_jax_deepseek.py",
    "test_packaging.py",
    "test_compile_writers.py",
    "test_sparse_examples.py",
    "test_serve_loop.py",
)
TOGETHER_BY_CALL = ("test_compile_hopper.py",)


def together(nodeid: str) -> str:
    """A name that tests which belong into one process share."""
    path, _, test = nodeid.partition("::")
    name = path.rsplit("/", 1)[-1]
    if name in TOGETHER_BY_CALL:
        return f"{path}{test[test.find('[') :]}"
    return path if name in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As pytest-xdist's `--dist loadgroup`, which does nothing with pytest 9.2; the largest groups come first."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Together(config, log)


def cuda_devices() -> int:
    """Number of CUDA devices, asked of the driver, so that neither framework is imported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_report_header() -> str:
    versions = []
    for name in ("torch", "jax", "jax-triton", "triton", "numpy"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return f"{', '.join(versions)}; TRITON_INTERPRET={int(INTERPRETED)}, {cuda_devices()} CUDA devices"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = cuda_devices()
    for item in items:
        wanted = {mark.name for mark in item.iter_markers()}
        if "gpu" in wanted and devices == 0:
            item.add_marker(pytest.mark.skip(reason="no CUDA device" + (" in the interpreter tier" if INTERPRETED else "")))
        if "compile" in wanted and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="compiling needs TRITON_INTERPRET unset"))
        if "interpret" in wanted and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="interpreting needs TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True, scope="module")
def _xla_optimises(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns XLA's optimisations on for the modules that want them."""
    modules = XLA_OPTIMISES_ALWAYS
    if importlib.util.find_spec("torch") is None:
        modules += XLA_OPTIMISES
    if not (INTERPRETED and importlib.util.find_spec("jax") is not None and request.path.name in modules):
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # what is kept there does not depend on this flag
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch in one thread: small products take longer in more, and much longer where other tests run, too."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
