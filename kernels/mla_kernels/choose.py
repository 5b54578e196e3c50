"""Choosing among implementations and accounting for the choice; both front ends say it in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .device import DeviceFacts
from .launch import Plan, Refusal
from .problem import Problem

Refusals = tuple[Refusal, ...]


def requested(implementation: str | Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """The names to try, in order.

    Args:
      implementation: None (all of `known`), a name, or a sequence of names.
      known: the names that the front end has, best first.

    Raises:
      ValueError: for something else, or a name that is not in `known`.
    """
    if implementation is None:
        return tuple(known)
    names = (implementation,) if isinstance(implementation, str) else implementation
    expected = f"implementation: expected None, one of {', '.join(map(repr, known))} or a sequence of them"
    if not isinstance(names, Sequence) or not names:
        raise ValueError(f"{expected}, got {implementation!r}")
    for name in names:
        if name not in known:
            raise ValueError(f"{expected}, got {name!r}")
    return tuple(names)


def choose(names: Sequence[str], refusals: Mapping[str, Refusals]) -> str:
    """The first of `names` without a refusal.

    Raises:
      NotImplementedError: when all refuse; one message with every reason.
    """
    for name in names:
        if not refusals[name]:
            return name
    lines = [f"  {name}: {reason}" for name in names for reason in refusals[name]]
    raise NotImplementedError("\n".join(["no implementation serves this call:", *lines]))


def _count(value: float, unit: str) -> str:
    prefixes = ["", "k", "M", "G", "T"]
    while value >= 1000 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.4g} {prefixes[0]}{unit}"


_BYTES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int64": 8}


@dataclass(frozen=True)
class Explanation:
    """A printable account of how a call is served.

    Attributes:
      problem: the call.
      implementation: the chosen one.
      refused: why each implementation that does not serve the call refuses it.
      facts: the device that the plan is made for, None when no kernel can run.
      plan: what the chosen implementation launches, None for a reference.
      note: a sentence about the choice, where there is more to say.
    """

    problem: Problem
    implementation: str
    refused: dict[str, Refusals] = field(default_factory=dict)
    facts: DeviceFacts | None = None
    plan: Plan | None = None
    note: str = ""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of buffers besides the results."""
        if self.plan is None:
            return 0
        total = 0
        for name, buffer in self.plan.buffers.items():
            if name not in ("out", "lse"):
                size = _BYTES[buffer.dtype]
                for extent in buffer.shape:
                    size *= extent
                total += size
        return total

    @property
    def max_keys(self) -> tuple[int, int]:
        """The most keys that the call can attend, summed over requests (and queries if sparse): (first scope, extra scope)."""
        p = self.problem
        rows = p.batch * (p.s_q if p.sparse else 1)
        return rows * p.max_tokens, rows * p.extra_width

    def __str__(self) -> str:
        p, cache = self.problem, self.problem.cache
        keys, extra = self.max_keys
        addressing = f"indices, topk={p.width}" if p.sparse else f"block table, {p.width} pages a request"
        lines = [
            f"implementation: {self.implementation}{f' ({self.note})' if self.note else ''}",
            f"problem: b={p.batch} s_q={p.s_q} h_q={p.h_q} h_kv={p.h_kv} d_qk={p.d_qk} d_v={p.d_v} {p.dtype}"
            f"{' causal' if p.causal else ''}{' sink' if p.has_sink else ''}",
            f"cache: {cache.format.name}, {cache.num_pages} pages of {cache.page_size} tokens, {addressing}",
        ]
        if p.extra is not None:
            lines.append(f"extra cache: {p.extra.num_pages} pages of {p.extra.page_size} tokens, topk={p.extra_width}")
        if p.num_splits is not None:
            lines.append(f"splits: {p.num_splits} a request")
        if self.facts is not None:
            f = self.facts
            lines.append(
                f"device: {f.name}, capability {f.capability[0]}.{f.capability[1]}, {f.multiprocessors} multiprocessors, "
                f"{f.shared_memory} bytes of shared memory a block"
            )
        lines += [f"refused {name}: {reason}" for name, reasons in self.refused.items() for reason in reasons]
        if p.empty:
            lines.append("launches: none, the result is empty")
        elif self.plan is not None:
            lines += [f"{name}: {value}" for name, value in self.plan.details.items()]
            lines += [
                f"launch {launch.name}: grid {list(launch.grid)}, {launch.num_warps} warps, {launch.num_stages} stages"
                for launch in self.plan.launches
            ]
        lines.append(f"scratch: {_count(self.scratch_bytes, 'B')}")
        # What is attended is only known on the device; the shapes bound it.
        flops = p.flops(keys + extra)
        lines.append(f"at most: {_count(p.bytes(keys, extra), 'B')} moved, {_count(flops, 'FLOP')}")
        return "\n".join(lines)
