"""Where tokens of requests lie in a paged cache, for PyTorch."""

from __future__ import annotations

import torch

from mla_kernels.cache_problem import check_token_slots

from .tensors import check_tensors, full_spec


def token_slots(block_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots of tokens, as `append`, `read` and the `indices` of `decode` take them, from their positions in their requests.

    Runs on the device of `block_table`, on its current stream, and never waits for the device, so it can be captured in a
    CUDA graph.

    Args:
      block_table: int32 [b, max_pages], the pages of each request.  Entries that no position leads to may hold anything.
      positions: int32 or int64 [b, ...], position 0 is the first token of a request; below 0 there is none.
      page_size: tokens of a page.

    Returns:
      int32 of the shape of `positions`: `page * page_size + offset`, and -1 where the position is below 0 or behind the
      table, or where the table names no page (its entry is below 0, or too large for a slot in int32).

    Raises:
      ValueError: a wrong type, shape, dtype or device; the message names the argument.
    """
    tensors = {"block_table": block_table, "positions": positions}
    specs = check_tensors("token_slots", tensors, needed=tuple(tensors))
    table_spec, positions_spec = (full_spec(spec) for spec in specs if spec is not None)
    last_page = check_token_slots(table_spec, positions_spec, page_size)
    b, max_pages = block_table.shape
    if positions.numel() == 0 or max_pages == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    column = positions.reshape(b, -1).long() // page_size  # gather takes no other integers
    page = block_table.gather(1, column.clamp(0, max_pages - 1)).view(positions.shape)
    column = column.view(positions.shape)
    held = (column >= 0) & (column < max_pages) & (page >= 0) & (page <= last_page)
    return (page * page_size + (positions % page_size).int()).masked_fill(~held, -1)
