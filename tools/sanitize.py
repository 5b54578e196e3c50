"""A few small calls for `compute-sanitizer` to watch: dense and sparse, each format, whole and split."""

from __future__ import annotations

import torch

import mla_torch


def main() -> None:
    device = "cuda"
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    lengths = torch.tensor([0, 1, 300], dtype=torch.int32, device=device)
    table = torch.randperm(24, generator=generator, device=device, dtype=torch.int32).view(3, 8)
    latents = normal(24, 64, 1, 576)
    v32 = mla_torch.quantize_cache(latents, "v32_fp8")
    model1 = mla_torch.quantize_cache(latents[..., :512].contiguous(), "model1_fp8")
    indices = torch.randint(-8, 24 * 64 + 8, (3, 2, 200), generator=generator, device=device, dtype=torch.int32)
    sink = torch.zeros(64, device=device)
    for num_splits in (None, 1, 3):
        for heads in (16, 64):
            q = normal(3, 2, heads, 576)
            mla_torch.decode(q, latents, table, lengths, causal=True, num_splits=num_splits)
            mla_torch.decode(q, v32, indices=indices, topk_length=lengths, num_splits=num_splits)
        q = normal(3, 2, 64, 512)
        mla_torch.decode(
            q, model1, indices=indices, extra_kv_cache=model1, extra_indices=indices, extra_topk_length=lengths,
            attn_sink=sink, num_splits=num_splits,
        )  # fmt: skip
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
