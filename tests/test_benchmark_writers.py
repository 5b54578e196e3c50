"""The benchmark of the writers: the bytes that it counts and the calls that it makes."""

from __future__ import annotations

import pytest

from benchmarks import writers
from benchmarks.writers import Call


def test_bytes_of_a_call() -> None:
    """Values, what is stored of them, and a slot of four bytes a token."""
    assert Call("append", "bf16", "bfloat16", 10).bytes == 10 * (1152 + 1152 + 4)
    assert Call("append", "v32_fp8", "float32", 10).bytes == 10 * (2304 + 656 + 4)
    assert Call("append", "v32_fp8-unrounded", "bfloat16", 1).bytes == 1152 + 656 + 4
    assert Call("append", "model1_fp8", "bfloat16", 1).bytes == 1024 + 583 + 4
    assert Call("read", "v32_fp8", "bfloat16", 1).bytes == 1152 + 656 + 4
    assert Call("copy_pages", "model1_fp8", "bfloat16", 64).bytes == 2 * 64 * 584


def test_a_round_of_small_calls_does_not_fit_the_second_level_cache() -> None:
    call = Call("append", "v32_fp8", "bfloat16", 128)
    assert writers.num_copies(call) * call.bytes > 200 << 20


@pytest.mark.parametrize("order", ["runs", "random"])
@pytest.mark.parametrize("kind", writers.FORMATS)
@pytest.mark.parametrize("operation", writers.OPERATIONS)
def test_calls_can_be_made(operation: str, kind: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(writers, "MAX_COPIES", 2)
    generator = torch.Generator().manual_seed(0)
    call = Call(operation, kind, "float16", 128)
    for issue in (writers.prepare(call, order, generator), writers.prepare_copy(call, generator)):
        for i in range(3):
            issue(i)


def test_names_that_are_not_known() -> None:
    with pytest.raises(SystemExit, match=r"expected some of append, read, copy_pages, got write"):
        writers.main(["--operations", "append,write"])


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert writers.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
