"""What the compiler makes of the kernels that write, read and copy caches, on GPUs that need not be here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import pytest

from mla_kernels.cache_plan import CachePlan, plan
from mla_kernels.cache_problem import make_append, make_copy_pages, make_read
from mla_kernels.device import KNOWN_DEVICES
from mla_kernels.formats import get_format
from mla_kernels.problem import TensorSpec
from tests.compiling import Compiled, compile_launch, cuobjdump, direct_bytes, instructions

pytestmark = pytest.mark.compile

DEVICES = {"sm_80": "NVIDIA A100-SXM4-80GB", "sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"}
N, PAGES, PAGE_SIZE = 128, 1000, 64


@dataclass(frozen=True)
class Config:
    """One call.  `skew` is what a page is larger than its tokens, in bytes."""

    operation: str
    format: str
    dtype: str = "bfloat16"
    index: str = "int32"
    scales: bool | None = None
    skew: int = 0
    widths: tuple[int, int] = (576, 512)

    @property
    def id(self) -> str:
        words = [self.operation, self.format, self.dtype, self.index]
        words += ["unrounded"] * (self.scales is False) + [f"skew{self.skew}"] * (self.skew > 0)
        words += ["d{}_{}".format(*self.widths)] * (self.widths != (576, 512))
        return "-".join(words)

    def plan(self, device: str) -> CachePlan:
        fmt = get_format(self.format)
        d_qk, d_v = self.widths
        itemsize = 1 if fmt.quantised else 2
        token = fmt.token_bytes // itemsize or d_qk
        page = (fmt.page_bytes(PAGE_SIZE) if fmt.quantised else PAGE_SIZE * token) + self.skew // itemsize
        cache = TensorSpec((PAGES, PAGE_SIZE, 1, token), fmt.dtype, (page, token, token, 1))
        slots = TensorSpec((N,), self.index)
        if self.operation == "read":
            return plan(make_read(cache, slots, dtype=self.dtype), KNOWN_DEVICES[device])
        if self.operation == "copy":
            return plan(make_copy_pages(cache, slots, slots), KNOWN_DEVICES[device])
        latent = TensorSpec((N, fmt.d_nope or d_v), self.dtype)
        rest = fmt.d_rope or d_qk - d_v
        rope = TensorSpec((N, rest), self.dtype) if rest else None
        return plan(make_append(cache, latent, rope, slots, power_of_two_scales=self.scales), KNOWN_DEVICES[device])


FORMATS = ("bf16", "fp16", "v32_fp8", "model1_fp8")
CONFIGS = (
    *(Config("append", fmt, dtype) for fmt in FORMATS for dtype in ("bfloat16", "float16", "float32")),
    *(Config("append", "v32_fp8", dtype, "int64", scales=False) for dtype in ("bfloat16", "float32")),
    *(Config("read", fmt, dtype, "int64") for fmt in FORMATS for dtype in ("bfloat16", "float32")),
    *(Config("copy", fmt) for fmt in FORMATS),
    Config("append", "model1_fp8", skew=4),
    Config("append", "bf16", skew=2),
    Config("read", "v32_fp8", skew=4),
    Config("append", "bf16", "float32", widths=(512, 512)),
    Config("append", "bf16", widths=(288, 256)),
    Config("append", "fp16", "float16", widths=(1030, 1000)),
    Config("read", "bf16", widths=(1030, 1000)),
)
ALIGNED = [config for config in CONFIGS if not config.skew and config.widths == (576, 512)]


@cache
def compiled(config: Config, device: str) -> Compiled:
    made = config.plan(device)
    (launch,) = made.launches
    result = compile_launch(made, launch)
    assert result.spill_stores == result.spill_loads == 0
    assert result.threads == 32 * launch.num_warps
    assert result.registers <= 128
    assert result.shared_memory <= 16_384
    assert direct_bytes(launch, result.binary) == result.parameter_bytes
    assert not re.search(r"\.[su]16x2", result.ptx)
    return result


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.id)
def test_every_call(config: Config, device: str) -> None:
    result = compiled(config, device)
    native = "cvt.rn.satfinite.e4m3x2.f32" in result.ptx
    quantises = config.operation == "append" and get_format(config.format).quantised
    assert native == (quantises and device != DEVICES["sm_80"])
    if config.operation == "read" and get_format(config.format).quantised and config.dtype == "bfloat16":
        assert "cvt.rn.bf16" in result.ptx  # and not in integers, as interpreted


def loads_and_stores(ptx: str) -> tuple[int, int]:
    """Loads and stores of 16 bytes in global memory."""
    return tuple(len(re.findall(rf"\b{kind}\.global\S*\.v4\.b32", ptx)) for kind in ("ld", "st"))  # type: ignore[return-value]


@pytest.mark.parametrize("config", ALIGNED, ids=lambda config: config.id)
def test_vectors_of_16_bytes(config: Config) -> None:
    """Where rows start at multiples of 16 bytes, all but scales, slots and RoPE parts moves in vectors."""
    result = compiled(config, DEVICES["sm_90"])
    loads, stores = loads_and_stores(result.ptx)
    assert loads and stores
    if config.operation != "read":
        for kind in ("ld", "st"):
            wide = re.findall(rf"\b{kind}\.global\S*\.b(?:16|8)\b", result.ptx)
            assert len(wide) <= 1  # the scales of model1_fp8 are single bytes


@pytest.mark.skipif(cuobjdump() is None, reason="Triton's wheel has no cuobjdump")
@pytest.mark.parametrize("config", [Config("append", "v32_fp8"), Config("append", "model1_fp8")], ids=lambda config: config.id)
def test_quantising_takes_few_instructions(config: Config) -> None:
    """A warp takes a token: at 350 instructions for it, 132 multiprocessors would be as slow as the memory of an H200."""
    result = compiled(config, DEVICES["sm_90"])
    assert len(instructions(result.cubin)) < 300


def test_input_of_the_definition_is_never_approximated() -> None:
    """Unrounded scales divide as IEEE 754 does."""
    result = compiled(Config("append", "v32_fp8", scales=False), DEVICES["sm_90"])
    assert "div.rn.f32" in result.ptx
    assert not re.search(r"div\.(?:full|approx)", result.ptx)
