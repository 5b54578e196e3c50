"""The Hopper kernel where a wrong wait would hang it: each batch of cases in a process that is killed after a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from mla_torch import launcher
from tests.hopper_cases import BATCHES, GRAPHS, steps_of

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240  # for importing and a dozen compilations of some seconds; the calls themselves take less than one


def run(batch: str, seconds: float = SECONDS, code: str = "") -> tuple[int | None, str]:
    """The exit code (None: killed) and the output of a process that runs a batch."""
    command = [sys.executable, "-u", *(["-c", code] if code else ["-m", "tests.hopper_cases", batch])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, sys.path)])}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def verdict(code: int | None, output: str) -> str:
    """What went wrong, in words; empty if nothing did."""
    lines = output.splitlines()
    if code is None:
        last = next(
            (line for line in reversed(lines) if line.startswith(("start ", "launched ", "finished ", "ok "))), "no case"
        )
        what = {"start": "is still being compiled", "launched": "hangs", "finished": "is still being judged"}
        return f"killed after {SECONDS} s; the last case {what.get(last.split()[0], 'ended')}: {last}"
    wrong = "\n".join(lines[lines.index(line)] for line in lines if line.startswith("WRONG "))
    return f"{wrong or 'the process failed'}\n{output[-4000:]}" if code else ""


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [*BATCHES, *GRAPHS])
def test_nothing_hangs(batch):
    facts = launcher.device_facts(torch.device("cuda"))
    if facts is None or facts.capability != (9, 0):
        pytest.skip(f"needs a GPU of compute capability 9.0, got {facts}")
    code, output = run(batch)
    said = verdict(code, output)
    assert not said, said
    assert output.count("\nok ") + output.startswith("ok ") == len(steps_of(batch))


def test_a_case_that_hangs_is_named():
    """What the test above makes of a process that never ends; it needs no GPU."""
    code, output = run(
        "", 8, "import time; print('start one\\nok one\\nstart two\\nlaunched two', flush=True); time.sleep(600)"
    )
    assert code is None
    assert "hangs: launched two" in verdict(code, output)
    assert verdict(0, "start one\nok one\n") == ""
    assert "WRONG one: AssertionError" in verdict(1, "start one\nWRONG one: AssertionError\n")
