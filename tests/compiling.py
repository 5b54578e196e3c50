"""Compiles the launches of plans as Triton's own launcher would, without a GPU, and reads what the compiler says of them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

import mla_kernels.plan
from mla_kernels import direct
from mla_kernels.cache_plan import CachePlan
from mla_kernels.device import KNOWN_DEVICES, DeviceFacts
from mla_kernels.formats import get_format
from mla_kernels.launch import Launch, Plan, TileDescriptor
from mla_kernels.problem import Problem, TensorSpec, make_problem
from tests.pairwise import Row, cover

PAGES = 1000
TOPK = 2048
POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
}


@dataclass(frozen=True)
class Config:
    """A call, in the words of what it does to the kernels.

    Attributes:
      rows: of an item: query heads per key-value head, times queries in a dense call.
      fixed: the number of splits is known to the host.
      one_page: a block of keys lies in one page (dense calls).
    """

    format: str
    rows: int
    sparse: bool = False
    fixed: bool = False
    one_page: bool = True
    causal: bool = False
    extra: bool = False
    sink: bool = False
    batch: int = 4
    h_kv: int = 1
    widths: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        words = [self.format, f"r{self.rows}", "sparse" if self.sparse else "dense", "fixed" if self.fixed else "made"]
        words += ["pages"] * (not self.sparse and not self.one_page)
        words += [name for name in ("causal", "extra", "sink") if getattr(self, name)]
        words += ["d{}_{}".format(*self.widths)] if self.widths is not None else []
        words += [f"hkv{self.h_kv}"] * (self.h_kv > 1)
        return "-".join(words)

    def call(self) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, Any]]:
        """Shapes and dtypes of the arrays of `decode`, and its options."""
        fmt = get_format(self.format)
        d_qk, d_v = self.widths or (512 if self.format == "model1_fp8" else 576, 512)
        s_q = 2 if self.causal else 1
        heads = self.rows * self.h_kv // s_q
        page_size = 64 if self.one_page else 16
        dtype = "float16" if self.format == "fp16" else "bfloat16"

        def paged(size: int) -> tuple[tuple[int, ...], str]:
            if fmt.scale_in_page:
                return (PAGES, fmt.page_bytes(size)), "uint8"
            return (PAGES, size, self.h_kv, fmt.token_bytes or d_qk), fmt.dtype

        arrays = {"q": ((self.batch, s_q, heads, d_qk), dtype), "kv_cache": paged(page_size)}
        options: dict[str, Any] = {"head_dim_v": d_v, "causal": self.causal}
        lengths = ((self.batch,), "int32")
        if not self.sparse:
            arrays |= {"block_table": ((self.batch, 512), "int32"), "cache_seqlens": lengths}
            options["num_splits"] = 4 if self.fixed else None
        else:
            arrays["indices"] = ((self.batch, s_q, TOPK), "int32")
            if not self.fixed:
                arrays["topk_length"] = lengths
        if self.extra:
            arrays |= {"extra_kv_cache": paged(64), "extra_indices": ((self.batch, s_q, 512), "int32")}
            if not self.fixed:
                arrays["extra_topk_length"] = lengths
        if self.sink:
            arrays["attn_sink"] = ((heads,), "float32")
        if fmt.scale_in_page:
            options["page_size"] = (page_size, 64 if self.extra else None)
        return arrays, options

    def problem(self) -> Problem:
        arrays, options = self.call()
        return make_problem(**{name: TensorSpec(*array) for name, array in arrays.items()}, **options)

    def plan(self, facts: DeviceFacts) -> Plan:
        return mla_kernels.plan.plan_decode(self.problem(), facts)


FACTORS: dict[str, tuple[Any, ...]] = {
    "rows": (64, 16, 32),
    "format": ("bf16", "v32_fp8", "model1_fp8", "fp16"),
    "sparse": (False, True),
    "fixed": (False, True),
    "one_page": (True, False),
    "causal": (False, True),
    "extra": (False, True),
    "sink": (False, True),
}


def allowed(row: Row) -> bool:
    dense = row.get("sparse") is False or row.get("causal") or row.get("one_page") is False
    return not (dense and (row.get("sparse") or row.get("extra")))


# Head counts and widths that are no factors.
MORE_CONFIGS = (
    Config("bf16", 128, one_page=False, widths=(288, 256)),
    Config("bf16", 32, h_kv=4, causal=True, widths=(192, 128)),
    Config("v32_fp8", 20, sparse=True, sink=True),
)


@cache
def covering_configs() -> tuple[Config, ...]:
    """Every pair of the factors in some call, and head counts and widths of their own."""
    rows, _ = cover(FACTORS, allowed, lambda row: row.get("rows", 0))
    return (*(Config(**row) for row in rows), *MORE_CONFIGS)


@cache
def covering_configs_of(devices: tuple[str, ...]) -> dict[str, tuple[Config, ...]]:
    """The same with the device as one more factor: every value of every factor, and every pair of two, on some device."""
    rows, _ = cover({"device": devices, **FACTORS}, allowed, lambda row: row.get("rows", 0))
    found: dict[str, list[Config]] = {device: [] for device in devices}
    for row in rows:
        found[row["device"]].append(Config(**{name: value for name, value in row.items() if name != "device"}))
    for i, config in enumerate(MORE_CONFIGS):
        found[devices[i % len(devices)]].append(config)
    return {device: tuple(configs) for device, configs in found.items()}


@dataclass(frozen=True)
class Compilation:
    """A launch to compile: what is compiled for is part of it, what merely runs it (grid, scalars) is not."""

    id: str
    facts: DeviceFacts
    plan: Plan
    launch: Launch


def _array_dtype(plan: Plan | CachePlan, name: str) -> str:
    if name in plan.buffers:
        return plan.buffers[name].dtype
    if isinstance(plan, CachePlan):
        return plan.dtypes[name]
    problem = plan.problem
    caches = {"kv_cache": problem.cache, "extra_kv_cache": problem.extra}
    if name in caches:
        return caches[name].format.dtype
    return {"q": problem.dtype, "softmax_scale": "float32", "attn_sink": "float32"}.get(name, "int32")


def _input_type(plan: Plan | CachePlan, item: str | TileDescriptor) -> str:
    """As Triton's launcher spells it."""
    if not isinstance(item, TileDescriptor):
        return POINTERS[_array_dtype(plan, item)]
    return f"tensordesc<{POINTERS[_array_dtype(plan, item.array)][1:]}{list(item.block_shape)},{item.layout!r}>"


