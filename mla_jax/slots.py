"""Where tokens of requests lie in a paged cache, for JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mla_kernels.cache_problem import check_token_slots

from .specs import array_spec, narrow


def token_slots(block_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Slots of tokens, as `append`, `read` and the `indices` of `decode` take them, from their positions in their requests.

    Works eagerly and under `jit`, `vmap` and `lax.scan`.  Arrays may be numpy's.

    Args:
      block_table: int32 [b, max_pages], the pages of each request.  Entries that no position leads to may hold anything.
      positions: int32 or int64 [b, ...], position 0 is the first token of a request; below 0 there is none.
      page_size: tokens of a page, a Python int (static under `jit`).

    Returns:
      int32 of the shape of `positions`: `page * page_size + offset`, and -1 where the position is below 0 or behind the
      table, or where the table names no page (its entry is below 0, or too large for a slot in int32).

    Raises (while tracing):
      ValueError: a wrong type, shape or dtype; the message names the argument.
    """
    positions = narrow(positions)
    table_spec, positions_spec = array_spec("block_table", block_table), array_spec("positions", positions)
    last_page = check_token_slots(table_spec, positions_spec, page_size)
    b, max_pages = block_table.shape
    if positions.size == 0 or max_pages == 0:
        return jnp.full(positions.shape, -1, jnp.int32)
    column = jnp.asarray(positions) // page_size
    page = jnp.take_along_axis(jnp.asarray(block_table), column.reshape(b, -1), 1, mode="clip").reshape(positions.shape)
    held = (column >= 0) & (column < max_pages) & (page >= 0) & (page <= last_page)
    return jnp.where(held, page * page_size + (positions % page_size).astype(jnp.int32), -1)
