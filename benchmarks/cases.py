"""The benchmark's rows, and what is counted for them.

A row's name says all of it: `dense-b128-q2-k8192-h128-causal` is 128 requests of 2 query tokens and 128 heads over 8192 keys
each, `model1-b128-q2-h64-t128x512` selects 128 keys of the first cache and 512 of the extra one.  FLOP and bytes are those
of the attended keys, whatever a kernel pads or reads twice.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

import numpy as np

CASE_NAMES = (
    "dense-b128-q1-k4096-h128",
    "dense-b128-q1-k16384-h128",
    "dense-b128-q2-k8192-h128",
    "dense-b128-q2-k8192-h128-causal",
    "dense-b64-q1-k8192-h64",
    "dense-b64-q1-k8192-h32",
    "dense-b64-q1-k8192-h16",
    "dense-b128-q1-k4096-h16",
    "dense-b8-q1-k32768-h128",
    "dense-b1-q1-k131072-h16",
    "dense-b1-q1-k32768-h128",
    "dense-b1-q1-k4096-h128",
    "dense-b16-q1-k1024-h16",
    "dense-b128-q1-k8192-h128-ragged",
    "dense-b128-q1-k8192-h16-ragged",
    "v32-b128-q2-h128-t2048",
    "v32-b128-q1-h128-t2048",
    "v32-b64-q1-h128-t2048",
    "v32-b2-q2-h128-t2048",
    "v32-b128-q1-h64-t2048",
    "model1-b128-q2-h64-t128x512",
    "model1-b128-q2-h128-t128x1024",
    "model1-b2-q2-h128-t128x1024",
    "model1-b256-q2-h64-t128x512",
    "model1-b1-q1-h64-t128",
)

_DENSE = re.compile(r"dense-b(?P<batch>\d+)-q(?P<s_q>\d+)-k(?P<keys>\d+)-h(?P<h_q>\d+)(?P<causal>-causal)?(?P<ragged>-ragged)?")
_SPARSE = re.compile(r"(?P<kind>v32|model1)-b(?P<batch>\d+)-q(?P<s_q>\d+)-h(?P<h_q>\d+)-t(?P<topk>\d+)(x(?P<extra>\d+))?")

# Bytes of one token in the cache.
_TOKEN_BYTES = {"bf16": 1152, "v32_fp8": 656, "model1_fp8": 584}


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
      keys: keys of a request in the cache (of the mean request if `ragged`).
      topk: selected keys a query, 0 for a dense row.
      extra_topk: the same in the extra cache, 0 without one.
      extra_keys: keys of a request in the extra cache.
    """

    name: str
    format: str
    batch: int
    s_q: int
    h_q: int
    keys: int
    page_size: int
    d_qk: int
    d_v: int = 512
    causal: bool = False
    ragged: bool = False
    topk: int = 0
    extra_topk: int = 0
    extra_keys: int = 0
    extra_page_size: int = 0

    @property
    def sparse(self) -> bool:
        return self.topk > 0

    @property
    def attn_sink(self) -> bool:
        return self.sparse

    def lengths(self) -> np.ndarray:
        """Keys of each request, int32 [batch]: all `keys`, or normal(keys, keys / 2) and at least 1."""
        if not self.ragged:
            return np.full(self.batch, self.keys, np.int32)
        drawn = np.random.default_rng(0).normal(self.keys, self.keys / 2, self.batch)
        return np.maximum(drawn.astype(np.int64), 1).astype(np.int32)

    def attended(self) -> int:
        """(query token, key) pairs that are attended, summed over the batch."""
        if self.sparse:
            return self.batch * self.s_q * (self.topk + self.extra_topk)
        lengths = self.lengths().astype(np.int64)
        if not self.causal:
            return int(lengths.sum()) * self.s_q
        return sum(int(np.maximum(lengths - self.s_q + 1 + j, 0).sum()) for j in range(self.s_q))

    def flops(self) -> int:
        """Floating-point operations of the attended pairs."""
        return 2 * self.h_q * self.attended() * (self.d_qk + self.d_v)

    def cache_bytes(self) -> int:
        """Cache bytes that one call reads: each attended key once a request (dense) or once a query (sparse)."""
        keys = self.attended() if self.sparse else int(self.lengths().astype(np.int64).sum())
        return keys * _TOKEN_BYTES[self.format]

    def bytes(self) -> int:
        """`cache_bytes`, q and out."""
        return self.cache_bytes() + 2 * self.batch * self.s_q * self.h_q * (self.d_qk + self.d_v)


def parse_case(name: str) -> Case:
    """The row that `name` describes, listed in `CASE_NAMES` or not.

    Raises:
      ValueError: for a name that describes none.
    """
    if match := _DENSE.fullmatch(name):
        return Case(
            name=name,
            format="bf16",
            batch=int(match["batch"]),
            s_q=int(match["s_q"]),
            h_q=int(match["h_q"]),
            keys=int(match["keys"]),
            page_size=64,
            d_qk=576,
            causal=match["causal"] is not None,
            ragged=match["ragged"] is not None,
        )
    if match := _SPARSE.fullmatch(name):
        v32 = match["kind"] == "v32"
        batch, topk, extra = int(match["batch"]), int(match["topk"]), int(match["extra"] or 0)
        # Few requests get long caches, so that the selected keys are far apart for them too.
        keys = (32768 if batch <= 2 else 8192) if v32 else (16384 if batch <= 2 else 4096)
        if max(topk, extra) > keys:
            raise ValueError(f"case: {name!r} selects more than the {keys} keys of a request")
        return Case(
            name=name,
            format="v32_fp8" if v32 else "model1_fp8",
            batch=batch,
            s_q=int(match["s_q"]),
            h_q=int(match["h_q"]),
            keys=keys,
            page_size=64 if v32 else 256,
            d_qk=576 if v32 else 512,
            topk=topk,
            extra_topk=extra,
            extra_keys=keys if extra else 0,
            extra_page_size=64 if extra else 0,
        )
    raise ValueError(f"case: {name!r} is neither dense-bB-qQ-kK-hH[-causal][-ragged] nor (v32|model1)-bB-qQ-hH-tT[xT]")


def select_cases(patterns: str | None = None) -> list[Case]:
    """The rows that match a comma-separated list of globs (all without one), and unlisted names given in full.

    Raises:
      ValueError: for a pattern that matches nothing.
    """
    if not patterns:
        return [parse_case(name) for name in CASE_NAMES]
    chosen: dict[str, None] = {}
    for pattern in patterns.split(","):
        matches = fnmatch.filter(CASE_NAMES, pattern)
        if not matches and not set(pattern) & set("*?["):
            matches = [parse_case(pattern).name]
        if not matches:
            raise ValueError(f"cases: {pattern!r} matches none of {', '.join(CASE_NAMES)}")
        chosen.update(dict.fromkeys(matches))
    return [parse_case(name) for name in CASE_NAMES if name in chosen] + [
        parse_case(name) for name in chosen if name not in CASE_NAMES
    ]
