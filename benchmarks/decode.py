"""Times decode calls beside FlashMLA's: `python -m benchmarks.decode`.

Whole calls, in CUDA graphs and over rotated inputs, all contestants in turn in one process.  Prints a line a timing and appends
it to `benchmarks/results/decode.csv`; `--report` prints the newest run of that file.  Exit status: 0 if all that was asked for
was timed and the results agree, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from .cases import CASE_NAMES, Case, select_cases
from .report import RESULTS, UNCLEAN, UNKNOWN_COMMIT, Record, append, make_record, microseconds, read, report

PROVIDERS = ("flash_mla", "mla_torch", "mla_jax")
EAGER_BELOW_US = 50.0
CODE = ("kernels", "mla_torch", "mla_jax", "benchmarks")


def parse_override(text: str) -> dict[str, int]:
    """`block_n=32,num_warps=4` as a dict.

    Raises:
      argparse.ArgumentTypeError: for anything else.
    """
    overrides = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name and equals and value.isdecimal()):
            raise argparse.ArgumentTypeError(f"expected NAME=INTEGER[,NAME=INTEGER...], got {text!r}")
        overrides[name] = int(value)
    return overrides


def parse_providers(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PROVIDERS)}, got {', '.join(unknown)}")
    return names


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", metavar="GLOBS", help="comma-separated globs over the rows' names, or names in full")
    parser.add_argument(
        "--providers", type=parse_providers, help=f"comma-separated, of {', '.join(PROVIDERS)}; default: all that are installed"
    )
    parser.add_argument(
        "--implementation", metavar="NAMES", help="comma-separated implementations, each timed; default: the one that is chosen"
    )
    parser.add_argument(
        "--override",
        type=parse_override,
        action="append",
        default=[],
        metavar="NAME=N,...",
        help="also time mla_torch with these fields of its tiles replaced; may be repeated; not recorded unless --csv is given",
    )
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contestant (default 15)")
    parser.add_argument("--quick", action="store_true", help="5 samples, no eager timings")
    parser.add_argument("--no-eager", action="store_true", help="no eager timings")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no case after this many seconds")
    parser.add_argument("--csv", type=Path, help=f"the record; default: {RESULTS.relative_to(RESULTS.parents[2])}")
    parser.add_argument("--commit", help="what to record as the commit; default: as git says, -dirty if the code was changed")
    parser.add_argument("--list", action="store_true", help="print the rows with their FLOP and bytes and stop")
    parser.add_argument("--report", action="store_true", help="print the newest recorded run as a Markdown table and stop")
    return parser


def commit_name(root: Path) -> str:
    """The short commit of the code, with `-dirty` when files of the code differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", *CODE, ":(exclude)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN_COMMIT
    return commit + (UNCLEAN if changed else "")


