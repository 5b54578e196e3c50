"""Inputs of the timed calls, made on the device with PyTorch.

A call is timed over several copies of its table or indices that name different pages, so that a key is out of the second
level cache by the time that it is read again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mla_kernels.formats import get_format
from mla_torch.cache import quantize_cache

from .cases import Case

ROTATED_BYTES = 300 << 20
MAX_COPIES = 32
# Pages of a quantised cache repeat after so many tokens; the bytes still lie at addresses of their own.
BASE_TOKENS = 16384


@dataclass
class CaseData:
    """One case's tensors.

    Attributes:
      shared: arguments of `mla_torch.decode` that all copies share.
      rotated: for each copy the arguments that differ: `block_table`, or `indices` and `extra_indices`.
      pages: for page-level formats, by argument name, the same cache as uint8 [pages, page_bytes].
    """

    case: Case
    shared: dict[str, Any]
    rotated: list[dict[str, torch.Tensor]]
    pages: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def copies(self) -> int:
        return len(self.rotated)

    def call(self, i: int) -> dict[str, Any]:
        """Arguments of the i-th call; copies take turns."""
        return {**self.shared, **self.rotated[i % self.copies]}


def num_copies(case: Case, rotated_bytes: int = ROTATED_BYTES) -> int:
    """Copies that make one round of calls read `rotated_bytes`; at most 32."""
    return max(1, min(MAX_COPIES, -(-rotated_bytes // case.cache_bytes())))


def _quantised_cache(
    cache_format: str, num_pages: int, page_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache as `mla_torch` takes it, and its memory as uint8 [pages, page_bytes]."""
    fmt = get_format(cache_format)
    base_pages = min(num_pages, -(-BASE_TOKENS // page_size))
    device = generator.device
    latent = torch.randn((base_pages, page_size, 1, fmt.d_qk), generator=generator, device=device, dtype=torch.bfloat16)
    base = quantize_cache(latent, cache_format)
    base = base.as_strided((base_pages, fmt.page_bytes(page_size)), (fmt.page_bytes(page_size), 1))
    storage = torch.empty((num_pages, base.shape[1]), dtype=torch.uint8, device=device)
    for first in range(0, num_pages, base_pages):
        part = storage[first : first + base_pages]
        part.copy_(base[: len(part)])
    return storage[:, : page_size * fmt.token_bytes].unflatten(1, (page_size, 1, fmt.token_bytes)), storage


def _block_tables(case: Case, copies: int, generator: torch.Generator) -> tuple[list[torch.Tensor], int]:
    """int32 [b, max_pages] for each copy, over pages that no other copy or request uses, and the number of pages."""
    counts = -(-torch.from_numpy(case.lengths()).to(torch.int64) // case.page_size)
    width = int(counts.max())
    total = int(counts.sum())
    device = generator.device
    ids = torch.randperm(copies * total, generator=generator, device=device, dtype=torch.int32)
    used = (torch.arange(width) < counts[:, None]).to(device)
    tables = []
    for part in ids.split(total):
        table = torch.full((case.batch, width), -1, dtype=torch.int32, device=device)
        table[used] = part
        tables.append(table)
    return tables, copies * total


def _draw_indices(
    case: Case, topk: int, keys: int, page_size: int, copies: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], int]:
    """int32 [b, s_q, topk] for each copy, without repetition among the `keys` of a request, and the number of pages."""
    device = generator.device
    each = -(-keys // page_size)
    ids = torch.randperm(copies * case.batch * each, generator=generator, device=device)
    tables = []
    for own in ids.view(copies, case.batch, each):
        scores = torch.rand((case.batch, case.s_q, keys), generator=generator, device=device)
        token = scores.argsort(-1)[..., :topk]
        page = own[:, None].expand(-1, case.s_q, -1).gather(-1, token // page_size)
        tables.append((page * page_size + token % page_size).to(torch.int32).contiguous())
    return tables, len(ids)


def make_data(case: Case, device: str = "cuda", rotated_bytes: int = ROTATED_BYTES) -> CaseData:
    """Random inputs of a case: q and keys normal, sinks normal, pages in random order."""
    generator = torch.Generator(device=device).manual_seed(0)
    copies = num_copies(case, rotated_bytes)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    shared: dict[str, Any] = {"q": normal(case.batch, case.s_q, case.h_q, case.d_qk)}
    if not case.sparse:
        tables, num_pages = _block_tables(case, copies, generator)
        shared["kv_cache"] = normal(num_pages, case.page_size, 1, case.d_qk)
        shared["cache_seqlens"] = torch.from_numpy(case.lengths()).to(device)
        shared["causal"] = case.causal
        return CaseData(case, shared, [{"block_table": table} for table in tables])

    scopes = [("kv_cache", "indices", case.topk, case.keys, case.page_size)]
    if case.extra_topk:
        scopes.append(("extra_kv_cache", "extra_indices", case.extra_topk, case.extra_keys, case.extra_page_size))
    rotated: list[dict[str, torch.Tensor]] = [{} for _ in range(copies)]
    pages = {}
    for cache_name, indices_name, topk, keys, page_size in scopes:
        tables, num_pages = _draw_indices(case, topk, keys, page_size, copies, generator)
        shared[cache_name], storage = _quantised_cache(case.format, num_pages, page_size, generator)
        if get_format(case.format).scale_in_page:
            pages[cache_name] = storage
        for call, table in zip(rotated, tables, strict=True):
            call[indices_name] = table
    if case.attn_sink:
        shared["attn_sink"] = normal(case.h_q, dtype=torch.float32)
    return CaseData(case, shared, rotated, pages)
