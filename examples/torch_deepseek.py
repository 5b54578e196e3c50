"""DeepSeek-V3 and V2 of transformers, small and random, decode a ragged batch with this package.

The tokens are compared with those of transformers' own attention in fp32 on the CPU.  With an fp32 cache, which the
reference serves, they are equal.  `--cache-format` bf16, fp16 or v32_fp8 rounds what is cached: the logits move by the
amount shown, and now and then another token, or in V3 another expert, comes first, after which all that follows is
another text.  With these the kernels run on a GPU: `--device cuda --cache-format bf16`.
"""

import argparse
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from mla_torch.models import PagedCache

MODELS = {"v2": (DeepseekV2Config, DeepseekV2ForCausalLM), "v3": (DeepseekV3Config, DeepseekV3ForCausalLM)}
LENGTHS = (21, 7, 1)  # of the prompts, which are padded on the left
PAGE_SIZE = 16


def make_model(version: str, **options: Any) -> torch.nn.Module:
    """The attention of the real models (512 latent, 64 RoPE, 128 and 128 columns of a head, YaRN), all else small."""
    config, model = MODELS[version]
    torch.manual_seed(0)
    small = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "max_position_embeddings": 2560,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
        "initializer_range": 0.1,  # attention and experts then move the logits by much
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return model(config(**small | options)).eval()


def make_prompts(vocab_size: int = 256) -> dict[str, torch.Tensor]:
    """Tokens and mask, int64 [3, 21]."""
    tokens = torch.randint(1, vocab_size, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def make_cache(model: Any, max_tokens: int, cache_format: str | None = None) -> PagedCache:
    """Pages of the requests in any order, as a server's allocator would give them."""
    pages = -(-max_tokens // PAGE_SIZE)
    order = torch.randperm(len(LENGTHS) * pages, generator=torch.Generator().manual_seed(2)).reshape(len(LENGTHS), pages)
    return PagedCache(model.config, len(LENGTHS), max_tokens, page_size=PAGE_SIZE, cache_format=cache_format, block_table=order)


def greedy(model: Any, prompts: dict[str, torch.Tensor], new_tokens: int, cache: PagedCache | None = None) -> torch.Tensor:
    """Tokens int64 [b, new_tokens] of transformers' loop; with a cache, through this package."""
    model.set_attn_implementation("sdpa" if cache is None else "mla_decode")
    tokens = model.generate(**prompts, cache=cache, do_sample=False, max_new_tokens=new_tokens)
    return tokens[:, prompts["input_ids"].shape[1] :]


@torch.no_grad()
def logits_of(
    model: Any, prompts: dict[str, torch.Tensor], tokens: torch.Tensor, cache: PagedCache | None = None, step: int = 1
) -> torch.Tensor:
    """Logits [b, n, vocab] after the prompt and each of `tokens` but the last; `step` tokens at a time with a cache."""
    model.set_attn_implementation("sdpa" if cache is None else "mla_decode")
    prompt = prompts["input_ids"].shape[1]
    tokens = torch.cat([prompts["input_ids"], tokens[:, :-1]], 1)
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, tokens.shape[1] - prompt), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if cache is None:
        return model(tokens, attention_mask=mask, position_ids=positions).logits[:, prompt - 1 :]
    ends = [prompt, *range(prompt + step, tokens.shape[1], step), tokens.shape[1]]
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        new = slice(start, end)
        found.append(model(tokens[:, new], attention_mask=mask[:, :end], position_ids=positions[:, new], cache=cache).logits)
    return torch.cat(found, 1)[:, prompt - 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSeek models of transformers, decoded with mla_torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache-format", choices=["bf16", "fp16", "v32_fp8"], help="fp32 by default, exact and slow")
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args()
    prompts = make_prompts()
    for version in MODELS:
        model = make_model(version)
        expected = greedy(model, prompts, args.new_tokens)
        expected_logits = logits_of(model, prompts, expected)
        model.to(args.device)
        moved = {name: x.to(args.device) for name, x in prompts.items()}
        max_tokens = max(LENGTHS) + args.new_tokens
        tokens = greedy(model, moved, args.new_tokens, make_cache(model, max_tokens, args.cache_format)).cpu()
        cache = make_cache(model, max_tokens, args.cache_format)
        logits = logits_of(model, moved, expected.to(args.device), cache).cpu()
        error = (logits - expected_logits).square().mean().sqrt() / expected_logits.std()
        print(f"DeepSeek-{version.upper()}: {(tokens == expected).float().mean():.0%} of the tokens are equal,", end=" ")
        print(f"logits differ by {error:.1e} of their standard deviation; cached {cache.cache_seqlens.tolist()} tokens")


if __name__ == "__main__":
    main()
