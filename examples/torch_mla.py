"""DeepSeek-V3's decoder in plain PyTorch, without experts: what `torch_sparse.py` and `serve_loop.py` decode with.

Functions of the weights, which go by the names of the file; caches are written in place, and nothing waits for the device.
`jax_deepseek.py` is the same model in JAX, function by function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import mla_torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples know one another, run by path or imported

from examples.deepseek_config import Config, rope_frequencies

Params = dict[str, Any]
Rope = tuple[torch.Tensor, torch.Tensor]
Caches = tuple[torch.Tensor, ...]  # of each layer [pages, page_size, 1, 576], or uint8 [pages, page_size, 1, 656] for v32_fp8
# Of layer i, its weights, x [b, s, hidden] and the angles of its positions: values [b, s, h, v_head_dim].
Attend = Callable[[int, Params, torch.Tensor, Rope], torch.Tensor]


def arrange(config: Config, weights: Mapping[str, Any], device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Params:
    """Puts the layers into a list and cuts kv_b_proj into W_UK and W_UV.

    Args:
      weights: numpy arrays by the names of a file of DeepseekV3ForCausalLM.
    """
    if config.first_k_dense_replace < config.num_hidden_layers:
        raise NotImplementedError("first_k_dense_replace: this example has no experts, so all layers must come before them")

    def convert(name: str) -> torch.Tensor:
        return torch.from_numpy(weights[name]).to(device, dtype)

    layers = []
    for i in range(config.num_hidden_layers):
        start = f"model.layers.{i}."
        layer = {name.removeprefix(start): convert(name) for name in weights if name.startswith(start)}
        up = layer.pop("self_attn.kv_b_proj.weight").unflatten(0, (config.num_attention_heads, -1))
        layer["W_UK"], layer["W_UV"] = up.split([config.qk_nope_head_dim, config.v_head_dim], 1)  # [heads, 128, 512] each
        layers.append(layer)
    names = {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    frequency, magnitude = rope_frequencies(config)
    rope = {"frequency": torch.from_numpy(frequency).to(device), "magnitude": magnitude}
    return {"layers": layers, **{key: convert(name) for key, name in names.items()}, **rope}


# The model.  b requests, s tokens of each, h heads.


def rms_norm(weight: torch.Tensor, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def linear(layer: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, layer[f"{name}.weight"])


def rope_angles(params: Params, positions: torch.Tensor) -> Rope:
    """Cosine and sine fp32 [b, s, d / 2] of the angles by which each pair is turned at positions [b, s]."""
    angles = positions[..., None] * params["frequency"]
    return angles.cos() * params["magnitude"], angles.sin() * params["magnitude"]


def rotate(x: torch.Tensor, rope: Rope, interleaved: bool = True) -> torch.Tensor:
    """RoPE of x [b, s, ..., d] on neighbouring pairs, as DeepSeek's attention has it, or on column i and column i + d / 2."""
    cos, sin = (angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), -1) for angle in rope)
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def compress_query(config: Config, layer: Params, x: torch.Tensor) -> torch.Tensor:
    """What queries are made of: [b, s, q_lora_rank], or x itself in a model that does not compress them."""
    if config.q_lora_rank is None:
        return x
    return rms_norm(layer["self_attn.q_a_layernorm.weight"], linear(layer, "self_attn.q_a_proj", x))


def project(config: Config, layer: Params, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, ...]:
    """Queries [b, s, h, 128] and [b, s, h, 64], and what is cached of a token: latent [b, s, 512] and RoPE key [b, s, 64]."""
    name = "self_attn.q_proj" if config.q_lora_rank is None else "self_attn.q_b_proj"
    q = linear(layer, name, compress_query(config, layer, x)).unflatten(-1, (config.num_attention_heads, -1))
    q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    latent, k_rope = linear(layer, "self_attn.kv_a_proj_with_mqa", x).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
    latent = rms_norm(layer["self_attn.kv_a_layernorm.weight"], latent)
    return q_nope, rotate(q_rope, rope), latent, rotate(k_rope, rope)


