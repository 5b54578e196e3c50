"""Times `append`, `read` and `copy_pages` on a GPU: `python -m benchmarks.writers`.

Whole calls in CUDA graphs, over copies of their inputs and slots that name different parts of a large cache, so that nothing
is in the second-level cache when it is touched.  Bytes are those that a call must read and write: values or tokens, scales
and slots.  Beside each call stands the share of what a plain copy of as many bytes (`Tensor.copy_`) reaches.  Exit status: 0 if
all was timed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_kernels.formats import CacheFormat, get_format

from .timing import alternate, estimate_seconds, graph_sampler

ROTATED_BYTES = 512 << 20  # that one round of calls touches
MAX_COPIES = 1024
TOKENS = (128, 4096, 65536)
PAGE_SIZE = 64
FORMATS = ("bf16", "fp16", "v32_fp8", "v32_fp8-unrounded", "model1_fp8")
OPERATIONS = ("append", "read", "copy_pages")


@dataclass(frozen=True)
class Call:
    """One timed call: an operation, a format (`-unrounded` after it: with unrounded scales), a dtype and a number of tokens."""

    operation: str
    kind: str
    dtype: str
    tokens: int

    @property
    def format(self) -> CacheFormat:
        return get_format(self.kind.removesuffix("-unrounded"))

    @property
    def d_qk(self) -> int:
        return self.format.d_qk or 576

    @property
    def stored_bytes(self) -> int:
        """Of a token in the cache, without padding."""
        fmt = self.format
        if not fmt.quantised:
            return 2 * self.d_qk
        return fmt.d_nope + 2 * fmt.d_rope + fmt.num_scales * (4 if fmt.scale_dtype == "float32" else 1)

    @property
    def bytes(self) -> int:
        """That the call must read and write."""
        if self.operation == "copy_pages":
            return 2 * self.tokens * (self.format.token_bytes or 2 * self.d_qk)
        return self.tokens * (self.stored_bytes + self.d_qk * (4 if self.dtype == "float32" else 2) + 4)

    @property
    def name(self) -> str:
        return f"{self.operation} {self.kind} {self.dtype} n={self.tokens}"


def num_copies(call: Call) -> int:
    return max(1, min(MAX_COPIES, -(-ROTATED_BYTES // call.bytes)))


def make_cache(call: Call, num_slots: int, generator: Any) -> Any:
    """A cache on the generator's device."""
    import torch

    fmt, device = call.format, generator.device
    pages = -(-num_slots // PAGE_SIZE)
    if not fmt.quantised:
        return torch.zeros(pages, PAGE_SIZE, 1, call.d_qk, dtype=getattr(torch, fmt.dtype), device=device)
    page, token = fmt.page_bytes(PAGE_SIZE), fmt.token_bytes
    memory = torch.zeros(pages, page, dtype=torch.uint8, device=device)
    return memory.as_strided((pages, PAGE_SIZE, 1, token), (page, token, token, 1))


def prepare(call: Call, order: str, generator: Any) -> Callable[[int], Any]:
    """What issues the i-th call; `order` is that of the slots or pages: `runs` (whole pages, as prefill) or `random`."""
    import torch

    import mla_torch

    copies, device = num_copies(call), generator.device
    total = copies * call.tokens
    slots_needed = 2 * total if call.operation == "copy_pages" else total
    # Beside what is written there is as much again, so that slots are spread.
    cache = make_cache(call, 2 * slots_needed, generator)
    pages = torch.randperm(cache.shape[0], generator=generator, device=device).to(torch.int32)
    if call.operation == "copy_pages":
        each = -(-call.tokens // PAGE_SIZE)
        lists = [pages[2 * i * each :][: 2 * each].view(2, each) for i in range(copies)]
        return lambda i: mla_torch.copy_pages(cache, *lists[i % copies])
    if order == "runs":
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device, dtype=torch.int32)).reshape(-1)
    else:
        slots = torch.randperm(cache.shape[0] * PAGE_SIZE, generator=generator, device=device).to(torch.int32)
    parts = slots[:total].view(copies, call.tokens)
    if call.operation == "read":
        return lambda i: mla_torch.read(cache, parts[i % copies])
    d = call.format.d_nope or 512
    x = torch.randn(total, call.d_qk, generator=generator, device=device, dtype=getattr(torch, call.dtype))
    rows = x.view(copies, call.tokens, call.d_qk)  # as a projection leaves them: both parts in one row
    options = {"power_of_two_scales": False} if call.kind.endswith("-unrounded") else {}

    def append(i: int) -> None:
        row = rows[i % copies]
        mla_torch.append(cache, row[:, :d], row[:, d:], parts[i % copies], **options)

    return append


def prepare_copy(call: Call, generator: Any) -> Callable[[int], Any]:
    """A plain copy that moves as many bytes."""
    import torch

    copies = num_copies(call)
    half = call.bytes // 32 * 16
    source = torch.zeros(copies, half, dtype=torch.uint8, device=generator.device)
    target = torch.empty_like(source)
    return lambda i: target[i % copies].copy_(source[i % copies])


def time_call(call: Call, order: str, rounds: int) -> tuple[float, float]:
    """Medians of the call and of a plain copy of as many bytes, in microseconds, taken in turn."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    copies = num_copies(call)
    samplers = {}
    for name, issue in (("call", prepare(call, order, generator)), ("copy", prepare_copy(call, generator))):
        samplers[name] = graph_sampler(issue, copies, estimate_seconds(issue, copies))
    taken = alternate(samplers, rounds)
    return float(np.median(taken["call"])), float(np.median(taken["copy"]))


def override_tiles(text: str | None) -> None:
    """Lets `mla_torch` plan with other fields of `TokenTiles`: `block_n=8,num_warps=8`."""
    if text is None:
        return
    from mla_torch import cache_ops

    from .decode import parse_override

    fields = parse_override(text)
    cache_ops.plan = functools.partial(cache_ops.plan, overrides=fields)  # type: ignore[assignment]


def split_names(text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names in a comma-separated list.

    Raises:
      SystemExit: for one that is not known.
    """
    names = known if text is None else tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.writers", description=__doc__.splitlines()[0])
    parser.add_argument("--operations", help=f"comma-separated, of {', '.join(OPERATIONS)}")
    parser.add_argument("--formats", help=f"comma-separated, of {', '.join(FORMATS)}")
    parser.add_argument("--dtypes", default="bfloat16", help="of what is appended, comma-separated (default bfloat16)")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens, comma-separated")
    parser.add_argument("--order", choices=("runs", "random"), default="runs", help="whole pages (default) or single slots")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each (default 9)")
    parser.add_argument("--override", metavar="NAME=N,...", help="fields of TokenTiles, for experiments")
    args = parser.parse_args(arguments)
    operations, formats = split_names(args.operations, OPERATIONS), split_names(args.formats, FORMATS)

    import torch

    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    override_tiles(args.override)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, slots in {args.order}")
    print("| call | us | GB/s | plain copy, us | share of its bandwidth |\n|---|---|---|---|---|")
    for operation in operations:
        for kind in formats:
            if operation != "append" and kind.endswith("-unrounded"):
                continue
            for dtype in args.dtypes.split(",") if operation == "append" else ("bfloat16",):
                for tokens in map(int, args.tokens.split(",")):
                    call = Call(operation, kind, dtype, tokens)
                    us, copy_us = time_call(call, args.order, args.rounds)
                    row = f"| {call.name} | {us:.2f} | {call.bytes / us / 1e3:.0f} | {copy_us:.2f} | {copy_us / us:.2f} |"
                    print(row, flush=True)
                    torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