def _signature(plan: Plan | CachePlan, launch: Launch) -> tuple[dict[str, str], dict[tuple[int], list]]:
    """Types of the kernel's parameters, and what is known of them: that arrays start at a multiple of 16 bytes."""
    names = launch.kernel.arg_names
    types = [
        *(_input_type(plan, item) for item in launch.inputs),
        *("i32" for _ in launch.scalars),
        *(POINTERS[_array_dtype(plan, name)] for name in launch.outputs),
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
    types += ["constexpr"] * (len(names) - len(types))
    return dict(zip(names, types, strict=True)), attributes


def compilations(configs: tuple[Config, ...], device: str) -> list[Compilation]:
    """The distinct launches that the plans of these calls consist of."""
    facts = KNOWN_DEVICES[device]
    found: dict[Any, Compilation] = {}
    for config in configs:
        plan = config.plan(facts)
        for launch in plan.launches:
            types = tuple(_signature(plan, launch)[0].values())
            key = (launch.name, tuple(launch.constexprs.items()), types, launch.num_warps, launch.num_stages)
            found.setdefault(key, Compilation(f"sm_{facts.compute_capability}-{config.id}-{launch.name}", facts, plan, launch))
    return list(found.values())


@dataclass(frozen=True)
class Compiled:
    """What became of a launch.

    Attributes:
      num_warps: of a block, those of all partitions of a warp-specialised kernel.
      threads: of a block, as the PTX demands them.
      shared_memory: bytes of a block.
      spill_stores, spill_loads: bytes.
      log: all that ptxas said.
      binary: as Triton has it, not loaded.
    """

    ptx: str
    cubin: bytes
    num_warps: int
    threads: int
    shared_memory: int
    registers: int
    spill_stores: int
    spill_loads: int
    log: str
    binary: Any

    @property
    def parameter_bytes(self) -> list[int]:
        """Of each parameter, as the PTX lists them."""
        (listed,) = re.findall(r"\.entry [^(]*\(([^)]*)\)", self.ptx)
        kinds = re.findall(r"\.param(?: \.align \d+)? \.[bsu](\d+) [^,\n[]*(?:\[(\d+)\])?", listed)
        return [int(bits) // 8 * int(count or 1) for bits, count in kinds]


def compile_launch(plan: Plan | CachePlan, launch: Launch, **more: Any) -> Compiled:
    """Compiles through ptxas, with the tool and the flags that Triton chooses for the device, and `more` of its options."""
    signature, attributes = _signature(plan, launch)
    make_source = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    source = make_source(launch.kernel, signature, dict(launch.constexprs), attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True, **more}
    log = io.StringIO()
    # A result from the cache would come without the log.
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", plan.facts.compute_capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    (threads,) = re.findall(r"\.reqntid\s+(\d+)", ptx)
    if len(spills) != 1 or len(registers) != 1:
        raise RuntimeError(f"expected ptxas to report on one kernel, got: {log.getvalue()}")
    return Compiled(
        ptx=ptx,
        cubin=compiled.asm["cubin"],
        num_warps=compiled.metadata.num_warps,
        threads=int(threads),
        shared_memory=compiled.metadata.shared,
        registers=int(registers[0]),
        spill_stores=int(spills[0][0]),
        spill_loads=int(spills[0][1]),
        log=log.getvalue(),
        binary=compiled,
    )


def direct_arguments(launch: Launch) -> list[Any]:
    """The arguments of a launch, up to its constants, as `DirectLaunch` takes them."""

    def describe(tile: TileDescriptor) -> Callable[[Any], Any]:
        layout = {"shape": list(tile.shape), "strides": [tile.row_stride, 1], "padding": "zero", "round_f32_to_tf32": False}
        return lambda base: SimpleNamespace(base=base, **layout)

    inputs = [describe(item) if isinstance(item, TileDescriptor) else None for item in launch.inputs]
    return [*inputs, *launch.scalars, *[None for _ in launch.outputs]]


def direct_bytes(launch: Launch, binary: Any) -> list[int]:
    """Of each parameter, as `mla_kernels.direct` gives them to the driver."""
    return [struct.calcsize(kind) for kind, _ in direct.layout(binary, direct_arguments(launch))]


@cache
def cuobjdump() -> Path | None:
    """The disassembler in Triton's wheel, if it has one."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return path if os.access(path, os.X_OK) else None


def instructions(cubin: bytes) -> list[tuple[int, str]]:
    """Addresses and texts of the machine instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([cuobjdump(), "-sass", path], capture_output=True, text=True, check=True, timeout=60)
    return [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^/;]*);", done.stdout)]


def loops(code: list[tuple[int, str]]) -> list[list[str]]:
    """The bodies of all loops, from where a branch goes back to up to it, the shortest first."""
    bodies = []
    for at, text in code:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump and int(jump.group(1), 16) < at:
            target = int(jump.group(1), 16)
            bodies.append([inner for place, inner in code if target <= place <= at])
    return sorted(bodies, key=len)


def _reachable(start: int, edges: list[list[int]], within: set[int]) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        for other in edges[todo.pop()]:
            if other in within and other not in found:
                found.add(other)
                todo.append(other)
    return found


def innermost_loops(code: list[tuple[int, str]], word: str) -> list[list[str]]:
    """The instructions of each loop that has `word` in one of them, and in none of the loops within it.

    By the flow of control: what waits for a barrier lies far from the loop that it belongs to.
    """
    place = {at: i for i, (at, _) in enumerate(code)}
    after: list[list[int]] = [[] for _ in code]
    before: list[list[int]] = [[] for _ in code]
    for i, (_, text) in enumerate(code):
        always = not text.startswith("@")
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        ends = re.search(r"\b(EXIT|RET|BRX)\b", text) is not None
        targets = [place[int(jump.group(1), 16)]] if jump else []
        if not (always and (jump or ends)) and i + 1 < len(code):
            targets.append(i + 1)
        for target in targets:
            after[i].append(target)
            before[target].append(i)

    def search(nodes: set[int]) -> list[set[int]]:
        found = []
        left = {i for i in nodes if word in code[i][1]}
        while left:
            start = left.pop()
            loop = _reachable(start, after, nodes) & _reachable(start, before, nodes)
            left -= loop
            if len(loop) == 1 and start not in after[start]:
                continue
            heads = {i for i in loop if any(other not in loop for other in before[i])}
            found += (search(loop - heads) if heads else []) or [loop]
        return found

    return [[code[i][1] for i in sorted(loop)] for loop in search(set(range(len(code))))]
