"""The record of runs, a CSV file that only grows, and the newest run as a Markdown table."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .cases import CASE_NAMES, parse_case

RESULTS = Path(__file__).parent / "results" / "decode.csv"
BASELINE = "flash_mla"
UNKNOWN_COMMIT = "unknown"
UNCLEAN = "-dirty"


@dataclass(frozen=True)
class Record:
    """One line of the record; its fields are the file's columns.

    Attributes:
      date: when the run began, the same for all of its lines.
      commit: ends in `-dirty` when the code was not what the commit holds.
      timing: `graph` (CUDA graph; JAX: calls unrolled in one jitted function) or `eager`.
      case: name in `benchmarks.cases`.
      p20_us, p50_us, p80_us: percentiles of microseconds a call.
      tflops, gbps: of attended keys, at the median.
    """

    date: str
    commit: str
    gpu: str
    torch: str
    jax: str
    triton: str
    provider: str
    implementation: str
    timing: str
    case: str
    p20_us: float
    p50_us: float
    p80_us: float
    tflops: float
    gbps: float

    @property
    def contestant(self) -> str:
        return self.provider if self.provider == BASELINE else f"{self.provider} ({self.implementation})"


COLUMNS = tuple(f.name for f in fields(Record))
_NUMBERS = ("p20_us", "p50_us", "p80_us", "tflops", "gbps")


def append(path: Path, records: Iterable[Record]) -> None:
    """Adds lines to the file, which is made with its header if there is none.

    Raises:
      ValueError: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if tuple(header) != COLUMNS:
            raise ValueError(f"{path}: expected columns {', '.join(COLUMNS)}, got {', '.join(header)}")
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for record in records:
            values = asdict(record)
            writer.writerow(f"{values[name]:.5g}" if name in _NUMBERS else values[name] for name in COLUMNS)


def read(path: Path) -> list[Record]:
    """All lines of the file, oldest first; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [Record(**{name: float(row[name]) if name in _NUMBERS else row[name] for name in COLUMNS}) for row in rows]


def newest_run(records: Sequence[Record]) -> list[Record]:
    """The lines of the run that began last."""
    if not records:
        return []
    date = max(record.date for record in records)
    return [record for record in records if record.date == date]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio(record: Record, run: Sequence[Record]) -> float | None:
    """How many times as fast as FlashMLA in the same run, case and timing; None if it was not timed there."""
    for other in run:
        if (other.provider, other.case, other.timing) == (BASELINE, record.case, record.timing):
            return other.p50_us / record.p50_us
    return None


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _table(run: Sequence[Record], timing: str) -> list[str]:
    """Markdown lines: a row for each case, a column for each contestant, ratios beside them."""
    timed = [record for record in run if record.timing == timing]
    contestants = list(dict.fromkeys(record.contestant for record in timed))
    contestants.sort(key=lambda name: name != BASELINE)
    has_baseline = BASELINE in contestants
    main = next((name for name in contestants if name != BASELINE), BASELINE)
    cases = [name for name in CASE_NAMES if any(record.case == name for record in timed)]
    cases += sorted({record.case for record in timed} - set(cases))
    found = {(record.contestant, record.case): record for record in timed}

    header = ["case"]
    for name in contestants:
        header.append(f"{name}, us")
        if has_baseline and name != BASELINE:
            header.append("ratio")
    header += ["TFLOP/s", "GB/s"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    for case in cases:
        cells = [f"`{case}`"]
        for name in contestants:
            record = found.get((name, case))
            cells.append("-" if record is None else microseconds(record.p50_us))
            if has_baseline and name != BASELINE:
                value = None if record is None else ratio(record, run)
                cells.append("-" if value is None else f"{value:.2f}")
                if value is not None:
                    ratios[name].append(value)
        record = found.get((main, case))
        cells += ["-", "-"] if record is None else [f"{record.tflops:.0f}", f"{record.gbps:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if has_baseline:
        cells = ["geometric mean"]
        for name in contestants:
            cells.append("")
            if name != BASELINE:
                cells.append(f"{geometric_mean(ratios[name]):.2f}" if ratios[name] else "-")
        lines.append("| " + " | ".join([*cells, "", ""]) + " |")
    if len(contestants) > 1:
        lines += ["", f"TFLOP/s and GB/s are those of {main}, of attended keys."]
    return lines


def problems(run: Sequence[Record]) -> list[str]:
    """What keeps the run from being a complete record, in sentences."""
    found = []
    commits = sorted({record.commit for record in run})
    unclean = [commit for commit in commits if commit.endswith(UNCLEAN) or commit == UNKNOWN_COMMIT]
    if unclean:
        found.append(f"The code was not that of a commit: {', '.join(unclean)}.")
    if len(commits) > 1:
        found.append(f"More than one commit: {', '.join(commits)}.")
    graph = [record for record in run if record.timing == "graph"]
    for provider in (BASELINE, "mla_torch", "mla_jax"):
        timed = {record.case for record in graph if record.provider == provider}
        missing = [name for name in CASE_NAMES if name not in timed]
        if not timed:
            found.append(f"{provider} was not timed{': there are no ratios' if provider == BASELINE else ''}.")
        elif missing:
            found.append(f"{provider}: {len(missing)} of {len(CASE_NAMES)} cases are missing: {', '.join(missing)}.")
    return found


def report(records: Sequence[Record]) -> str:
    """The newest run in Markdown, with what is wrong with it."""
    run = newest_run(records)
    if not run:
        return "No run is recorded."
    first = run[0]
    lines = [
        f"{first.gpu}, {first.date}, commit {first.commit}; torch {first.torch}, jax {first.jax}, triton {first.triton}.",
        "Medians of whole calls (schedule, attention and combine) with rotated inputs, all contestants in turn in one process. "
        "Ratio: speed relative to flash_mla; above 1 is faster.",
    ]
    lines += [f"**{sentence}**" for sentence in problems(run)]
    titles = {
        "graph": "CUDA graph (mla_jax: calls unrolled in one jitted function)",
        "eager": "Eager, the Python thread included",
    }
    for timing, title in titles.items():
        if any(record.timing == timing for record in run):
            lines += ["", f"{title}:", "", *_table(run, timing)]
    return "\n".join(lines)


def make_record(
    environment: dict[str, str], provider: str, implementation: str, timing: str, case: str, percentiles: Sequence[float]
) -> Record:
    """A line of the record from the 20th, 50th and 80th percentile in microseconds."""
    p20, p50, p80 = (float(value) for value in percentiles)
    counted = parse_case(case)
    return Record(
        **environment,
        provider=provider,
        implementation=implementation,
        timing=timing,
        case=case,
        p20_us=p20,
        p50_us=p50,
        p80_us=p80,
        tflops=counted.flops() / p50 / 1e6,
        gbps=counted.bytes() / p50 / 1e3,
    )
