"""Says what a log of compute-sanitizer means: `sanitize_verdict.py TOOL STATUS <LOG`; exits with 1 if something is wrong.

STATUS is the exit status of the run.  A report of racecheck is an error, but for one kind: where racecheck also reports
`control_kernel`, which has no race (see racecheck_control.py), the same kind in another kernel of several warpgroups is not
judged.  A kind is what the two accesses are, and whether they lie in one line, as what the compiler makes of
`warp_specialize` does, or in two, as a hand-over does.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import NamedTuple

CONTROL = "control_kernel"
SPECIALISED = ("dense_kernel", "sparse_kernel")
TAIL = 20  # lines of the log to show where the run failed

_ACCESS = r"(Read|Write) access at (.+?)\+0x[0-9a-f]+(?: in (\S+:\d+))?"
REPORT = re.compile(rf"Race reported between {_ACCESS}.*((?:\n=+ +and {_ACCESS}.*)+)")
OTHER = re.compile(rf"and {_ACCESS}(?: \[(\d+) hazards?\])?")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) .*")
WARNING = re.compile(r"= (Warning: (?!Race reported).*)", re.IGNORECASE)


class Race(NamedTuple):
    """Two accesses that racecheck takes for unordered.

    Attributes:
      accesses: (what, file:line) of each, in order of these words.
    """

    kernel: str
    accesses: tuple[tuple[str, str], tuple[str, str]]

    @property
    def kind(self) -> tuple[str, str, bool]:
        (what, place), (other_what, other_place) = self.accesses
        return what, other_what, place == other_place

    def __str__(self) -> str:
        return f"{self.kernel}: " + ", ".join(f"{what} {place}" for what, place in self.accesses)


def races(log: str) -> tuple[Counter[Race], Counter[Race]]:
    """How many reports each race is in, and how many hazards these count."""
    reports, hazards = Counter[Race](), Counter[Race]()
    for what, kernel, place, others, *_ in REPORT.findall(log):
        for other_what, other_kernel, other_place, count in OTHER.findall(others):
            first, second = sorted([(what.lower(), place or "?"), (other_what.lower(), other_place or "?")])
            race = Race(kernel if kernel == other_kernel else f"{kernel}, {other_kernel}", (first, second))
            reports[race] += 1
            hazards[race] += int(count or 0)
    return reports, hazards


def verdict(tool: str, status: int, log: str) -> tuple[bool, list[str]]:
    """Whether all is well, and what to print."""
    # What the program printed last can stand before it in its line.
    log = re.sub(r"(?<=[^=\n])={9}", "\n=========", log)
    summaries = list(SUMMARY.finditer(log))
    found = sum(int(summary.group(1)) for summary in summaries)
    lines = [f"{tool}: {summary.group()}" for summary in summaries] or [f"{tool}: no summary"]
    lines += [f"  {line}" for line in dict.fromkeys(WARNING.findall(log))]
    good = bool(summaries)
    if tool == "racecheck":
        reports, hazards = races(log)
        in_control = {race.kind for race in reports if race.kernel == CONTROL}
        for race in sorted(reports):
            if race.kernel == CONTROL:
                word = "the control"
            elif race.kernel in SPECIALISED and race.kind in in_control:
                word = "not judged: racecheck reports the control, too"
            else:
                word, good = "error", False
            lines.append(f"  {word}: {race}; reports: {reports[race]}, hazards: {hazards[race]}")
        if len(REPORT.findall(log)) != found:
            good = False
            lines.append(f"  error: {found} hazards displayed, but {len(REPORT.findall(log))} read")
    elif found:
        good = False
        lines += [f"  {line}" for line in log.splitlines() if line.startswith("=====")][:40]
    if status != 0 or not summaries:
        good = False
        lines += [f"  the run ended with status {status}:", *(f"  {line}" for line in log.splitlines()[-TAIL:])]
    return good, lines


if __name__ == "__main__":
    good, lines = verdict(sys.argv[1], int(sys.argv[2]), sys.stdin.read())
    print("\n".join(lines))
    sys.exit(not good)
