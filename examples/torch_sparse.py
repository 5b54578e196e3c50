"""DeepSeek-V3.2 in plain PyTorch: an indexer picks tokens of the past, and attention is sparse over a `v32_fp8` cache.

    python examples/torch_sparse.py                 # a small random model, on a CPU within a minute
    python examples/torch_sparse.py --device cuda

With a top-k of the whole past the result is that of dense attention over the dequantised cache, which is shown, and so is
what a smaller top-k does.  The scorer is plain PyTorch and reads the keys of all tokens of the block table; the rest of the
step is this package: slots, writers, decode.  `jax_sparse.py` is the same in JAX.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import mla_torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples know one another, run by path or imported

from examples import torch_mla as mla
from examples.deepseek_config import SPARSE, Config, random_weights

# Of each layer: latents and RoPE keys, uint8 [pages, page_size, 1, 656]; keys of the indexer, bf16 [pages, page_size, 1, 128].
Caches = tuple[tuple[torch.Tensor, torch.Tensor], ...]
PAGE_SIZE = 16


def indexer(config: Config, layer: mla.Params, x: torch.Tensor, rope: mla.Rope) -> tuple[torch.Tensor, ...]:
    """Queries [b, s, heads, 128] and the weights of their heads [b, s, heads]; the key of each token [b, s, 128].

    DeepSeek turns queries and keys by a Hadamard matrix before they become fp8, which changes no score but for rounding.
    """

    def turned(y: torch.Tensor) -> torch.Tensor:
        rotary, rest = y.tensor_split([config.qk_rope_head_dim], -1)
        return torch.cat([mla.rotate(rotary, rope, interleaved=False), rest], -1)

    q = mla.linear(layer, "self_attn.indexer.wq_b", mla.compress_query(config, layer, x))
    k = mla.linear(layer, "self_attn.indexer.wk", x)
    norm = [layer[f"self_attn.indexer.k_norm.{part}"] for part in ("weight", "bias")]
    k = torch.nn.functional.layer_norm(k, k.shape[-1:], *norm, eps=1e-6)
    head_weights = mla.linear(layer, "self_attn.indexer.weights_proj", x) * (config.index_n_heads * q.shape[-1]) ** -0.5
    return turned(q.unflatten(-1, (config.index_n_heads, -1))), head_weights, turned(k)


def index_scores(q: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """How much each query wants each token, fp32 [b, s, t]: relu(q . k) summed over heads by their weights.

    Args:
      q: [b, s, heads, d].
      head_weights: [b, s, heads].
      keys: [b, t, d].
    """
    scores = torch.einsum("bshd,btd->bsht", q.float(), keys.float()).relu()
    return torch.einsum("bsht,bsh->bst", scores, head_weights.float())


def select(scores: torch.Tensor, positions: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions [b, s, topk] of the tokens with the best scores [b, s, t] among those up to a query's own position [b, s].

    Where there are fewer, -1 follows.
    """
    past = torch.arange(scores.shape[2], device=scores.device) <= positions[..., None]
    best, found = scores.masked_fill(~past, -torch.inf).topk(min(topk, scores.shape[2]))
    return found.masked_fill(best == -torch.inf, -1)


