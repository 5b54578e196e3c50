"""Call-compatible with FlashMLA's decode interface: `import mla_torch.flash_mla as flash_mla`.

What differs from FlashMLA: lengths may change between calls that share one metadata object, because the schedule is made on
the device in every call; a sparse call also takes a bf16 cache, a dense one also the quantised formats and a sink; any
number of heads, page size and topk is served.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import torch

from .api import decode

_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)

# FlashMLA's names of cache formats.
_KV_FORMATS = {"V32": "v32_fp8", "V4": "model1_fp8"}
_RESERVED_KV_FORMATS = ("V32_NO_ROPE", "V41", "V41_FP4")

# `decode` names arguments and formats in its errors; here the caller knows them by these names.
_RENAMED = {
    "kv_cache": "k_cache",
    "extra_kv_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache",
    "cache_format": "kv_format",
    **{ours: theirs for theirs, ours in _KV_FORMATS.items()},
}
_RENAME = re.compile(rf"\b({'|'.join(_RENAMED)})\b")


@dataclass
class FlashMLASchedMeta:
    """Remembers the configuration of the first call that used it, and nothing that could go stale.

    Attributes:
      have_initialized: whether a call has used it.
      config: that call's configuration.
      tile_scheduler_metadata, num_splits: always None; a schedule is made on the device in every call.
    """

    @dataclass(frozen=True)
    class Config:
        """What calls that share a metadata object have in common."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: None = None
    num_splits: None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A fresh metadata object; arguments of older interfaces are accepted and not needed."""
    return FlashMLASchedMeta(), None


def _expect_4d(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
        got = f"{list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: expected a tensor of 4 dimensions, got {got}")


def _check_later(later: dict[str, Any]) -> tuple[bool, str | None]:
    """The keyword arguments of newer versions: (enable_batch_invariant, cache format)."""
    for name in later:
        if name not in ("enable_batch_invariant", "use_legacy", "kv_format", "descale_q", "descale_k"):
            raise TypeError(f"flash_mla_with_kvcache() got an unexpected keyword argument {name!r}")
    for name in ("descale_q", "descale_k"):
        if later.get(name) is not None:
            raise NotImplementedError(f"{name}: goes with a cache of plain fp8 values, a format that is not built yet")
    batch_invariant = later.get("enable_batch_invariant", False)
    if not isinstance(batch_invariant, bool):
        raise ValueError(f"enable_batch_invariant: expected a bool, got {batch_invariant!r}")
    kv_format = later.get("kv_format")
    if kv_format is None:
        return batch_invariant, None
    built = ", ".join(_KV_FORMATS)
    if not isinstance(kv_format, str) or kv_format not in (*_KV_FORMATS, *_RESERVED_KV_FORMATS):
        raise ValueError(f"kv_format: expected None or one of {built}, got {kv_format!r}")
    if kv_format in _RESERVED_KV_FORMATS:
        raise NotImplementedError(f"kv_format: {kv_format!r} is reserved and not built yet; built are {built}")
    return batch_invariant, _KV_FORMATS[kv_format]


def _check_metadata(metadata: Any, num_splits: Any) -> None:
    if not isinstance(metadata, FlashMLASchedMeta):
        kind = type(metadata).__name__
        raise TypeError(f"tile_scheduler_metadata: expected the FlashMLASchedMeta that get_mla_metadata() returns, got {kind}")
    if num_splits is not None:
        raise ValueError(f"num_splits: expected None, as get_mla_metadata() returns it, got {num_splits!r}")


def _check_config(recorded: FlashMLASchedMeta.Config, now: FlashMLASchedMeta.Config) -> None:
    for field in fields(FlashMLASchedMeta.Config):
        before, value = getattr(recorded, field.name), getattr(now, field.name)
        if before != value:
            raise ValueError(
                f"tile_scheduler_metadata: {field.name} was {before} in the first call that used it and is {value} now; "
                "get_mla_metadata() makes a fresh one"
            )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | torch.Tensor | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **later: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes as FlashMLA's function of this name does; sparse with `indices`, dense without.

    Args:
      q: bf16 or fp16 [b, s_q, h_q, d_qk].
      k_cache: [pages, page_size, h_k, d_qk] in the dtype of `q`, or bytes [pages, page_size, 1, 656 or 584] as
        float8_e4m3fn, int8 or uint8.
      block_table: int32 [b, max_pages]; ignored in a sparse call.
      cache_seqlens: int32 [b]; ignored in a sparse call.
      head_dim_v: d_v.
      tile_scheduler_metadata: from `get_mla_metadata()`.  It records the configuration of the first call that succeeds, and
        a call that contradicts it is refused; lengths, tables and indices may change freely.
      num_splits: None (FlashMLA's older interface).
      softmax_scale: a number or a tensor of one element; `d_qk ** -0.5` by default.
      causal: as `mla_torch.decode`; dense calls only.
      is_fp8_kvcache: whether `k_cache` is quantised; None takes it from the dtype.
      indices, topk_length, attn_sink, extra_topk_length: as `mla_torch.decode`.
      extra_k_cache, extra_indices_in_kvcache: `extra_kv_cache` and `extra_indices` of `mla_torch.decode`.
      out: a tensor [b, s_q, h_q, d_v] to write into.
      **later: of newer versions.  `enable_batch_invariant`: True means that nothing is split (`num_splits=1`), so that a
        row's bits do not depend on the rest of the batch.  `kv_format`: `V32` or `V4`, checked against the cache.
        `use_legacy` has no meaning here: it picks one of FlashMLA's two sets of kernels.  `descale_q`, `descale_k` are
        refused unless None.

    Returns:
      out [b, s_q, h_q, d_v] and the natural log-sum-exp, fp32 [b, h_q, s_q].

    Raises:
      ValueError: a wrong shape, dtype or combination, or a contradiction to the metadata; the message names the argument.
      NotImplementedError: a call that no implementation serves.
      TypeError: an unknown keyword argument, or a metadata object of another kind.
    """
    batch_invariant, cache_format = _check_later(later)
    _check_metadata(tile_scheduler_metadata, num_splits)
    _expect_4d("q", q)
    _expect_4d("k_cache", k_cache)
    if extra_k_cache is not None:
        _expect_4d("extra_k_cache", extra_k_cache)
    holds_bytes = k_cache.dtype in _BYTE_DTYPES
    if is_fp8_kvcache is not None and bool(is_fp8_kvcache) != holds_bytes:
        raise ValueError(f"is_fp8_kvcache: {is_fp8_kvcache}, but k_cache is {str(k_cache.dtype).removeprefix('torch.')}")
    sparse = indices is not None
    config = FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=holds_bytes,
        topk=_last(indices),
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=_last(extra_indices_in_kvcache),
        enable_batch_invariant=batch_invariant,
    )
    recorded = tile_scheduler_metadata.config
    if recorded is not None and recorded != config:
        _check_config(recorded, config)
    try:
        result = decode(
            q,
            k_cache,
            None if sparse else block_table,
            None if sparse else cache_seqlens,
            indices=indices,
            topk_length=topk_length,
            extra_kv_cache=extra_k_cache,
            extra_indices=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
            attn_sink=attn_sink,
            head_dim_v=head_dim_v,
            softmax_scale=softmax_scale,
            causal=causal,
            cache_format=cache_format,
            num_splits=1 if batch_invariant else None,
            out=out,
        )
    except (ValueError, NotImplementedError) as error:
        message = str(error)
        renamed = _RENAME.sub(lambda found: _RENAMED[found[0]], message)
        if renamed == message:
            raise
        raise type(error)(renamed) from None
    if recorded is None:
        tile_scheduler_metadata.config = config
        tile_scheduler_metadata.have_initialized = True
    return result


def _last(indices: Any) -> int | None:
    return indices.shape[-1] if isinstance(indices, torch.Tensor) and indices.dim() else None
