"""Calls on which a kernel that waits could hang, or read what it must not: `python -m tests.hopper_cases BATCH` runs some.

A process of its own can be killed: `tests/test_gpu_hopper.py` starts it with a limit.  Each case says when it starts, when it
is launched (what it had to wait for until then is the compiler), and how it ended.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import mla_torch
from mla_torch import launcher
from tests import gpu_tools
from tests.arg_specs import ArgSpec
from tests.gpu_tools import assert_right, assert_same_bits, capture, judge, poisoned
from tests.inputs import make_sink

GARBAGE = (2147480000, -1)  # in table entries behind a request's last page
IMPLEMENTATION = "hopper"


@dataclass(frozen=True)
class Case:
    """A dense call of `spec` whose requests have these lengths.

    `columns` is the width of the block table, by default more than any request needs; a length may be beyond it, or negative.
    """

    spec: ArgSpec
    lengths: tuple[int, ...]
    columns: int | None = None

    @property
    def id(self) -> str:
        some = ",".join(map(str, self.lengths[:6])) + ",..." * (len(self.lengths) > 6)
        return f"{self.spec.id} lengths {some}" + (f" in {self.columns} columns" if self.columns is not None else "")

    def call(self) -> dict[str, Any]:
        """The arguments of `decode` on the GPU; all that no request owns is NaN in the cache and garbage in the table."""
        spec, device = self.spec, gpu_tools.DEVICE
        generator = torch.Generator(device).manual_seed(len(self.id))
        dtype = torch.float16 if spec.format == "fp16" else torch.bfloat16

        def normal(std: float, *shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=device) * std).to(dtype)

        size = spec.page_size
        columns = max(-(-max(self.lengths) // size), 0) + 2 if self.columns is None else self.columns
        tokens = [min(max(length, 0), columns * size) for length in self.lengths]
        used = [-(-count // size) for count in tokens]
        pages, step = sum(used) + 3, 2 if spec.layout == "interleaved" else 1
        cache = torch.full((pages * step, size, 1, spec.d_qk), float("nan"), dtype=dtype, device=device)[step - 1 :: step]
        ids = torch.randperm(pages, generator=generator, device=device)
        table = torch.full((len(tokens), columns), GARBAGE[0], dtype=torch.int32, device=device)
        table[1::2] = GARBAGE[1]
        for i, own in enumerate(torch.split(ids, [*used, 3])[:-1]):
            table[i, : used[i]] = own.int()
            token = torch.arange(tokens[i], device=device)
            cache[own[token // size], token % size] = normal(min(spec.std, 1.0), tokens[i], 1, spec.d_qk)
        call = {
            "q": normal(spec.std, len(tokens), spec.s_q, spec.h_q, spec.d_qk),
            "kv_cache": cache,
            "block_table": table,
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=device),
            "causal": spec.causal,
            "num_splits": spec.num_splits,
        }
        sink = make_sink(spec.sink, spec.h_q, np.random.default_rng(0))
        return call if sink is None else call | {"attn_sink": torch.from_numpy(sink).to(device)}


@dataclass(frozen=True)
class SparseCase:
    """A sparse call of `spec` with these `topk_length`, and `extra_topk_length` where the spec has an extra scope.

    Without any, every query has as many keys, which then needs no schedule.
    """

    spec: ArgSpec
    lengths: tuple[int, ...] = ()
    extra_lengths: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        some = [",".join(map(str, lengths[:6])) + ",..." * (len(lengths) > 6) for lengths in (self.lengths, self.extra_lengths)]
        return f"{self.spec.id} lengths {' and '.join(filter(None, some))}"

    def call(self) -> dict[str, Any]:
        call = gpu_tools.torch_call(self.spec)
        call["num_splits"] = self.spec.num_splits
        if self.lengths:
            call["topk_length"] = torch.tensor(self.lengths, dtype=torch.int32, device=gpu_tools.DEVICE)
        if self.extra_lengths:
            call["extra_topk_length"] = torch.tensor(self.extra_lengths, dtype=torch.int32, device=gpu_tools.DEVICE)
        return call


def sparse(*lengths: int, extra: tuple[int, ...] = (), topk: int = 700, **spec: Any) -> SparseCase:
    """With an extra scope of 300 indices where it has lengths."""
    scope = (64, 300, True) if extra else None
    keys = 4096 if len(lengths) < 10 else 400  # they are made by numpy
    given = ArgSpec(batch=len(lengths), length=keys, topk=topk, topk_length=True, extra=scope, **spec)
    return SparseCase(given, lengths, extra)


def even(batch: int, **spec: Any) -> SparseCase:
    return SparseCase(ArgSpec(batch=batch, length=400 if batch > 9 else 4096, **spec))


def of(*lengths: int, columns: int | None = None, **spec: Any) -> Case:
    return Case(ArgSpec(batch=len(lengths), length=max(*lengths, 1), **spec), lengths, columns)


def ragged(seed: int, batch: int, most: int, **spec: Any) -> Case:
    return of(*np.random.default_rng(seed).integers(0, most + 1, batch).tolist(), **spec)


WIDE = {"h_q": 128}
FEW_HEADS = {"h_q": 16, "sink": "finite"}
CAUSAL = {"h_q": 16, "s_q": 4, "causal": True}

V32 = {"format": "v32_fp8", "h_q": 128}
MODEL1 = {"format": "model1_fp8", "d_qk": 512, "h_q": 64, "sink": "finite"}
RAGGED = np.random.default_rng(0)

BATCHES: dict[str, list[Case | SparseCase]] = {
    "lengths": [
        *(of(*lengths, **WIDE) for lengths in ((0,), (1,), (63,), (64,), (65,), (127,), (128,), (129,), (20_000,))),
        *(of(*lengths, **WIDE) for lengths in ((0, 0, 0, 0, 0), (0, 1, 0), (1, 128), (513, 511), (300, 0, 0, 0, 0, 77))),
        *(of(*lengths, **FEW_HEADS) for lengths in ((0,), (1,), (0, 0, 0), (100_000,), (64, 0, 5000, 1))),
        of(1031, -5, 2**31 - 1, -(2**31), 1024, 0, columns=16, **FEW_HEADS),
    ],
    "a table without columns": [of(64, 0, 1, columns=0, **WIDE)],
    "causal": [
        *(of(*lengths, **CAUSAL) for lengths in ((0,), (1,), (3,), (4,), (0, 1, 2, 3, 4, 5), (3, 3, 3), (1, 900, 64, 67))),
        of(1, 0, 63, 65, 129, s_q=2, h_q=128, causal=True),
        of(1, 2, 500, s_q=3, h_q=40, causal=True, num_splits=3),
        of(5, 0, 4097, s_q=7, h_q=20, causal=True),
    ],
    "splits": [
        *(of(*lengths, num_splits=7, **WIDE) for lengths in ((0,), (1,), (64,), (65,), (448,), (0, 64, 3000), (0, 0, 0))),
        of(100, 0, 64, 2000, num_splits=100, **WIDE),
        of(1, 0, 64, 3000, num_splits=1, **WIDE),
        of(1, 0, 300, 15, num_splits=5, page_size=16, **CAUSAL),
        of(1, 0, 3000, 257, num_splits=3, page_size=256, **FEW_HEADS),
    ],
    "programs": [
        *(ragged(batch, batch, 900, **WIDE) for batch in (2, 65, 66, 67, 131, 132, 133, 200)),
        *(ragged(batch, batch, 900, **FEW_HEADS) for batch in (131, 132, 133, 264, 300)),
        *(of(*[length] * batch, **WIDE) for batch, length in ((66, 512), (128, 512), (132, 129), (140, 200), (264, 1))),
        of(*[0] * 300, **FEW_HEADS),
        of(*[0] * 299, 20_000, **FEW_HEADS),
        of(20_000, *[0] * 299, **FEW_HEADS),
        of(*[30] * 2000, **FEW_HEADS),
        of(100, 0, 40, s_q=70, h_q=128, causal=True),  # more tiles than multiprocessors: one program a tile
        of(500, s_q=70, h_q=128),
    ],
    "pages": [
        *(ragged(size, 5, 3000, page_size=size, **FEW_HEADS) for size in (16, 32, 64, 128, 192, 256)),
        *(ragged(size, 6, 3000, page_size=size, layout="interleaved", h_q=64) for size in (16, 64, 192)),
        of(15, 16, 17, 31, 33, page_size=16, **WIDE),
        of(31, 32, 33, 95, 97, page_size=32, **WIDE),
        of(255, 256, 257, 0, 1, page_size=256, **WIDE),
    ],
    "formats": [
        ragged(1, 5, 3000, format="fp16", h_q=128),
        ragged(2, 5, 3000, format="fp16", d_qk=512, h_q=16, page_size=16),
        ragged(3, 5, 3000, d_qk=512, h_q=128),
        ragged(4, 4, 3000, d_qk=512, layout="interleaved", **CAUSAL),
        ragged(5, 4, 3000, h_q=40, std=100.0),
        ragged(6, 4, 3000, h_q=1, sink="infinite"),
        ragged(7, 4, 3000, h_q=100, s_q=3, sink="infinite", causal=True),
        ragged(8, 4, 3000, h_q=64, s_q=2, std=0.1),
    ],
}
BATCHES |= {
    "sparse": [
        *(sparse(length, **V32) for length in (0, 1, 64, 65, 128, 129, 700)),
        *(sparse(*lengths, **V32) for lengths in ((0, 0, 0), (0, 1, 700, -5, 9999))),
        *(sparse(*RAGGED.integers(0, 701, batch).tolist(), **V32) for batch in (65, 66, 67, 133)),
        sparse(*[0] * 299, 700, format="v32_fp8", h_q=16),
        sparse(1, 0, 500, num_splits=7, s_q=2, **V32),
        sparse(300, 200, 0, index_kind="holes", s_q=3, format="v32_fp8", h_q=40),
        sparse(700, 300, index_kind="first64", page_size=53, **V32),
    ],
    "sparse with an extra scope": [
        *(sparse(a, extra=(b,), **MODEL1) for a, b in ((0, 0), (0, 1), (1, 0), (129, 65), (700, 300))),
        *(sparse(a, extra=(b,), **V32) for a, b in ((0, 0), (0, 1), (1, 0), (129, 65))),
        sparse(0, 5, 700, -1, 64, extra=(300, 0, 64, 9999, -7), **MODEL1),
        sparse(*RAGGED.integers(0, 701, 140).tolist(), extra=tuple(RAGGED.integers(0, 301, 140).tolist()), **MODEL1),
        sparse(100, 0, 64, extra=(0, 0, 300), num_splits=9, s_q=2, page_size=256, **MODEL1),
        sparse(300, 700, extra=(10, 300), index_kind="out_of_range", format="v32_fp8", h_q=128),
        sparse(300, 700, extra=(10, 300), index_kind="empty_rows", s_q=4, **MODEL1),
    ],
    # In pieces, whole, more than one to a program, and, with one query more than programs, by a schedule.
    "sparse without lengths": [
        *(even(batch, topk=400, **V32) for batch in (1, 2, 3, 16, 64, 66, 67, 132, 264)),
        *(even(batch, topk=2048, **V32) for batch in (1, 5)),
        *(even(batch, topk=128, extra=(64, 300, False), **MODEL1) for batch in (1, 2, 67, 133)),
        even(3, topk=100, index_kind="empty_rows", s_q=3, **MODEL1),
        even(2, topk=1, format="v32_fp8", h_q=16),
    ],
}  # fmt: skip
GRAPHS = {"graphs": [of(*[3000] * 6, **words) for words in (WIDE, FEW_HEADS, CAUSAL | {"page_size": 32})]}


def run(case: Case | SparseCase) -> Iterator[str]:
    """The call in poisoned memory against fp64, and once more against itself."""
    call = case.call()
    result = mla_torch.decode(**call, implementation=IMPLEMENTATION)
    yield "launched"
    torch.cuda.synchronize()
    yield "finished"
    assert_right(result, judge(call, case.spec), case.spec)
    for _ in range(3):
        assert_same_bits(mla_torch.decode(**call, implementation=IMPLEMENTATION), result)


def replay(case: Case) -> Iterator[str]:
    """One captured call, after the lengths changed: to none, one, few, all; and with other pages behind the tables."""
    call, spec = case.call(), case.spec
    full = call["block_table"].clone()
    again, result = capture(lambda: mla_torch.decode(**call, implementation=IMPLEMENTATION))
    yield "launched"
    for lengths in ((3000,) * 6, (0,) * 6, (1,) + (0,) * 5, (0, 0, 3000, 0, 0, 0), (1, 64, 65, 2999, 3000, 0), (128,) * 6):
        call["block_table"].copy_(full.roll(1, 0))
        full = call["block_table"].clone()
        for i, length in enumerate(lengths):
            call["block_table"][i, -(-length // spec.page_size) :] = GARBAGE[i % 2]
        call["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        for tensor in result:
            tensor.fill_(float("nan"))
        again()
        torch.cuda.synchronize()
        yield f"replayed with {lengths}"
        assert_right(result, judge(call, spec), spec)
        assert_same_bits(mla_torch.decode(**call, implementation=IMPLEMENTATION), result)


def steps_of(batch: str) -> list[tuple[str, Iterator[str]]]:
    if batch in GRAPHS:
        return [(case.id, replay(case)) for case in GRAPHS[batch]]
    return [(case.id, run(case)) for case in BATCHES[batch]]


def main(batch: str) -> int:
    launcher.allocate = poisoned
    wrong = 0
    for name, steps in steps_of(batch):
        print(f"start {name}", flush=True)
        try:
            for step in steps:
                print(f"{step} {name}", flush=True)
            print(f"ok {name}", flush=True)
        except Exception:  # the next case may still say something, unless the device is lost
            wrong += 1
            print(f"WRONG {name}: {traceback.format_exc(limit=-2)}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 100))
