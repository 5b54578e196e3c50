"""DeepSeek-V3.2 in plain JAX: an indexer picks tokens of the past, and attention is sparse over a `v32_fp8` cache.

    python examples/jax_sparse.py    # a small random model, on a CPU within a minute or two

With a top-k of the whole past the result is that of dense attention over the dequantised cache, which is shown, and so is
what a smaller top-k does.  The scorer is plain JAX and reads the keys of all tokens of the block table; the rest of the
step is this package: slots, writers, decode.  `torch_sparse.py` is the same in PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mla_jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples know one another, run by path or imported

from examples import jax_deepseek as deepseek
from examples.deepseek_config import SPARSE, Config, random_weights

# Of each layer: latents and RoPE keys, uint8 [pages, page_size, 1, 656]; keys of the indexer, bf16 [pages, page_size, 1, 128].
Caches = tuple[tuple[jax.Array, jax.Array], ...]
PAGE_SIZE = 16


def indexer(config: Config, layer: deepseek.Params, x: jax.Array, rope: deepseek.Rope) -> tuple[jax.Array, ...]:
    """Queries [b, s, heads, 128] and the weights of their heads [b, s, heads]; the key of each token [b, s, 128].

    DeepSeek turns queries and keys by a Hadamard matrix before they become fp8, which changes no score but for rounding.
    """

    def turned(y: jax.Array) -> jax.Array:
        rotary, rest = jnp.split(y, [config.qk_rope_head_dim], -1)
        return jnp.concatenate([deepseek.rotate(rotary, rope, interleaved=False), rest], -1)

    q = deepseek.linear(layer, "self_attn.indexer.wq_b", deepseek.compress_query(config, layer, x))
    q = q.reshape(*x.shape[:2], config.index_n_heads, -1)
    k = deepseek.linear(layer, "self_attn.indexer.wk", x)
    weight, bias = (layer[f"self_attn.indexer.k_norm.{part}"] for part in ("weight", "bias"))
    k = (jax.nn.standardize(k.astype(jnp.float32), epsilon=1e-6) * weight + bias).astype(x.dtype)
    head_weights = deepseek.linear(layer, "self_attn.indexer.weights_proj", x) * (q.shape[2] * q.shape[3]) ** -0.5
    return turned(q), head_weights, turned(k)


def index_scores(q: jax.Array, head_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """How much each query wants each token, fp32 [b, s, t]: relu(q . k) summed over heads by their weights.

    Args:
      q: [b, s, heads, d].
      head_weights: [b, s, heads].
      keys: [b, t, d].
    """
    scores = jax.nn.relu(jnp.einsum("bshd,btd->bsht", q.astype(jnp.float32), keys.astype(jnp.float32)))
    return jnp.einsum("bsht,bsh->bst", scores, head_weights.astype(jnp.float32))


def select(scores: jax.Array, positions: jax.Array, topk: int) -> jax.Array:
    """Positions [b, s, topk] of the tokens with the best scores [b, s, t] among those up to a query's own position [b, s].

    Where there are fewer, -1 follows.
    """
    past = jnp.arange(scores.shape[2]) <= positions[..., None]
    best, found = lax.top_k(jnp.where(past, scores, -jnp.inf), min(topk, scores.shape[2]))
    return jnp.where(best > -jnp.inf, found, -1)


def sparse(
    config: Config,
    q: jax.Array,
    index: tuple[jax.Array, ...],
    caches: tuple[jax.Array, jax.Array],
    block_table: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Latents [b, s, h, 512] of the `index_topk` tokens that the indexer picks for each query."""
    kv_cache, index_cache = caches
    page_size = kv_cache.shape[1]
    all_positions = jnp.broadcast_to(jnp.arange(block_table.shape[1] * page_size), (len(q), block_table.shape[1] * page_size))
    all_slots = mla_jax.token_slots(block_table, all_positions, page_size)
    keys = mla_jax.read(index_cache, all_slots.reshape(-1), implementation=config.implementation)
    selected = select(index_scores(*index, keys.reshape(*all_slots.shape, -1)), positions, config.index_topk)
    indices = mla_jax.token_slots(block_table, selected, page_size)
    options = {"softmax_scale": config.softmax_scale, "implementation": config.implementation}
    return mla_jax.decode(q, kv_cache, indices=indices, **options)[0]


