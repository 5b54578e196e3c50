"""What the DeepSeek models of the examples are: config.json, RoPE's angles, shapes and random weights.  With numpy alone."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Yarn:
    """How RoPE was stretched to a longer context; the names are those of config.json."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Config:
    """A model; the names are those of config.json, the defaults a small one with DeepSeek-V3's attention geometry."""

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 3
    first_k_dense_replace: int = 1
    num_attention_heads: int = 8
    q_lora_rank: int | None = 192
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 3
    n_group: int = 4
    topk_group: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    index_n_heads: int = 0  # of DeepSeek-V3.2's indexer; 0 where there is none
    index_head_dim: int = 128
    index_topk: int = 2048
    implementation: str | None = None  # of decode and append; None takes the best one for the device

    @property
    def softmax_scale(self) -> float:
        stretch = self.yarn.magnitude(self.yarn.mscale_all_dim) if self.yarn and self.yarn.mscale_all_dim else 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * stretch**2

    @classmethod
    def from_json(cls, path: Path) -> Config:
        """Reads config.json.  Raises NotImplementedError where it describes a model of another kind."""
        found = json.loads(path.read_text())
        wanted = {"model_type": "deepseek_v3", "hidden_act": "silu", "rope_interleave": True, "scoring_func": "sigmoid"}
        for name, value in {**wanted, "quantization_config": None}.items():
            if found.get(name, value) != value:
                raise NotImplementedError(f"{path}: {name} is {found[name]!r}, and this example knows {value!r}")
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "yarn"):
            raise NotImplementedError(f"{path}: RoPE of type {kind!r}, and this example knows 'default' and 'yarn'")
        names = {field.name for field in dataclasses.fields(Yarn)}
        yarn = Yarn(**{k: v for k, v in rope.items() if k in names and v is not None}) if kind == "yarn" else None
        theta = rope.get("rope_theta", found.get("rope_theta", cls.rope_theta))
        names = {field.name for field in dataclasses.fields(cls)} - {"yarn", "rope_theta", "implementation"}
        return cls(**{k: v for k, v in found.items() if k in names}, yarn=yarn, rope_theta=theta)


SMALL = Config(num_hidden_layers=2, first_k_dense_replace=2, num_attention_heads=4, q_lora_rank=96)  # without experts
SPARSE = dataclasses.replace(SMALL, index_n_heads=4)  # of DeepSeek-V3.2's kind


def rope_frequencies(config: Config) -> tuple[np.ndarray, float]:
    """Radians per position by which each pair is turned, fp32 [d / 2], and the factor of its length."""
    d, yarn = config.qk_rope_head_dim, config.yarn
    frequency = config.rope_theta ** -(np.arange(0, d, 2, np.float32) / d)
    magnitude = 1.0
    if yarn:
        # Pairs that turn more often than beta_fast over the original context stay; those below beta_slow are slowed down.
        turns = np.array([yarn.beta_fast, yarn.beta_slow])
        pair = d * np.log(yarn.original_max_position_embeddings / (turns * 2 * np.pi)) / (2 * np.log(config.rope_theta))
        first, last = max(math.floor(pair[0]), 0), min(math.ceil(pair[1]), d - 1)
        slowed = np.clip((np.arange(d // 2) - first) / max(last - first, 1e-3), 0, 1)
        frequency = frequency * (1 - slowed + slowed / yarn.factor)
        both = yarn.mscale and yarn.mscale_all_dim
        magnitude = yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim) if both else yarn.magnitude(1)
    return frequency.astype(np.float32), magnitude


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays of a file; those of products are [out, in]."""
    hidden, heads, latent, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
    q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)

    def mlp(name: str, size: int) -> dict[str, tuple[int, ...]]:
        sizes = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
        return {f"{name}.{part}.weight": shape for part, shape in sizes.items()}

    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.kv_a_proj_with_mqa.weight": (latent + config.qk_rope_head_dim, hidden),
            "self_attn.kv_a_layernorm.weight": (latent,),
            "self_attn.kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
            "self_attn.o_proj.weight": (hidden, heads * config.v_head_dim),
        }
        if rank is None:
            layer["self_attn.q_proj.weight"] = (q_width, hidden)
        else:
            layer["self_attn.q_a_proj.weight"] = (rank, hidden)
            layer["self_attn.q_a_layernorm.weight"] = (rank,)
            layer["self_attn.q_b_proj.weight"] = (q_width, rank)
        if config.index_n_heads:
            if rank is None:
                raise NotImplementedError("q_lora_rank: the indexer takes its queries from the compressed ones, got None")
            layer["self_attn.indexer.wq_b.weight"] = (config.index_n_heads * config.index_head_dim, rank)
            layer["self_attn.indexer.wk.weight"] = (config.index_head_dim, hidden)
            layer["self_attn.indexer.k_norm.weight"] = layer["self_attn.indexer.k_norm.bias"] = (config.index_head_dim,)
            layer["self_attn.indexer.weights_proj.weight"] = (config.index_n_heads, hidden)
        if i < config.first_k_dense_replace:
            layer |= mlp("mlp", config.intermediate_size)
        else:
            layer["mlp.gate.weight"] = (config.n_routed_experts, hidden)
            layer["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
            for e in range(config.n_routed_experts):
                layer |= mlp(f"mlp.experts.{e}", config.moe_intermediate_size)
            layer |= mlp("mlp.shared_experts", config.moe_intermediate_size * config.n_shared_experts)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def random_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights fp32 of a random model, by the names of a file; of a size that keeps activations near 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(config).items():
        normal = rng.standard_normal(shape, np.float32)
        if len(shape) == 2:
            weights[name] = normal * np.float32(shape[1] ** -0.5)
        else:
            weights[name] = 0.1 * normal + np.float32(name.endswith("norm.weight"))
    return weights