def absorb(layer: Params, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """Queries [b, s, h, 576] for latents: q . (W_UK c) = (W_UK^T q) . c, so that no latent goes to every head."""
    return torch.cat([torch.einsum("bshd,hdc->bshc", q_nope, layer["W_UK"]), q_rope], -1)


def expand(layer: Params, out: torch.Tensor) -> torch.Tensor:
    """Values [b, s, h, v_head_dim] of attended latents [b, s, h, 512], in the dtype of the weights."""
    return torch.einsum("bshc,hdc->bshd", out.to(layer["W_UV"].dtype), layer["W_UV"])


def mlp(layer: Params, x: torch.Tensor) -> torch.Tensor:
    gated = torch.nn.functional.silu(linear(layer, "mlp.gate_proj", x)) * linear(layer, "mlp.up_proj", x)
    return linear(layer, "mlp.down_proj", gated)


def forward(config: Config, params: Params, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Last hidden states [b, s, hidden] of tokens [b, s] at positions [b, s]."""
    x = params["embed_tokens"][tokens]
    rope = rope_angles(params, positions)
    for i, layer in enumerate(params["layers"]):
        normed = rms_norm(layer["input_layernorm.weight"], x, config.rms_norm_eps)
        x = x + linear(layer, "self_attn.o_proj", attend(i, layer, normed, rope).flatten(2))
        x = x + mlp(layer, rms_norm(layer["post_attention_layernorm.weight"], x, config.rms_norm_eps))
    return rms_norm(params["norm"], x, config.rms_norm_eps)


def logits(params: Params, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden @ params["lm_head"].T).float()


# Attention over the cache.


def new_caches(
    config: Config, pages: int, page_size: int = 64, cache_format: str = "bf16", device: Any = "cpu"
) -> tuple[torch.Tensor, ...]:
    """Empty caches, one of each layer, in `bf16`, `fp16` or `v32_fp8`."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    token = {"bf16": (width, torch.bfloat16), "fp16": (width, torch.float16), "v32_fp8": (656, torch.uint8)}[cache_format]
    shape = (pages, page_size, 1, token[0])
    return tuple(torch.zeros(shape, dtype=token[1], device=device) for _ in range(config.num_hidden_layers))


def attend_cache(
    config: Config,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
) -> torch.Tensor:
    """Stores s new tokens behind `lengths` [b] cached ones and attends to all: latents [b, s, h, 512]."""
    s = q.shape[1]
    slots = mla_torch.token_slots(block_table, following(lengths, s), cache.shape[1]).flatten()
    mla_torch.append(cache, latent.flatten(0, 1), k_rope.flatten(0, 1), slots, implementation=config.implementation)
    out, _ = mla_torch.decode(
        q.to(torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype),
        cache,
        block_table,
        lengths + s,
        softmax_scale=config.softmax_scale,
        causal=True,
        implementation=config.implementation,
    )
    return out


def following(lengths: torch.Tensor, s: int) -> torch.Tensor:
    """Positions int32 [b, s] of s tokens behind `lengths` [b] others."""
    return lengths[:, None] + torch.arange(s, dtype=torch.int32, device=lengths.device)


def decode(
    config: Config, params: Params, caches: Caches, block_table: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Hidden states [b, s, hidden] of tokens [b, s] that follow `lengths` [b] cached ones; they are cached, too.

    Of a row whose length is -n the first n tokens are padding; where that is all of them, the row is free.
    """

    def attend(i: int, layer: Params, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        q_nope, q_rope, latent, k_rope = project(config, layer, x, rope)
        q = absorb(layer, q_nope, q_rope)
        return expand(layer, attend_cache(config, caches[i], block_table, lengths, q, latent, k_rope))

    return forward(config, params, tokens, following(lengths, tokens.shape[1]), attend)