def dense(
    config: Config,
    q: jax.Array,
    index: tuple[jax.Array, ...],
    caches: tuple[jax.Array, jax.Array],
    block_table: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """The same of all tokens, over a copy of the cache in bf16: what `sparse` is measured by."""
    kv_cache = mla_jax.dequantize_cache(caches[0], "v32_fp8").astype(jnp.bfloat16)
    options = {"softmax_scale": config.softmax_scale, "implementation": config.implementation}
    return mla_jax.decode(q, kv_cache, block_table, positions[:, -1] + 1, causal=True, **options)[0]


def new_caches(config: Config, pages: int, page_size: int = PAGE_SIZE) -> Caches:
    kv_caches = deepseek.new_caches(config, pages, page_size, "v32_fp8")
    return tuple((cache, jnp.zeros((pages, page_size, 1, config.index_head_dim), jnp.bfloat16)) for cache in kv_caches)


def decode(
    config: Config,
    params: deepseek.Params,
    caches: Caches,
    block_table: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    attention: Callable[..., jax.Array] = sparse,
) -> tuple[jax.Array, Caches]:
    """Hidden states [b, s, hidden] of tokens [b, s] that follow `lengths` [b] cached ones, and the caches that hold both.

    Of a row whose length is -n the first n tokens are padding, so that prompts of any lengths go through here at once.
    """
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])
    slots = mla_jax.token_slots(block_table, positions, caches[0][0].shape[1]).reshape(-1)
    written = list(caches)

    def attend(i: int, layer: deepseek.Params, x: jax.Array, rope: deepseek.Rope) -> jax.Array:
        q_nope, q_rope, *kv = deepseek.project(config, layer, x, rope)
        q_index, head_weights, k_index = indexer(config, layer, x, rope)
        latent, k_rope, k_index = (part.reshape(len(slots), -1) for part in (*kv, k_index))
        options = {"implementation": config.implementation}
        kv_cache = mla_jax.append(caches[i][0], latent, k_rope, slots, **options)
        written[i] = kv_cache, mla_jax.append(caches[i][1], k_index, None, slots, **options)
        q = deepseek.absorb(layer, q_nope, q_rope).astype(jnp.bfloat16)
        return deepseek.expand(layer, attention(config, q, (q_index, head_weights), written[i], block_table, positions))

    hidden = deepseek.forward(config, params, tokens, positions, attend)
    return hidden, tuple(written)


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="caches")
def step(
    config: Config,
    params: deepseek.Params,
    caches: Caches,
    block_table: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    attention: Callable[..., jax.Array] = sparse,
) -> tuple[jax.Array, Caches]:
    """Logits [b, vocab] after the last of tokens [b, s], and the caches; compiled once for each s."""
    hidden, caches = decode(config, params, caches, block_table, tokens, lengths, attention)
    return deepseek.logits(params, hidden[:, -1]), caches


def generate(
    config: Config,
    params: deepseek.Params,
    prompts: list[list[int]],
    new_tokens: int,
    given: np.ndarray | None = None,
    attention: Callable[..., jax.Array] = sparse,
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [b, new_tokens] after prompts, or those `given`, and the logits [b, new_tokens, vocab] at their places."""
    b, longest = len(prompts), max(map(len, prompts))
    pages = -(-(longest + new_tokens) // PAGE_SIZE)
    # Pages in any order, as an allocator would give them.
    block_table = np.random.default_rng(0).permutation(b * pages).astype(np.int32).reshape(b, pages)
    caches = new_caches(config, b * pages, PAGE_SIZE)
    tokens = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts], np.int32)
    lengths = np.array([len(prompt) - longest for prompt in prompts], np.int32)
    chosen, found = [], []
    for i in range(new_tokens):
        logits, caches = step(config, params, caches, block_table, tokens, lengths, attention)
        found.append(np.asarray(logits))
        lengths = lengths + np.int32(tokens.shape[1])
        tokens = found[-1].argmax(-1)[:, None].astype(np.int32) if given is None else given[:, i : i + 1]
        chosen.append(tokens)
    return np.concatenate(chosen, 1), np.stack(found, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--prompt-lengths", type=int, nargs="+", default=[50, 7, 23])
    parser.add_argument("--topk", type=int, nargs="*", default=[32, 8])
    args = parser.parse_args()
    params = deepseek.arrange(SPARSE, random_weights(SPARSE))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, SPARSE.vocab_size, n).tolist() for n in args.prompt_lengths]
    longest = max(args.prompt_lengths) + args.new_tokens
    tokens, expected = generate(SPARSE, params, prompts, args.new_tokens, attention=dense)
    print(f"{len(prompts)} requests of up to {longest} tokens, against dense attention over the dequantised cache:")
    for topk in (longest, *args.topk):
        found = generate(dataclasses.replace(SPARSE, index_topk=topk), params, prompts, args.new_tokens, tokens)[1]
        same = (found.argmax(-1) == tokens).mean()
        error = np.sqrt(np.square(found - expected).mean()) / expected.std()
        print(f"  top-{topk:<4} {same:4.0%} of the tokens are equal, logits differ by {error:.1e} of their standard deviation")


if __name__ == "__main__":
    main()
