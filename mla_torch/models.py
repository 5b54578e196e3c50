"""MLA decode inside models of Hugging Face transformers: an attention implementation and the paged cache that it works on.

Importing this module registers the attention `"mla_decode"`:

    model.set_attn_implementation("mla_decode")
    cache = PagedCache(model.config, batch_size=2, max_tokens=4096)
    model.generate(**prompts, cache=cache)

It serves models whose attention hands its latents to the cache before it expands them, and lets the cache add to what the
attention function is given: DeepSeek-V2 and V3, as transformers 5.24 has them.  Projections, RoPE and the softmax scale
remain the model's own.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface, Cache
    from transformers.cache_utils import CacheLayerMixin
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("mla_torch.models needs transformers: pip install 'mla-decode[models]'") from None

from .api import decode
from .cache_ops import append
from .reference import decode_reference
from .slots import token_slots

__all__ = ["NAME", "PagedCache", "attention"]

NAME = "mla_decode"
FORMATS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "v32_fp8": torch.uint8}
V32_BYTES = 656
WIDE = (torch.float32, torch.float64)  # of caches that the reference alone takes


class PagedCache(Cache):
    """Latents and RoPE keys of a batch of requests in pages, for models whose attention is `"mla_decode"`.

    Layers share one block table.  A token that `attention_mask` leaves out takes no slot, so requests of different lengths
    are padded (on the left, as `generate` wants it) without a cost in the cache.  Pages are allocated at a layer's first
    use, on its device.  `reset` empties the cache, `crop` forgets the last tokens; beam search, which reorders requests, is
    not built.

    Args:
      config: the model's; `kv_lora_rank`, `qk_rope_head_dim` and `num_hidden_layers` are read.
      batch_size: requests.
      max_tokens: the longest that any of them becomes, prompt and padding included.
      page_size: tokens of a page.
      cache_format: `bf16`, `fp16` or `v32_fp8`; None stores the model's own dtype.  An fp32 model then gets an fp32 cache,
        which the reference implementation alone serves: exact, and slow.
      block_table: int32 or int64 [batch_size, at least max_tokens / page_size], pages of each request; None numbers them
        from 0, request by request.  Pages are allocated up to the largest number.

    Attributes:
      block_table: int32 [batch_size, pages of a request].
      cache_seqlens: int32 [batch_size], tokens stored.

    Raises:
      ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        max_tokens: int,
        *,
        page_size: int = 64,
        cache_format: str | None = None,
        block_table: torch.Tensor | None = None,
    ):
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        if cache_format not in FORMATS:
            raise ValueError(f"cache_format: expected one of {', '.join(map(repr, FORMATS))}, got {cache_format!r}")
        config = config.get_text_config()
        for name in ("kv_lora_rank", "qk_rope_head_dim"):
            if getattr(config, name, None) is None:
                raise ValueError(
                    f"config: expected one of a model with latent attention, {type(config).__name__} has no {name}"
                )
        pages = -(-max_tokens // page_size)
        if block_table is None:
            block_table = torch.arange(batch_size * pages, dtype=torch.int32).reshape(batch_size, pages)
        shape = tuple(block_table.shape)
        if block_table.dtype not in (torch.int32, torch.int64) or len(shape) != 2 or shape[0] != batch_size or shape[1] < pages:
            raise ValueError(
                f"block_table: expected int32 or int64 of shape [batch_size={batch_size}, at least {pages}], "
                f"got {block_table.dtype} {list(shape)}"
            )
        block_table = block_table[:, :pages].to(torch.int32)
        if int(block_table.min()) < 0:
            raise ValueError(f"block_table: expected pages from 0 on, got {int(block_table.min())}")
        self.requests = _Requests(block_table, page_size, max_tokens)
        super().__init__(layers=[_Layer(self.requests, config, cache_format) for _ in range(config.num_hidden_layers)])

    @property
    def block_table(self) -> torch.Tensor:
        return self.requests.block_table

    @property
    def cache_seqlens(self) -> torch.Tensor:
        return self.requests.lengths


class _Requests:
    """What the layers share: the slots of the newest tokens, and how many tokens each request has."""

    def __init__(self, block_table: torch.Tensor, page_size: int, max_tokens: int):
        self.block_table = block_table
        self.num_pages = int(block_table.max()) + 1
        self.page_size = page_size
        self.max_tokens = max_tokens
        self.lengths = block_table.new_zeros(len(block_table))
        self.slots = self.lengths
        self.seen = 0  # tokens of a request, padding included

    def extend(self, count: int, mask: torch.Tensor | None, device: torch.device) -> None:
        """Gives the next `count` tokens of each request their slots; those that `mask`, bool [b, count], leaves out get -1."""
        if self.seen + count > self.max_tokens:
            raise ValueError(f"max_tokens: the cache holds {self.max_tokens} of a request, {self.seen + count} are needed")
        self.block_table, self.lengths = self.block_table.to(device), self.lengths.to(device)
        if mask is None:
            mask = torch.ones((len(self.lengths), count), dtype=torch.bool, device=device)
        positions = (self.lengths[:, None] + mask.cumsum(1) - 1).masked_fill(~mask, -1)
        self.slots = token_slots(self.block_table, positions, self.page_size).flatten()
        self.lengths = (self.lengths + mask.sum(1)).to(torch.int32)
        self.seen += count

    def crop(self, seen: int) -> None:
        self.lengths = (self.lengths - (self.seen - seen)).clamp(min=0)
        self.seen = seen


class _Layer(CacheLayerMixin):
    """The pages of one layer."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, requests: _Requests, config: Any, cache_format: str | None):
        super().__init__()
        self.requests = requests
        self.widths = (config.kv_lora_rank, config.qk_rope_head_dim)
        self.cache_format = cache_format
        self.batch_size = len(requests.lengths)
        self.seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        dtype = FORMATS[self.cache_format] or key_states.dtype
        width = V32_BYTES if self.cache_format == "v32_fp8" else sum(self.widths)
        shape = (self.requests.num_pages, self.requests.page_size, 1, width)
        self.kv_cache = torch.empty(shape, dtype=dtype, device=key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves the new latents [b, 1, s, kv_lora_rank] and RoPE keys in `kwargs` for the attention function, which knows the
        mask, and returns them alone: the model expands the new tokens, never the cache."""
        found = [(x.shape[1], x.shape[3]) for x in (key_states, value_states)]
        if kwargs is None or found != [(1, width) for width in self.widths]:
            raise NotImplementedError(
                f"cache: a PagedCache serves models that store latents [b, 1, s, {self.widths[0]}] and RoPE keys "
                f"[b, 1, s, {self.widths[1]}] and pass kwargs on, got {list(key_states.shape)} and {list(value_states.shape)}"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kwargs["paged"] = (self, key_states, value_states)
        return key_states, value_states

    def store(self, latent: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor | None) -> None:
        requests, count = self.requests, latent.shape[2]
        if len(latent) != self.batch_size:
            raise ValueError(f"batch_size: the cache was made for {self.batch_size} requests, the model is given {len(latent)}")
        if requests.seen == self.seen:  # the first layer of a forward pass
            requests.extend(count, mask, latent.device)
        self.seen += count
        slots, latent, rope = requests.slots.to(latent.device), latent.flatten(0, 2), rope.flatten(0, 2)
        if self.kv_cache.dtype in WIDE:
            real = slots >= 0
            self.kv_cache.view(-1, sum(self.widths))[slots[real]] = torch.cat([latent, rope], 1)[real]
        else:
            append(self.kv_cache, latent, rope, slots, cache_format=self.cache_format)

    def attend(self, q: torch.Tensor, d_v: int, scale: float) -> torch.Tensor:
        """q [b, s, h, d_qk] -> [b, s, h, d_v]; the last query is that of the last token stored."""
        table, lengths = self.requests.block_table.to(q.device), self.requests.lengths.to(q.device)
        options: dict[str, Any] = {"head_dim_v": d_v, "softmax_scale": scale, "causal": q.shape[1] > 1}
        if self.kv_cache.dtype in WIDE:
            return decode_reference(q.to(self.kv_cache.dtype), self.kv_cache, table, lengths, **options)[0].to(q.dtype)
        q16 = q.to(torch.bfloat16 if self.kv_cache.dtype is torch.uint8 else self.kv_cache.dtype)
        return decode(q16, self.kv_cache, table, lengths, cache_format=self.cache_format, **options)[0].to(q.dtype)

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.requests.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens of each request; their number is negative, as transformers has it."""
        self.seen = max(self.seen - abs(tokens_to_remove), 0)
        if self.requests.seen > self.seen:
            self.requests.crop(self.seen)

    def reset(self) -> None:
        self.crop(self.seen)

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("cache: reordering the requests of a PagedCache (beam search) is not built")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: tuple[_Layer, torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind `"mla_decode"`, which transformers calls; see `PagedCache`.

    A prompt goes through PyTorch's attention over the expanded keys, all that follows through `mla_torch.decode` over the
    paged latents: W_UK is absorbed into the queries, and W_UV applied to what comes out.  (transformers expands the newest
    latents then too, for nothing: one product with `kv_b_proj` for as many tokens as are new.)

    Args:
      module: has `kv_b_proj`, `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim`.
      query: [b, h, s, qk_nope_head_dim + qk_rope_head_dim].
      key, value: of the new tokens, [b, h, s, width].
      attention_mask: bool [b, tokens so far], None where nothing is padding.
      scaling: softmax scale of the model, YaRN's factor included.
      paged: what `PagedCache` has left: its layer, and the new latents and RoPE keys.

    Returns:
      [b, s, h, v_head_dim] and None.

    Raises:
      ValueError: the call has no `PagedCache`, one that does not fit, or a mask of other shape.
      NotImplementedError: the weights of `kv_b_proj` are quantised.
    """
    if paged is None:
        raise ValueError(f"cache: attention {NAME!r} needs an mla_torch.models.PagedCache")
    layer, latent, rope = paged
    heads, count = query.shape[1:3]
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask: expected [b, tokens], got {list(attention_mask.shape)}")
    mask = None if attention_mask is None else attention_mask[:, -count:].bool()
    if not module.kv_b_proj.weight.dtype.is_floating_point or module.kv_b_proj.weight.element_size() < 2:
        raise NotImplementedError(f"kv_b_proj: expected weights of at least 16 bits, got {module.kv_b_proj.weight.dtype}")
    first = layer.seen == 0
    layer.store(latent, rope, mask)
    if first and count > 1:
        return _prefill(query, key, value, mask, scaling), None

    # Row n of a head's part of kv_b_proj: the first qk_nope_head_dim are W_UK, those after them W_UV.
    weight = module.kv_b_proj.weight.unflatten(0, (heads, -1))
    w_uk, w_uv = weight.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    q_nope, q_rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], 3)
    q = torch.cat([torch.einsum("bhsn,hnr->bshr", q_nope, w_uk), q_rope.transpose(1, 2)], 3)
    out = layer.attend(q, latent.shape[3], scaling)
    return torch.einsum("bshr,hvr->bshv", out, w_uv), None


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    if mask is None:
        return attend(query, key, value, is_causal=True, scale=scaling).transpose(1, 2)
    causal = torch.ones((query.shape[2], query.shape[2]), dtype=torch.bool, device=query.device).tril()
    itself = torch.eye(query.shape[2], dtype=torch.bool, device=query.device)  # gives padding something to see
    seen = (causal & mask[:, None] | itself)[:, None]
    return attend(query, key, value, attn_mask=seen, scale=scaling).transpose(1, 2)


def _mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """transformers asks this for the mask that `attention` gets: the one of padding, as it is."""
    return attention_mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
