"""What decode computes, in the plainest code: fp32 for users without a GPU, fp64 as a judge of the kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_kernels.problem import CacheSpec, Problem, TensorSpec, make_problem

from .cache import decode_rows
from .tensors import check_scale, check_tensors, dtype_name, float_dtype, full_spec, refuse_transform, transform_level

CHUNK_VALUES = 2**22  # key values that are held at a time


def decode_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    head_dim_v: int | None = None,
    softmax_scale: float | torch.Tensor | None = None,
    causal: bool = False,
    cache_format: str | None = None,
    page_size: int | tuple[int | None, int | None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention step over a paged latent cache, on the device of its arguments.

    Reads attended keys only, through the strides of the cache.  The arguments are those of `mla_torch.decode`; besides
    bf16 and fp16, q (and with it an unquantised cache) may be fp32 or fp64.

    Args:
      q: [b, s_q, h_q, d_qk].
      kv_cache: [pages, page_size, h_kv, d_qk] in q's dtype, or bytes in a quantised format.
      block_table: int32 [b, max_pages], with `cache_seqlens` int32 [b]: dense.
      indices: int32 [b, s_q, topk], flat slots `page * page_size + offset`: sparse; entries out of range are skipped.
      topk_length: int32 [b], how many of the leftmost indices count.
      extra_kv_cache: a second cache with `extra_indices` and `extra_topk_length`, under the same softmax.
      attn_sink: fp32 [h_q], scales out by `1 / (1 + exp(sink - lse))`.
      head_dim_v: the first so many columns of a key are its value; 512 by default when d_qk is 576 or 512.
      softmax_scale: `d_qk ** -0.5` by default.
      causal: dense only, query j sees tokens `t <= cache_seqlens - s_q + j`.
      cache_format: needed where dtype and width do not tell it.
      page_size: of caches given as [pages, page_bytes]; a pair when the two caches differ.
      dtype: fp32 or fp64, of the arithmetic (fp64 anyway if q is fp64).

    Returns:
      out [b, s_q, h_q, d_v] in q's dtype, rounded once, and lse fp32 [b, h_q, s_q], the natural log-sum-exp of the
      scaled scores without the sink.  If the arithmetic is fp64, both are fp64.  A row without a key is 0 and +inf.

    Raises:
      ValueError, NotImplementedError: as `mla_torch.decode`.
    """
    dtype = float_dtype(dtype, ("float32", "float64"))
    tensors = {
        "q": q,
        "kv_cache": kv_cache,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        "indices": indices,
        "topk_length": topk_length,
        "extra_kv_cache": extra_kv_cache,
        "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length,
        "attn_sink": attn_sink,
    }
    if transform_level() is not None:
        refuse_transform("decode_reference", {**tensors, "softmax_scale": softmax_scale})
    specs = zip(tensors, check_tensors("decode_reference", tensors, ("q", "kv_cache")), strict=True)
    wide = dtype_name(q.dtype) if q.dtype in (torch.float32, torch.float64) else None
    problem = make_problem(
        **{name: None if spec is None else _narrowed(name, full_spec(spec), wide) for name, spec in specs},  # type: ignore[arg-type]
        head_dim_v=head_dim_v,
        causal=causal,
        cache_format=cache_format,
        page_size=page_size,
    )
    if wide == "float64":
        dtype = torch.float64
    precise = dtype is torch.float64

    out = torch.zeros(problem.out_shape, dtype=dtype if precise else q.dtype, device=q.device)
    lse = torch.full(problem.lse_shape, torch.inf, dtype=dtype, device=q.device)
    scale = problem.d_qk**-0.5 if softmax_scale is None else check_scale("decode_reference", softmax_scale, q.device)
    if isinstance(scale, torch.Tensor):
        scale = scale.to(dtype).reshape(())
    scopes: list[tuple[torch.Tensor, CacheSpec, torch.Tensor | None, torch.Tensor | None]] = [
        (kv_cache, problem.cache, indices if problem.sparse else block_table, topk_length if problem.sparse else cache_seqlens)
    ]
    if extra_kv_cache is not None and problem.extra is not None:
        scopes.append((extra_kv_cache, problem.extra, extra_indices, extra_topk_length))

    # One row per query token, whether its keys come from a table or from indices.
    if problem.empty:
        return out, lse
    rows = torch.arange(problem.batch * problem.s_q, device=q.device)
    for row in rows.split(_rows_at_a_time(problem, cache_seqlens)):
        request, query = row // problem.s_q, row % problem.s_q
        found = [_keys(problem, scope, request, query, dtype) for scope in scopes]
        keys = torch.cat([k for k, _ in found], 1) if len(found) > 1 else found[0][0]
        valid = torch.cat([v for _, v in found], 1)
        out_rows, lse_rows = _attend(q[request, query].to(dtype), keys, valid, scale, attn_sink, problem.d_v)
        out[request, query] = out_rows.to(out.dtype)
        lse[request, :, query] = lse_rows
    return out, lse


