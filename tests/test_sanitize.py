"""What `tools/sanitize.sh` makes of the logs of compute-sanitizer, and the control that it judges racecheck by."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.sanitize_verdict import verdict

ROOT = Path(__file__).resolve().parent.parent

EXCHANGE = (("Read", "dense.py:106"), ("Write", "dense.py:170"))
ARGUMENTS = (("Write", "dense.py:212"), ("Read", "dense.py:212"))
CONTROL_EXCHANGE = (("Write", "racecheck_control.py:40"), ("Read", "racecheck_control.py:44"))
CONTROL_ARGUMENTS = (("Write", "racecheck_control.py:53"), ("Read", "racecheck_control.py:53"))


def report(kernel, accesses, hazards=512):
    (what, place), (other_what, other_place) = accesses
    return (
        f"========= Error: Race reported between {what} access at {kernel}+0x6730 in {place}\n"
        f"=========     and {other_what} access at {kernel}+0x10220 in {other_place} [{hazards} hazards]\n========= \n"
    )


def racecheck(*reports, displayed=None, status=0):
    n = len(reports) if displayed is None else displayed
    log = f"========= COMPUTE-SANITIZER\n{''.join(reports)}"
    log += f"called triton bf16\n========= RACECHECK SUMMARY: {n} hazards displayed ({n} errors, 0 warnings)\n"
    return verdict("racecheck", status, log)


def test_nothing_found():
    assert racecheck() == (True, ["racecheck: RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"])


@pytest.mark.parametrize("accesses", [EXCHANGE, ARGUMENTS])
@pytest.mark.parametrize("kernel", ["dense_kernel", "attend_kernel", "void at::reduce_kernel<float, (int)4>(float *)"])
def test_with_a_clean_control_every_race_counts(kernel, accesses):
    good, lines = racecheck(report(kernel, accesses))
    assert not good
    assert lines[1].startswith(f"  error: {kernel}: read dense.py:")


def test_races_that_the_control_has_too_are_not_judged():
    reversed_exchange = tuple(reversed(EXCHANGE))
    good, lines = racecheck(
        report("control_kernel", CONTROL_EXCHANGE),
        report("dense_kernel", EXCHANGE),
        report("dense_kernel", reversed_exchange, hazards=2),
        report("sparse_kernel", EXCHANGE),
    )
    assert good
    assert lines[1:] == [
        "  the control: control_kernel: read racecheck_control.py:44, write racecheck_control.py:40; reports: 1, hazards: 512",
        "  not judged: racecheck reports the control, too: "
        "dense_kernel: read dense.py:106, write dense.py:170; reports: 2, hazards: 514",
        "  not judged: racecheck reports the control, too: "
        "sparse_kernel: read dense.py:106, write dense.py:170; reports: 1, hazards: 512",
    ]


@pytest.mark.parametrize("kernel", ["attend_kernel", "combine_kernel", "schedule_kernel"])
def test_other_kernels_are_always_judged(kernel):
    good, lines = racecheck(report("control_kernel", CONTROL_EXCHANGE), report(kernel, EXCHANGE))
    assert not good
    assert f"  error: {kernel}: read dense.py:106, write dense.py:170; reports: 1, hazards: 512" in lines


@pytest.mark.parametrize(
    ("control", "found"),
    [
        (CONTROL_EXCHANGE, ARGUMENTS),
        (CONTROL_ARGUMENTS, EXCHANGE),
        (CONTROL_EXCHANGE, (("Write", "dense.py:106"), ("Write", "dense.py:170"))),
    ],
)
def test_races_of_another_kind_than_the_controls_count(control, found):
    assert not racecheck(report("control_kernel", control), report("dense_kernel", found))[0]
    assert racecheck(report("control_kernel", control), report("dense_kernel", control))[0]


def test_a_third_access_counts_too():
    third = "=========     and Write access at attend_kernel+0x10 in attend.py:7 [3 hazards]\n"
    good, lines = racecheck(report("attend_kernel", EXCHANGE).removesuffix("========= \n") + third)
    assert not good
    assert "  error: attend_kernel: read dense.py:106, write attend.py:7; reports: 1, hazards: 3" in lines


def test_what_cannot_be_read_is_an_error():
    good, lines = racecheck(report("control_kernel", CONTROL_EXCHANGE), displayed=2)
    assert not good
    assert lines[-1] == "  error: 2 hazards displayed, but 1 read"


def test_warnings_of_the_tool_are_shown():
    warning = "Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect."
    assert f"  {warning}" in racecheck(f"========= {warning}\n", displayed=0)[1]


def test_memcheck():
    log = "called\nSee https://nanobind.readthedocs.io/en/latest/refleaks.html========= ERROR SUMMARY: 0 errors\n"
    assert verdict("memcheck", 0, log) == (True, ["memcheck: ERROR SUMMARY: 0 errors"])
    error = "========= Invalid __global__ read of size 4 bytes"
    good, lines = verdict("memcheck", 0, f"{error}\n========= ERROR SUMMARY: 1 error\n")
    assert not good
    assert lines[:2] == ["memcheck: ERROR SUMMARY: 1 error", f"  {error}"]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_run_that_failed(tool):
    """Whatever the tool found: it may not have seen all calls."""
    good, lines = verdict(tool, 124, "called triton bf16\n")
    assert not good
    assert lines[0] == f"{tool}: no summary"
    assert lines[-1] == "  called triton bf16"
    summary = "========= ERROR SUMMARY: 0 errors\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert not verdict(tool, 1, summary)[0]


@pytest.mark.parametrize(("found", "status"), [(0, 0), (1, 1)])
def test_as_a_program(found, status):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "sanitize_verdict.py", "memcheck", "0"],
        input=f"========= ERROR SUMMARY: {found} errors\n", capture_output=True, text=True, timeout=60, env=dict(os.environ),
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == f"memcheck: ERROR SUMMARY: {found} errors"
    assert done.returncode == status


@pytest.mark.compile
def test_the_control_has_no_race():
    """In either warpgroup, its own barrier lies between the stores and the arrival of one thread for all."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from tools.racecheck_control import control_kernel

    signature = {"x_ptr": "*fp32", "rounds_ptr": "*i32", "y_ptr": "*fp32", "seen_ptr": "*i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    source = GluonASTSource(control_kernel, signature, {}, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    steps = re.findall(r"(st\.shared\.b32|bar\.sync|mbarrier\.arrive|mbarrier\.try_wait|ld\.shared\.b32)", ptx)
    arrivals = [i for i, step in enumerate(steps) if step == "mbarrier.arrive"]
    assert [steps[i - 2 : i] for i in arrivals] == [["st.shared.b32", "bar.sync"]] * 2
    waits = [i for i, step in enumerate(steps) if step == "mbarrier.try_wait"]
    assert [steps[i + 1] for i in waits] == ["ld.shared.b32"] * 2