def sparse(
    config: Config,
    q: torch.Tensor,
    index: tuple[torch.Tensor, ...],
    caches: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Latents [b, s, h, 512] of the `index_topk` tokens that the indexer picks for each query."""
    kv_cache, index_cache = caches
    page_size = kv_cache.shape[1]
    all_positions = torch.arange(block_table.shape[1] * page_size, device=q.device).expand(len(q), -1)
    all_slots = mla_torch.token_slots(block_table, all_positions, page_size)
    keys = mla_torch.read(index_cache, all_slots.flatten(), implementation=config.implementation)
    selected = select(index_scores(*index, keys.unflatten(0, all_slots.shape)), positions, config.index_topk)
    indices = mla_torch.token_slots(block_table, selected, page_size)
    options = {"softmax_scale": config.softmax_scale, "implementation": config.implementation}
    return mla_torch.decode(q, kv_cache, indices=indices, **options)[0]


def dense(
    config: Config,
    q: torch.Tensor,
    index: tuple[torch.Tensor, ...],
    caches: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The same of all tokens, over a copy of the cache in bf16: what `sparse` is measured by."""
    kv_cache = mla_torch.dequantize_cache(caches[0], "v32_fp8").to(torch.bfloat16)
    options = {"softmax_scale": config.softmax_scale, "implementation": config.implementation}
    return mla_torch.decode(q, kv_cache, block_table, positions[:, -1] + 1, causal=True, **options)[0]


def new_caches(config: Config, pages: int, page_size: int = PAGE_SIZE, device: str = "cpu") -> Caches:
    kv_caches = mla.new_caches(config, pages, page_size, "v32_fp8", device)
    shape = (pages, page_size, 1, config.index_head_dim)
    return tuple((cache, torch.zeros(shape, dtype=torch.bfloat16, device=device)) for cache in kv_caches)


def decode(
    config: Config,
    params: mla.Params,
    caches: Caches,
    block_table: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    attention: Callable[..., torch.Tensor] = sparse,
) -> torch.Tensor:
    """Hidden states [b, s, hidden] of tokens [b, s] that follow `lengths` [b] cached ones; they are cached, too.

    Of a row whose length is -n the first n tokens are padding, so that prompts of any lengths go through here at once.
    """
    positions = mla.following(lengths, tokens.shape[1])
    slots = mla_torch.token_slots(block_table, positions, caches[0][0].shape[1]).flatten()

    def attend(i: int, layer: mla.Params, x: torch.Tensor, rope: mla.Rope) -> torch.Tensor:
        kv_cache, index_cache = caches[i]
        q_nope, q_rope, latent, k_rope = mla.project(config, layer, x, rope)
        q_index, head_weights, k_index = indexer(config, layer, x, rope)
        options = {"implementation": config.implementation}
        mla_torch.append(kv_cache, latent.flatten(0, 1), k_rope.flatten(0, 1), slots, **options)
        mla_torch.append(index_cache, k_index.flatten(0, 1), None, slots, **options)
        q = mla.absorb(layer, q_nope, q_rope).to(torch.bfloat16)
        return mla.expand(layer, attention(config, q, (q_index, head_weights), caches[i], block_table, positions))

    return mla.forward(config, params, tokens, positions, attend)


@torch.no_grad()
def generate(
    config: Config,
    params: mla.Params,
    prompts: list[list[int]],
    new_tokens: int,
    given: torch.Tensor | None = None,
    attention: Callable[..., torch.Tensor] = sparse,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [b, new_tokens] after prompts, or those `given`, and the logits [b, new_tokens, vocab] at their places."""
    device = params["norm"].device
    b, longest = len(prompts), max(map(len, prompts))
    pages = -(-(longest + new_tokens) // PAGE_SIZE)
    # Pages in any order, as an allocator would give them.
    order = torch.randperm(b * pages, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    block_table = order.reshape(b, pages).to(device)
    caches = new_caches(config, b * pages, PAGE_SIZE, device)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) - longest for prompt in prompts], dtype=torch.int32, device=device)
    chosen, found = [], []
    for i in range(new_tokens):
        hidden = decode(config, params, caches, block_table, tokens, lengths, attention)
        found.append(mla.logits(params, hidden[:, -1]))
        lengths = lengths + tokens.shape[1]
        tokens = found[-1].argmax(-1, keepdim=True) if given is None else given[:, i : i + 1]
        chosen.append(tokens)
    return torch.cat(chosen, 1), torch.stack(found, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--prompt-lengths", type=int, nargs="+", default=[50, 7, 23])
    parser.add_argument("--topk", type=int, nargs="*", default=[32, 8])
    args = parser.parse_args()
    params = mla.arrange(SPARSE, random_weights(SPARSE), args.device)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, SPARSE.vocab_size, (n,), generator=generator).tolist() for n in args.prompt_lengths]
    longest = max(args.prompt_lengths) + args.new_tokens
    tokens, expected = generate(SPARSE, params, prompts, args.new_tokens, attention=dense)
    print(f"{len(prompts)} requests of up to {longest} tokens, against dense attention over the dequantised cache:")
    for topk in (longest, *args.topk):
        found = generate(dataclasses.replace(SPARSE, index_topk=topk), params, prompts, args.new_tokens, tokens)[1]
        same = (found.argmax(-1) == tokens).float().mean()
        error = (found - expected).square().mean().sqrt() / expected.std()
        print(f"  top-{topk:<4} {same:4.0%} of the tokens are equal, logits differ by {error:.1e} of their standard deviation")


if __name__ == "__main__":
    main()
