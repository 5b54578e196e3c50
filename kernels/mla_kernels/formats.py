"""KV-cache formats as data: where the bytes of a token's latent row lie and how they decode.

A cache is pages of `page_size` tokens.  A *row* is one token's key: `d_nope` values that are stored quantised (or all of
them, unquantised, for `bf16` and `fp16`) followed by `d_rope` values in 16 bits.  The value vector of the token is the
first `d_v` values of the same row.  Everything a kernel or a reference must know about a format is in one `CacheFormat`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheFormat:
    """Byte layout of one cache format.

    Offsets are in bytes.  `scale_in_page` tells the two placements of scales apart: behind a token's own data
    (`data_ptr + scale_offset`), or behind the data of the whole page
    (`page_ptr + page_size * row_bytes + slot * scale_bytes`).
    """

    name: str
    dtype: str  # dtype of the cache tensor as the kernel sees it: "bfloat16", "float16" or "uint8"
    d_qk: int | None = None  # key width, None: taken from the tensor
    d_v: int | None = None
    d_nope: int = 0  # quantised values at the start of a row
    d_rope: int = 0  # bf16 values behind them
    scale_tile: int = 0  # values that share one scale, 0: no scales
    scale_dtype: str = ""  # "float32" or "e8m0" (one byte, 2 ** (byte - 127), 255 is NaN)
    scale_bytes: int = 0  # bytes of scales per token, padding included
    scale_offset: int = 0  # from the start of the token's row; unused when scale_in_page
    scale_in_page: bool = False
    rope_offset: int = 0
    row_bytes: int = 0  # distance between the data of two tokens of an unpadded page
    token_bytes: int = 0  # bytes a token takes in the cache, scales included
    page_align: int = 1  # a page built here is padded to a multiple of this many bytes

    @property
    def quantised(self) -> bool:
        return self.scale_tile > 0

    @property
    def num_scales(self) -> int:
        """Scales of one token (without padding)."""
        return self.d_nope // self.scale_tile if self.quantised else 0

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page as this format pads it (quantised formats only)."""
        return -(-page_size * self.token_bytes // self.page_align) * self.page_align


BF16 = CacheFormat(name="bf16", dtype="bfloat16")
FP16 = CacheFormat(name="fp16", dtype="float16")

# DeepSeek-V3.2: 512 e4m3, 4 fp32 scales, 64 bf16 RoPE.
V32_FP8 = CacheFormat(
    name="v32_fp8",
    dtype="uint8",
    d_qk=576,
    d_v=512,
    d_nope=512,
    d_rope=64,
    scale_tile=128,
    scale_dtype="float32",
    scale_bytes=16,
    scale_offset=512,
    rope_offset=528,
    row_bytes=656,
    token_bytes=656,
)

# DeepSeek-V4 ("MODEL1"): 448 e4m3 and 64 bf16 RoPE per token, then, behind the page's data, 7 E8M0 scales and a pad byte
# per token.  All 512 values of a row are its value vector.
MODEL1_FP8 = CacheFormat(
    name="model1_fp8",
    dtype="uint8",
    d_qk=512,
    d_v=512,
    d_nope=448,
    d_rope=64,
    scale_tile=64,
    scale_dtype="e8m0",
    scale_bytes=8,
    scale_in_page=True,
    rope_offset=448,
    row_bytes=576,
    token_bytes=584,
    page_align=576,
)

FORMATS: dict[str, CacheFormat] = {f.name: f for f in (BF16, FP16, V32_FP8, MODEL1_FP8)}

# Names that the design knows and this version does not build.
RESERVED = ("fp8", "v41_fp8", "v41_fp4", "v32_fp8_norope")


def get_format(name: str) -> CacheFormat:
    """The format called `name`.

    Raises:
      NotImplementedError: for a name that is reserved but not built.
      ValueError: for any other name.
    """
    known = isinstance(name, str)  # what else a caller gives may have no hash
    if known and name in FORMATS:
        return FORMATS[name]
    if known and name in RESERVED:
        raise NotImplementedError(f"cache_format: {name!r} is reserved and not built yet; built are {', '.join(FORMATS)}")
    raise ValueError(f"cache_format: expected one of {', '.join(FORMATS)}, got {name!r}")