def version(package: str) -> str:
    """The version that a Python process imports, which another one earlier on the path may have hidden from the metadata."""
    module = sys.modules.get(package)
    if module is not None and isinstance(getattr(module, "__version__", None), str):
        return module.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Run:
    """One run: what is timed, where it is recorded, and what went wrong."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.begin = time.monotonic()
        self.rounds = 5 if args.quick else args.rounds
        self.wanted = list(args.providers or PROVIDERS)
        self.wrong: list[str] = []
        self.path: Path | None = args.csv or (None if args.override else RESULTS)
        self.implementations: list[str | None] = args.implementation.split(",") if args.implementation else [None]
        self.flash_mla: Any = None
        self.environment: dict[str, str] = {}

    def start(self) -> None:
        """Loads the providers; one that is not installed is an error only if it was asked for by name."""
        import torch

        self._load("flash_mla")
        self._load("mla_torch")
        self._load("mla_jax")
        for overrides in self.args.override:
            from .providers import register_overrides

            self.implementations.append(register_overrides(self.implementations[0] or "triton", overrides))
        self.environment = {
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": self.args.commit or commit_name(RESULTS.parents[2]),
            "gpu": torch.cuda.get_device_name(),
            "torch": version("torch"),
            "jax": version("jax"),
            "triton": version("triton"),
        }
        say(", ".join(f"{name} {value}" for name, value in self.environment.items()))

    def _went_wrong(self, sentence: str) -> None:
        self.wrong.append(sentence)
        say(f"  {sentence}")

    def _load(self, provider: str) -> None:
        if provider not in self.wanted:
            return
        try:
            if provider == "flash_mla":
                from .flash_mla_provider import FlashMLA

                self.flash_mla = FlashMLA()
            elif provider == "mla_torch":
                import mla_torch  # noqa: F401
            else:
                import jax

                import mla_jax  # noqa: F401

                jax.devices("cuda")
        except (ImportError, RuntimeError) as error:
            self.wanted.remove(provider)
            say(f"{provider} is not timed: {error}")
            if self.args.providers:
                self.wrong.append(f"{provider}: {error}")

    def _contestants(self, case: Case) -> list[Any]:
        from .data import make_data
        from .providers import JaxContestant, flash_mla_contestant, torch_contestant

        data = make_data(case)
        made: list[Any] = []
        seconds: dict[str, float] = {}

        def attempt(label: str, make: Any) -> None:
            begin = time.monotonic()
            try:
                made.append(make())
            except Exception as error:
                self._went_wrong(f"{case.name}, {label}: {type(error).__name__}: {error}")
                return
            say(f"  {made[-1].label} ready after {time.monotonic() - begin:.1f} s")

        if "flash_mla" in self.wanted:
            attempt("flash_mla", lambda: flash_mla_contestant(data, self.flash_mla))
        for name in self.implementations:
            if "mla_torch" in self.wanted:
                attempt(f"mla_torch {name or ''}", lambda name=name: torch_contestant(data, name))
                if made and made[-1].provider == "mla_torch":
                    seconds[name or ""] = made[-1].seconds
            overridden = name is not None and "[" in name
            if "mla_jax" in self.wanted and not overridden:
                expected = seconds.get(name or "", min((one.seconds for one in made if hasattr(one, "seconds")), default=1e-4))
                attempt(f"mla_jax {name or ''}", lambda name=name, expected=expected: JaxContestant(name, data, expected))
        return made

    def time_case(self, case: Case) -> None:
        """Times all contestants of a case, prints and records them."""
        from .providers import disagreements
        from .timing import alternate

        contestants = self._contestants(case)
        own = [one for one in contestants if one.provider == "mla_torch"]
        for i, reference in enumerate(own or contestants[:1]):
            others = contestants if i == 0 else [one for one in contestants if one.implementation == reference.implementation]
            for sentence in disagreements(others, reference):
                self._went_wrong(f"{case.name}: MISMATCH: {sentence}")

        samplers = {}
        for one in contestants:
            try:
                samplers[one.label] = one.graph_sampler()
            except RuntimeError as error:
                self._went_wrong(f"{case.name}, {one.label}: no graph: {error}")
        timings = {"graph": alternate(samplers, self.rounds)}
        medians = [float(np.median(samples)) for samples in timings["graph"].values()]
        if medians and min(medians) < EAGER_BELOW_US and not (self.args.quick or self.args.no_eager):
            eager = {one.label: sampler for one in contestants if (sampler := one.eager_sampler()) is not None}
            timings["eager"] = alternate(eager, self.rounds)

        records = []
        for timing, samples in timings.items():
            for one in contestants:
                if one.label in samples:
                    percentiles = np.percentile(samples[one.label], [20, 50, 80])
                    records.append(
                        make_record(self.environment, one.provider, one.implementation, timing, case.name, percentiles)
                    )
        self._print(records)
        if self.path is not None:
            append(self.path, records)

    def _print(self, records: Sequence[Record]) -> None:
        from .report import ratio

        for record in records:
            speed = ratio(record, records)
            label = record.provider if record.provider == "flash_mla" else f"{record.provider}:{record.implementation}"
            print(
                f"{record.case:34s} {record.timing:5s} {label:24s} {microseconds(record.p50_us):>8s} us "
                f"({microseconds(record.p20_us)}-{microseconds(record.p80_us)})  {record.tflops:6.0f} TFLOP/s "
                f"{record.gbps:6.0f} GB/s" + ("" if speed is None else f"  {speed:.2f}x"),
                flush=True,
            )

    def all_cases(self, cases: Sequence[Case]) -> None:
        import torch

        for i, case in enumerate(cases):
            passed = time.monotonic() - self.begin
            if self.args.budget is not None and passed > self.args.budget:
                names = ", ".join(left.name for left in cases[i:])
                self._went_wrong(f"not started, {passed:.0f} s are over the budget of {self.args.budget:g} s: {names}")
                return
            say(f"[{i + 1}/{len(cases)}, {passed:.0f} s] {case.name}")
            try:
                self.time_case(case)
            except Exception as error:
                self._went_wrong(f"{case.name}: {type(error).__name__}: {error}")
                if "CUDA error" in str(error):  # the context is lost, and with it all later cases
                    return
            gc.collect()
            torch.cuda.empty_cache()


def list_cases(cases: Sequence[Case]) -> None:
    for case in cases:
        flops, moved = case.flops(), case.bytes()
        print(f"{case.name:34s} {flops / 1e9:9.2f} GFLOP {moved / 1e6:9.2f} MB {flops / moved:7.1f} FLOP/B")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.report:
        print(report(read(args.csv or RESULTS)))
        return 0
    try:
        cases = select_cases(args.cases)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        list_cases(cases)
        return 0
    # Both frameworks share the card; read when JAX is first imported.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if importlib.util.find_spec("torch") is None:
        say("PyTorch is not installed; the inputs are made with it.")
        return 2
    import torch

    if not torch.cuda.is_available():
        say("There is no CUDA device here; nothing was timed (--report prints the newest recorded run).")
        return 2
    run = Run(args)
    try:
        run.start()
    except ValueError as error:
        parser.error(str(error))
    run.all_cases(cases)
    say(f"{len(cases)} of {len(CASE_NAMES)} rows asked for, {time.monotonic() - run.begin:.0f} s")
    if run.wrong:
        say("\n".join(["What went wrong:", *(f"  {sentence}" for sentence in run.wrong)]))
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
