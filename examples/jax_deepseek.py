"""DeepSeek-V3 in plain JAX: plain attention for prompts, `mla_jax` over a paged latent cache for every token after them.

    python examples/jax_deepseek.py                           # a small random model, on a CPU within a minute
    python examples/jax_deepseek.py --model DIR --prompt 0,17 # config.json and *.safetensors of a DeepseekV3ForCausalLM

Functions are pure; the weights are a pytree under the names of the file.  Decoding is one jitted loop on the device, its
state donated, and lengths are data: requests that grow, end or differ in length compile nothing.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mla_jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples know one another, run by path or imported

from examples.deepseek_config import Config, random_weights, rope_frequencies

Params = dict[str, Any]
Rope = tuple[jax.Array, jax.Array]
Caches = tuple[jax.Array, ...]  # of each layer [pages, page_size, 1, 576], or uint8 [pages, page_size, 1, 656] for v32_fp8


# Weights: {name in the file: array} becomes the pytree that the model reads, and nothing else is renamed.


def arrange(config: Config, weights: Mapping[str, Any], dtype: Any = jnp.float32) -> Params:
    """Puts the layers into a list, the experts of each into arrays [experts, in, out], and cuts kv_b_proj into W_UK and W_UV.

    Args:
      weights: arrays by the names of a file of DeepseekV3ForCausalLM; layers behind the last one (MTP) are left out.
      dtype: of all but the router, which stays fp32.
    """

    def convert(name: str) -> jax.Array:
        return jnp.asarray(weights[name], jnp.float32 if ".mlp.gate." in name else dtype)

    layers = []
    for i in range(config.num_hidden_layers):
        start = f"model.layers.{i}."
        layer = {
            name.removeprefix(start): convert(name) for name in weights if name.startswith(start) and ".experts." not in name
        }
        up = layer.pop("self_attn.kv_b_proj.weight").reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        layer["W_UK"], layer["W_UV"] = jnp.split(up, [config.qk_nope_head_dim], axis=1)  # [heads, 128, 512] each
        if i >= config.first_k_dense_replace:
            for part in ("gate_proj", "up_proj", "down_proj"):
                names = [f"{start}mlp.experts.{e}.{part}.weight" for e in range(config.n_routed_experts)]
                layer[f"mlp.experts.{part}"] = jnp.stack([convert(name).T for name in names])
        layers.append(layer)
    embedding = convert("model.embed_tokens.weight")
    head = convert("lm_head.weight") if "lm_head.weight" in weights else embedding
    return {"embed_tokens": embedding, "layers": layers, "norm": convert("model.norm.weight"), "lm_head": head}


def load(folder: Path, dtype: Any = jnp.float32) -> tuple[Config, Params]:
    """Reads config.json and every *.safetensors of a folder."""
    from safetensors.flax import load_file  # JAX alone, in spite of its name

    weights: dict[str, jax.Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(str(path))
    config = Config.from_json(folder / "config.json")
    return config, arrange(config, weights, dtype)


# The model.  b requests, s tokens of each, h heads.


def rms_norm(weight: jax.Array, x: jax.Array, eps: float = 1e-6) -> jax.Array:
    wide = x.astype(jnp.float32)
    return weight * (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + eps)).astype(x.dtype)


def linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    y = x @ layer[f"{name}.weight"].T
    return y + layer[f"{name}.bias"] if f"{name}.bias" in layer else y


def rope_angles(config: Config, positions: jax.Array) -> Rope:
    """Cosine and sine fp32 [b, s, d / 2] of the angles by which each pair is turned at positions [b, s]."""
    frequency, magnitude = rope_frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def rotate(x: jax.Array, rope: Rope, interleaved: bool = True) -> jax.Array:
    """RoPE of x [b, s, ..., d] on neighbouring pairs, as DeepSeek's attention has it, or on column i and column i + d / 2."""
    cos, sin = (angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), -1) for angle in rope)
    wide = x.astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return (jnp.stack(turned, -1).reshape(x.shape) if interleaved else jnp.concatenate(turned, -1)).astype(x.dtype)


