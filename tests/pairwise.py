"""Pairwise covering of a space of factors under constraints, deterministically."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """Every pair of values of two different factors, in a fixed order."""
    return [(a, x, b, y) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]]


def pairs_of(row: Mapping[str, Any], factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """The pairs of values that `row` shows."""
    return {(a, row[a], b, row[b]) for a, b in combinations(factors, 2)}


def cover(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    cost: Callable[[Row], float],
) -> tuple[list[Row], list[Pair]]:
    """Rows that together show every pair that can be shown.

    Args:
      factors: values by factor name.
      allowed: whether a partial row (any subset of the factors) breaks no rule; a full row that is allowed is valid.
      cost: of a partial row; among values that cover as many new pairs the cheapest is taken.

    Returns:
      The rows, and the pairs for which no valid row exists.
    """
    names = list(factors)
    open_pairs = dict.fromkeys(all_pairs(factors))
    order = {name: i for i, name in enumerate(names)}
    rows: list[Row] = []
    impossible: list[Pair] = []
    used: dict[tuple[str, Any], int] = {}

    def gain(row: Row, name: str, value: Any) -> int:
        found = 0
        for other, chosen in row.items():
            pair = (other, chosen, name, value) if order[other] < order[name] else (name, value, other, chosen)
            found += pair in open_pairs
        return found

    def complete(row: Row, rest: list[str]) -> Row | None:
        if not rest:
            return row
        name = rest[0]
        ranked = []
        for i, value in enumerate(factors[name]):
            extended = {**row, name: value}
            if allowed(extended):
                ranked.append((-gain(row, name, value), cost(extended), used.get((name, value), 0), i, extended))
        for *_, extended in sorted(ranked, key=lambda entry: entry[:4]):
            done = complete(extended, rest[1:])
            if done is not None:
                return done
        return None

    while open_pairs:
        a, x, b, y = pair = next(iter(open_pairs))
        seed = {a: x, b: y}
        row = complete(seed, [name for name in names if name not in seed]) if allowed(seed) else None
        if row is None:
            impossible.append(pair)
            del open_pairs[pair]
            continue
        row = {name: row[name] for name in names}
        rows.append(row)
        for name, value in row.items():
            used[name, value] = used.get((name, value), 0) + 1
        for covered in pairs_of(row, factors):
            open_pairs.pop(covered, None)
    return rows, impossible
