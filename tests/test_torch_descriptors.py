"""TMA descriptors that `mla_torch` makes of tensors, and what it knows of the addresses that they need."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import mla_torch
from mla_kernels.launch import Launch, TileDescriptor
from mla_torch import launcher
from mla_torch.tensors import is_aligned
from tests.torch_calls import dense, recording


class Compiler:
    """A kernel with a binary: notes what reaches either, in order of the launches."""

    arg_names = ("q_desc", "q_ptr", "n", "out_ptr", "BLOCK")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.compiled.append((grid, args, kwargs))
            return Binary(self.launched)

        return launch


class Binary:
    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *args, stream: self.launched.append((grid, args))


def step_with_descriptor(row_stride=576, **more):
    kernel = Compiler()
    tile = TileDescriptor("q", (8, 576), row_stride, (64, 64))
    launch = Launch(kernel, (tile, "q"), (7,), ("out",), {"BLOCK": 64}, (3, 1, 1), num_warps=4, num_stages=1, **more)
    return launcher.Step(launch), kernel


def run(step, tensors, stream=None):
    step({name: tensor.data_ptr() for name, tensor in tensors.items()}, tensors.__getitem__, stream)


def tensors_of_rows(seed, dtype=torch.bfloat16):
    return {"q": torch.full((2, 1, 4, 576), float(seed), dtype=dtype), "out": torch.empty(4)}


def assert_describes(descriptor, tensor):
    """It is what Triton's own constructor would have made."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    expected = TensorDescriptor(tensor, [8, 576], [576, 1], [64, 64], layout=layout)
    assert type(descriptor) is TensorDescriptor
    assert descriptor.base is tensor
    assert vars(descriptor).keys() == vars(expected).keys()
    assert all(getattr(descriptor, name) == value for name, value in vars(expected).items() if name != "base")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_launch_gets_descriptors_of_the_tensors_of_its_call(dtype):
    step, kernel = step_with_descriptor()
    calls = [tensors_of_rows(seed, dtype) for seed in range(3)]
    for tensors in calls:
        run(step, tensors)
    ((grid, first, options),) = kernel.compiled
    assert options == {"BLOCK": 64, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    assert grid == (3, 1, 1)
    # A binary gets the constants, too.
    assert [args[4:] for _, args in kernel.launched] == [(64,), (64,)]
    assert first[1] is calls[0]["q"]
    assert first[3] is calls[0]["out"]
    launches = [first, *(args[:4] for _, args in kernel.launched)]
    for (descriptor, _, n, _), tensors in zip(launches, calls, strict=True):
        assert_describes(descriptor, tensors["q"])
        assert n == 7
    # A binary gets addresses.
    for (_, q, _, out), tensors in zip(launches[1:], calls[1:], strict=True):
        assert (q, out) == (tensors["q"].data_ptr(), tensors["out"].data_ptr())
    assert len({id(args[0]) for args in launches}) == 3


def test_a_launch_keeps_no_tensor_of_a_call_alive():
    step, kernel = step_with_descriptor()
    tensors = tensors_of_rows(1)
    gone = weakref.ref(tensors["q"])
    run(step, tensors)
    run(step, tensors)
    kernel.compiled.clear()
    kernel.launched.clear()
    del tensors
    assert gone() is None


def test_threads_do_not_share_descriptors():
    step, kernel = step_with_descriptor()
    run(step, tensors_of_rows(-1))
    barrier = threading.Barrier(2)

    def work(seed):
        barrier.wait()
        for i in range(200):
            run(step, tensors_of_rows(seed + i))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, seed) for seed in (0, 1000)]:
            done.result()
    assert len(kernel.launched) == 400
    for _, (descriptor, q, *_) in kernel.launched:
        assert descriptor.base.data_ptr() == q


class Direct:
    """In place of `DirectLaunch`: notes what it is made of and launches."""

    def __init__(self, launches=True):
        self.launches, self.made, self.launched = launches, [], []

    def __call__(self, binary, grid, arguments, overlaps):
        self.made.append((binary, grid, arguments, overlaps))
        return self.launch

    def launch(self, addresses, stream):
        self.launched.append((list(addresses), stream))
        return self.launches


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_binary_is_launched_without_triton(monkeypatch, overlaps):
    fast = Direct()
    monkeypatch.setattr(launcher.direct, "DirectLaunch", fast)
    step, kernel = step_with_descriptor(overlaps=overlaps)
    calls = [tensors_of_rows(seed) for seed in range(3)]
    for stream, tensors in enumerate(calls):
        run(step, tensors, stream)
    assert len(kernel.compiled) == 1 and kernel.launched == []
    ((binary, grid, arguments, overlapping),) = fast.made
    assert isinstance(binary, Binary) and grid == (3, 1, 1) and overlapping == overlaps
    describe, *others = arguments
    assert others == [None, 7, None]
    assert_describes(describe(calls[0]["q"]), calls[0]["q"])
    for stream, tensors in enumerate(calls[1:], 1):
        q, out = tensors["q"].data_ptr(), tensors["out"].data_ptr()
        assert fast.launched[stream - 1] == ([q, q, out], stream)


@pytest.mark.parametrize("why", ["hooks", "no-context", "no-stream"])
def test_triton_launches_what_it_alone_can(why, monkeypatch):
    fast = Direct(launches=why != "no-context")
    monkeypatch.setattr(launcher.direct, "DirectLaunch", fast)
    step, kernel = step_with_descriptor()
    stream = None if why == "no-stream" else 0
    run(step, tensors_of_rows(0), stream)
    with monkeypatch.context() as patch:
        if why == "hooks":
            patch.setattr(launcher.direct.knobs.runtime, "launch_enter_hook", print)
        run(step, tensors_of_rows(1), stream)
    assert len(kernel.launched) == 1
    assert len(fast.launched) == (why == "no-context")


def test_triton_launches_what_is_refused():
    step, kernel = step_with_descriptor()
    for seed in range(3):
        run(step, tensors_of_rows(seed), 0)
    (found,) = step._binaries.values()
    assert found.direct is None and "metadata" in found.refused
    assert len(kernel.launched) == 2


def test_a_descriptor_that_triton_would_refuse_is_no_launch():
    with pytest.raises(AssertionError, match="16-byte aligned"):
        step_with_descriptor(row_stride=580)


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_an_odd_offset_reaches_the_plan(name, monkeypatch):
    kernel = recording(monkeypatch)
    call = dense()
    given = call[name]
    odd = torch.empty(given.numel() + 1, dtype=given.dtype)[1:].view(given.shape).copy_(given)
    for tensor, aligned in ((given, True), (odd, False), (given.clone(), True)):
        mla_torch.decode(**call | {name: tensor})
        assert mla_torch.explain(**call | {name: tensor}).problem.aligned == aligned
    assert [problem.aligned for problem in kernel.plans] == [True, False]


def test_other_tensors_may_start_anywhere(monkeypatch):
    kernel = recording(monkeypatch)
    call = dense()
    lengths = torch.empty(3, dtype=torch.int32)[1:].copy_(call["cache_seqlens"])
    mla_torch.decode(**call | {"cache_seqlens": lengths})
    assert kernel.plans[0].aligned


@pytest.mark.filterwarnings("error")
def test_tensors_without_an_address_are_not_asked_for_it():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4)
    assert is_aligned(fake)
    assert is_aligned(torch.empty(4, device="meta")[1:])
    assert not is_aligned(torch.empty(4)[1:])