def _narrowed(name: str, spec: TensorSpec, wide: str | None) -> TensorSpec:
    """The checks know 16-bit queries and caches; fp32 and fp64 ones differ from bf16 in nothing that they look at."""
    if name in ("q", "kv_cache", "extra_kv_cache") and wide is not None:
        if spec.dtype == wide:
            return replace(spec, dtype="bfloat16")
        if spec.dtype in ("bfloat16", "float16", "float32", "float64"):
            raise ValueError(f"{name}: expected the dtype of q ({wide}), got {spec}")
    return spec


def _rows_at_a_time(problem: Problem, cache_seqlens: torch.Tensor | None) -> int:
    keys = problem.width + problem.extra_width
    if not problem.sparse:
        assert cache_seqlens is not None
        keys = min(int(cache_seqlens.max()), problem.max_tokens)
    return max(1, CHUNK_VALUES // (max(keys, 1) * problem.h_kv * problem.d_qk))


def _keys(
    problem: Problem,
    scope: tuple[torch.Tensor, CacheSpec, torch.Tensor | None, torch.Tensor | None],
    request: torch.Tensor,
    query: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [r, n, h_kv, d_qk] of query tokens and which of them count, bool [r, n]; those that do not are 0 and unread."""
    cache, spec, table, length = scope
    assert table is not None
    width = table.shape[-1] if problem.sparse else problem.max_tokens
    limit = torch.full_like(request, width) if length is None else length[request].long().clamp(0, width)
    if problem.causal:
        limit = (limit - problem.s_q + 1 + query).clamp(min=0)
    position = torch.arange(int(limit.max()), device=request.device)
    valid = position < limit[:, None]
    if problem.sparse:
        index = table[request, query, : len(position)].long()
        valid &= (index >= 0) & (index < spec.num_slots)
        page, slot = index[valid] // spec.page_size, index[valid] % spec.page_size
    else:
        r, t = valid.nonzero(as_tuple=True)
        page, slot = table[request[r], t // spec.page_size].long(), t % spec.page_size
    found = decode_rows(cache, spec, page, slot, dtype)
    if len(found) == valid.numel():
        return found.unflatten(0, valid.shape), valid
    keys = torch.zeros((*valid.shape, problem.h_kv, problem.d_qk), dtype=dtype, device=cache.device)
    keys[valid] = found
    return keys, valid


def _attend(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, scale: float | torch.Tensor, sink: torch.Tensor | None, d_v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [r, h_q, d_qk], keys [r, n, h_kv, d_qk], valid [r, n] -> out [r, h_q, d_v], lse [r, h_q]."""
    keys = keys.transpose(1, 2)  # [r, h_kv, n, d_qk]
    if keys.shape[2] == 0:
        return q.new_zeros((*q.shape[:2], d_v)), q.new_full(q.shape[:2], torch.inf)
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [r, h_kv, heads of one key head, d_qk]
    scores = grouped @ keys.mT * scale
    scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    out = (p @ keys[..., :d_v] / total).flatten(1, 2)
    lse = (top + total.log()).flatten(1)
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.to(lse.dtype))[..., None]
    empty = ~valid.any(-1)[:, None]  # there, the above is NaN
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, torch.inf)
