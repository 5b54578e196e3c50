"""What `append`, `read` and `copy_pages` do, in plain PyTorch: for users without a GPU, and to test the kernels by."""

from __future__ import annotations

import torch

from mla_kernels.cache_problem import Append, CopyPages, Read
from mla_kernels.problem import CacheSpec

from .cache import decode_rows, encode_rows, page_parts


def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` rounded to nearest even; a NaN becomes the positive quiet one.  Values of `dtype` stay as they are, NaN included."""
    if x.dtype == dtype:
        return x
    return torch.where(x.isnan(), torch.nan, x.to(dtype))


def _inside(index: torch.Tensor, end: int) -> torch.Tensor:
    return (index >= 0) & (index < end)


def append_reference(
    problem: Append, kv_cache: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """`mla_torch.append` of checked arguments."""
    spec, fmt = problem.cache, problem.cache.format
    kept = _inside(slots, spec.num_slots)
    slot, latent = slots[kept].long(), latent[kept]
    rope = rope[kept] if rope is not None else latent.new_empty((len(slot), 0))
    page, token = slot // spec.page_size, slot % spec.page_size
    if not fmt.quantised:
        rows = kv_cache[:, :, 0]
        rows[..., : problem.d_latent][page, token] = convert(latent, kv_cache.dtype)
        rows[..., problem.d_latent :][page, token] = convert(rope, kv_cache.dtype)
        return
    data, scales = page_parts(kv_cache, spec)
    codes, scale, rope_bytes = encode_rows(latent, rope, fmt, problem.power_of_two_scales)
    data[..., : fmt.d_nope][page, token] = codes
    data[..., fmt.rope_offset : fmt.rope_offset + 2 * fmt.d_rope][page, token] = rope_bytes
    scales[..., : scale.shape[-1]][page, token] = scale


def read_reference(problem: Read, kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`mla_torch.read` of checked arguments."""
    spec = problem.cache
    dtype = getattr(torch, problem.dtype)
    rows = torch.zeros((problem.n, problem.d_qk), dtype=dtype, device=kv_cache.device)
    kept = _inside(slots, spec.num_slots)
    slot = slots[kept].long()
    wide = torch.float32 if spec.format.quantised else kv_cache.dtype
    found = decode_rows(kv_cache, spec, slot // spec.page_size, slot % spec.page_size, wide)[:, 0]
    if spec.format.quantised:
        found = torch.where(found.isnan(), torch.nan, found)
    rows[kept] = convert(found, dtype)
    return rows


def copy_pages_reference(
    problem: CopyPages, kv_cache: torch.Tensor, source_pages: torch.Tensor, target_pages: torch.Tensor
) -> None:
    """`mla_torch.copy_pages` of checked arguments."""
    spec = problem.cache
    kept = _inside(source_pages, spec.num_pages) & _inside(target_pages, spec.num_pages)
    pages = _token_bytes(kv_cache, spec)
    pages[target_pages[kept].long()] = pages[source_pages[kept].long()]


def _token_bytes(kv_cache: torch.Tensor, spec: CacheSpec) -> torch.Tensor:
    """A view of the tokens of each page, without the padding behind them."""
    if not spec.format.scale_in_page:
        return kv_cache
    size = spec.page_size * spec.format.token_bytes
    return kv_cache.as_strided((spec.num_pages, size), (spec.page_stride, 1))