def compress_query(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """What queries are made of: [b, s, q_lora_rank], or x itself in a model that does not compress them."""
    if config.q_lora_rank is None:
        return x
    return rms_norm(layer["self_attn.q_a_layernorm.weight"], linear(layer, "self_attn.q_a_proj", x))


def project(config: Config, layer: Params, x: jax.Array, rope: Rope) -> tuple[jax.Array, ...]:
    """Queries [b, s, h, 128] and [b, s, h, 64], and what is cached of a token: latent [b, s, 512] and RoPE key [b, s, 64]."""
    name = "self_attn.q_proj" if config.q_lora_rank is None else "self_attn.q_b_proj"
    q = linear(layer, name, compress_query(config, layer, x))
    q_nope, q_rope = jnp.split(q.reshape(*q.shape[:2], config.num_attention_heads, -1), [config.qk_nope_head_dim], -1)
    latent, k_rope = jnp.split(linear(layer, "self_attn.kv_a_proj_with_mqa", x), [config.kv_lora_rank], -1)
    latent = rms_norm(layer["self_attn.kv_a_layernorm.weight"], latent)
    return q_nope, rotate(q_rope, rope), latent, rotate(k_rope, rope)


def absorb(layer: Params, q_nope: jax.Array, q_rope: jax.Array) -> jax.Array:
    """Queries [b, s, h, 576] for latents: q . (W_UK c) = (W_UK^T q) . c, so that no latent goes to every head."""
    return jnp.concatenate([jnp.einsum("bshd,hdc->bshc", q_nope, layer["W_UK"]), q_rope], -1)


def expand(layer: Params, out: jax.Array) -> jax.Array:
    """Values [b, s, h, v_head_dim] of attended latents [b, s, h, 512], in the dtype of the weights."""
    return jnp.einsum("bshc,hdc->bshd", out.astype(layer["W_UV"].dtype), layer["W_UV"])


def mlp(layer: Params, name: str, x: jax.Array) -> jax.Array:
    gated = jax.nn.silu(linear(layer, f"{name}.gate_proj", x)) * linear(layer, f"{name}.up_proj", x)
    return linear(layer, f"{name}.down_proj", gated)


def route(config: Config, layer: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts int32 [n, k] of tokens x [n, hidden] and their weights fp32 [n, k]: the best k of the best groups.

    A group counts as much as its two best experts.  The bias decides who is chosen, and not with what weight.
    """
    scores = jax.nn.sigmoid(x.astype(jnp.float32) @ layer["mlp.gate.weight"].T)
    biased = (scores + layer["mlp.gate.e_score_correction_bias"]).reshape(len(x), config.n_group, -1)
    _, groups = lax.top_k(lax.top_k(biased, 2)[0].sum(-1), config.topk_group)
    allowed = (groups[..., None] == jnp.arange(config.n_group)).any(1)
    _, experts = lax.top_k(jnp.where(allowed[..., None], biased, -jnp.inf).reshape(scores.shape), config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, 1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * config.routed_scaling_factor


def mixture(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Routed and shared experts of tokens x [n, hidden].  Rows are sorted by expert, so that each expert is one product."""
    experts, weights = route(config, layer, x)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=config.n_routed_experts).astype(jnp.int32)
    rows = x[order // config.num_experts_per_tok]
    gated = jax.nn.silu(lax.ragged_dot(rows, layer["mlp.experts.gate_proj"], sizes))
    gated = gated * lax.ragged_dot(rows, layer["mlp.experts.up_proj"], sizes)
    rows = lax.ragged_dot(gated, layer["mlp.experts.down_proj"], sizes)
    rows = rows[jnp.argsort(order)].reshape(*experts.shape, -1)
    return jnp.einsum("nkd,nk->nd", rows, weights.astype(x.dtype)) + mlp(layer, "mlp.shared_experts", x)


# Of layer i, its weights, x [b, s, hidden] and the angles of its positions: values [b, s, h, v_head_dim].
Attend = Callable[[int, Params, jax.Array, Rope], jax.Array]


def forward(config: Config, params: Params, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
    """Last hidden states [b, s, hidden] of tokens [b, s] at positions [b, s]."""
    x = params["embed_tokens"][tokens]
    rope = rope_angles(config, positions)
    for i, layer in enumerate(params["layers"]):
        normed = rms_norm(layer["input_layernorm.weight"], x, config.rms_norm_eps)
        heads = attend(i, layer, normed, rope).astype(x.dtype)
        x = x + linear(layer, "self_attn.o_proj", heads.reshape(*heads.shape[:2], -1))
        normed = rms_norm(layer["post_attention_layernorm.weight"], x, config.rms_norm_eps)
        if i < config.first_k_dense_replace:
            x = x + mlp(layer, "mlp", normed)
        else:
            x = x + mixture(config, layer, normed.reshape(-1, normed.shape[-1])).reshape(x.shape)
    return rms_norm(params["norm"], x, config.rms_norm_eps)


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    return (hidden @ params["lm_head"].T).astype(jnp.float32)


# Attention: plain for prompts, absorbed over the cache for what follows.


def new_caches(config: Config, pages: int, page_size: int = 64, cache_format: str = "bf16") -> Caches:
    """Empty caches, one of each layer, in `bf16`, `fp16` or `v32_fp8`."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    token = {"bf16": (width, jnp.bfloat16), "fp16": (width, jnp.float16), "v32_fp8": (656, jnp.uint8)}[cache_format]
    return tuple(jnp.zeros((pages, page_size, 1, token[0]), token[1]) for _ in range(config.num_hidden_layers))


def write(
    config: Config, cache: jax.Array, block_table: jax.Array, positions: jax.Array, latent: jax.Array, k_rope: jax.Array
) -> jax.Array:
    """The cache with latent and RoPE key of tokens at positions [b, s]; those below 0 or behind the table are skipped."""
    slots = mla_jax.token_slots(block_table, positions, cache.shape[1]).reshape(-1)
    latent, k_rope = (part.reshape(-1, part.shape[-1]) for part in (latent, k_rope))
    return mla_jax.append(cache, latent, k_rope, slots, implementation=config.implementation)


def prefill(
    config: Config, params: Params, caches: Caches, block_table: jax.Array, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Caches]:
    """Hidden states [b, s, hidden] of prompts [b, s], padded on the right to a common s, and the caches that hold them."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    held = jnp.where(positions < lengths[:, None], positions, -1)
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    written = list(caches)

    def attend(i: int, layer: Params, x: jax.Array, rope: Rope) -> jax.Array:
        q_nope, q_rope, latent, k_rope = project(config, layer, x, rope)
        written[i] = write(config, caches[i], block_table, held, latent, k_rope)
        keys = jnp.einsum("btc,hdc->bthd", latent, layer["W_UK"])
        values = jnp.einsum("btc,hdc->bthd", latent, layer["W_UV"])
        scores = jnp.einsum("bshd,bthd->bhst", q_nope, keys) + jnp.einsum("bshd,btd->bhst", q_rope, k_rope)
        scores = jnp.where(causal, scores.astype(jnp.float32) * config.softmax_scale, -jnp.inf)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(values.dtype), values)

    hidden = forward(config, params, tokens, positions, attend)
    return hidden, tuple(written)


def attend_cache(
    config: Config,
    cache: jax.Array,
    block_table: jax.Array,
    lengths: jax.Array,
    q: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Stores s new tokens behind `lengths` [b] cached ones and attends to all: latents [b, s, h, 512], and the cache."""
    s = q.shape[1]
    cache = write(config, cache, block_table, lengths[:, None] + jnp.arange(s), latent, k_rope)
    out, _ = mla_jax.decode(
        q.astype(jnp.bfloat16 if cache.dtype == jnp.uint8 else cache.dtype),
        cache,
        block_table,
        lengths + s,
        softmax_scale=config.softmax_scale,
        causal=True,
        implementation=config.implementation,
    )
    return out, cache


def decode(
    config: Config, params: Params, caches: Caches, block_table: jax.Array, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Caches]:
    """Hidden states [b, s, hidden] of tokens [b, s] that follow `lengths` [b] cached ones, and the caches that hold both.

    Of a row whose length is -n the first n tokens are padding; where that is all of them, the row is free.
    """
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])
    written = list(caches)

    def attend(i: int, layer: Params, x: jax.Array, rope: Rope) -> jax.Array:
        q_nope, q_rope, latent, k_rope = project(config, layer, x, rope)
        q = absorb(layer, q_nope, q_rope)
        out, written[i] = attend_cache(config, caches[i], block_table, lengths, q, latent, k_rope)
        return expand(layer, out)

    hidden = forward(config, params, tokens, positions, attend)
    return hidden, tuple(written)


# Generation: greedy, ragged, on the device.


class State(NamedTuple):
    """Requests under way.  All of it is donated from step to step.

    Attributes:
      caches: hold all tokens but the last one of each request, and rejected drafts behind them, which nothing reads.
      block_table: int32 [b, max_pages], the pages of each request.
      tokens: int32 [b, max_pages * page_size], prompt and what was generated; zeros follow.
      lengths: int32 [b], how many tokens there are.
      limits: int32 [b]; a request ends when its length is here.  Steps with k drafts need pages for `limits + k` tokens.
    """

    caches: Caches
    block_table: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array


def accept(state: State, caches: Caches, guesses: jax.Array, greedy: jax.Array, eos: Any) -> State:
    """Takes the tokens that the model has chosen: after k guesses [b, k] that came true, greedy [b, k + 1] is right so far."""
    agreed = jnp.cumprod(guesses == greedy[:, :-1], axis=1).sum(1)
    ended = jnp.cumsum(greedy == eos, axis=1) > 0
    count = jnp.minimum(1 + agreed, 1 + jnp.where(ended.any(1), ended.argmax(1), greedy.shape[1]))
    count = jnp.minimum(count, state.limits - state.lengths)
    place = jnp.arange(greedy.shape[1])
    # Out of range, and so dropped.
    column = jnp.where(place < count[:, None], state.lengths[:, None] + place, state.tokens.shape[1])
    tokens = state.tokens.at[jnp.arange(len(greedy))[:, None], column].set(greedy, mode="drop")
    lengths = state.lengths + count
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)[:, 0]
    limits = jnp.where((count > 0) & (last == eos), lengths, state.limits)
    return State(caches, state.block_table, tokens, lengths, limits)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def start(config: Config, params: Params, state: State, prompts: jax.Array, eos: Any = -1) -> State:
    """Reads prompts int32 [b, s], padded on the right, `state.lengths` of each, and adds the first token to them."""
    hidden, caches = prefill(config, params, state.caches, state.block_table, prompts, state.lengths)
    last = jnp.take_along_axis(hidden, state.lengths[:, None, None] - 1, 1)
    state = state._replace(tokens=state.tokens.at[:, : prompts.shape[1]].set(prompts))
    none = jnp.zeros((len(prompts), 0), jnp.int32)
    return accept(state, caches, none, logits(params, last).argmax(-1).astype(jnp.int32), eos)


def propose(state: State, drafts: int) -> jax.Array:
    """Guesses int32 [b, drafts] without a second model: what followed the last token where it stood before."""
    place = jnp.arange(state.tokens.shape[1])
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, 1)
    before = (state.tokens == last) & (place < state.lengths[:, None] - 1)
    found = jnp.where(before, place, -1).max(1)
    return jnp.take_along_axis(state.tokens, found[:, None] + 1 + jnp.arange(drafts), 1, mode="clip")


def step(config: Config, params: Params, state: State, drafts: int, eos: Any) -> State:
    """One pass over the weights: 1 to 1 + drafts tokens of each request, those that one at a time would have given."""
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, 1)
    guesses = propose(state, drafts)
    tokens = jnp.concatenate([last, guesses], 1)
    hidden, caches = decode(config, params, state.caches, state.block_table, tokens, state.lengths - 1)
    return accept(state, caches, guesses, logits(params, hidden).argmax(-1).astype(jnp.int32), eos)


@functools.partial(jax.jit, static_argnames=("config", "drafts"), donate_argnames="state")
def generate(
    config: Config, params: Params, state: State, steps: jax.Array, drafts: int = 0, eos: Any = -1
) -> tuple[State, jax.Array]:
    """Steps until all requests have ended, at most `steps` (a number on the device): the state, and how many there were."""

    def going(carry: tuple[State, jax.Array]) -> jax.Array:
        state, done = carry
        return (done < steps) & (state.lengths < state.limits).any()

    def body(carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, done = carry
        return step(config, params, state, drafts, eos), done + 1

    return lax.while_loop(going, body, (state, jnp.int32(0)))


def new_state(
    config: Config,
    prompts: list[list[int]],
    new_tokens: int,
    drafts: int = 0,
    *,
    page_size: int = 64,
    cache_format: str = "bf16",
    pad_to: int = 32,
) -> tuple[State, jax.Array]:
    """Empty caches with pages for all that the requests may come to, and the prompts as an array [b, s].

    `start` compiles for each s, a multiple of pad_to, and no step does.  Pages are handed out in turn, as they come.
    """
    if not prompts or not all(prompts):
        raise ValueError("prompts: expected one or more, each of at least one token")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = -(-lengths.max() // pad_to) * pad_to
    counts = -(-(lengths + new_tokens + drafts) // page_size)
    table = np.full((len(prompts), max(counts.max(), -(-padded // page_size))), -1, np.int32)
    numbers = iter(range(counts.sum()))
    for column in range(table.shape[1]):
        for row in range(len(prompts)):
            if column < counts[row]:
                table[row, column] = next(numbers)
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    room = jnp.zeros((len(prompts), table.shape[1] * page_size), jnp.int32)
    caches = new_caches(config, int(counts.sum()), page_size, cache_format)
    return State(caches, jnp.asarray(table), room, jnp.asarray(lengths), jnp.asarray(lengths + new_tokens)), jnp.asarray(tokens)


def run(config: Config, params: Params, prompts: list[list[int]], options: argparse.Namespace, drafts: int) -> list[list[int]]:
    """Generates, and says how it goes; the tokens of each request."""
    state, padded = new_state(config, prompts, options.new_tokens, drafts, cache_format=options.cache_format)
    began = time.perf_counter()
    state = start(config, params, state, padded, options.eos)
    state, _ = generate(config, params, state, jnp.int32(0), drafts, options.eos)  # no step: compiles
    before = int(state.lengths.sum())
    print(f"  {int((state.lengths > 0).sum())} prompts read, all compiled: {time.perf_counter() - began:.1f} s", flush=True)
    began, passes = time.perf_counter(), 0
    while True:
        state, done = generate(config, params, state, jnp.int32(options.report_every), drafts, options.eos)
        if int(done) == 0:
            break
        passes += int(done)
        new, seconds = int(state.lengths.sum()) - before, time.perf_counter() - began
        print(f"  {passes:5} steps {new:6} tokens {new / seconds:9.1f} tokens/s", flush=True)
    rows, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder with config.json and *.safetensors; a small random model without")
    parser.add_argument("--prompt", action="append", help="token ids, 1,2,3; repeat it for a batch (random ones without)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=2, help="guesses of a speculative step")
    parser.add_argument("--cache-format", choices=("bf16", "fp16", "v32_fp8"), default="bf16")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights; bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--eos", type=int, default=-1, help="token that ends a request")
    parser.add_argument("--report-every", type=int, default=16, help="steps")
    options = parser.parse_args()
    dtype = options.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    if options.model:
        config, params = load(options.model, dtype)
    else:
        config = Config()
        params = arrange(config, random_weights(config), dtype)
    size = sum(x.size for x in jax.tree.leaves(params))
    print(f"{size / 1e6:.1f} million weights, {dtype}, on {jax.devices()[0].device_kind}; cache {options.cache_format}")
    rng = np.random.default_rng(0)
    given = [[int(token) for token in prompt.split(",")] for prompt in options.prompt or ()]
    prompts = given or [rng.integers(2, config.vocab_size, n).tolist() for n in (5, 17, 30)]
    print("One token a step:")
    plain = run(config, params, prompts, options, 0)
    print(f"Up to {1 + options.drafts} tokens a step:")
    speculative = run(config, params, prompts, options, options.drafts)
    for i, (prompt, row) in enumerate(zip(prompts, plain, strict=True)):
        print(f"request {i}, {len(prompt)} + {len(row) - len(prompt)} tokens: {row[len(prompt) :]}")
    same = plain == speculative
    print("Both ways gave the same tokens." if same else "The two ways differ where rounding decides between two tokens.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
