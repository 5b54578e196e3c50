"""The calls that `tools/sanitize.sh` watches: small, but each with keys behind a page's end and a last block half full."""

from __future__ import annotations

import racecheck_control
import torch

import mla_torch

PAGE_SIZE = 64
PAGES = 12
CALLS = (  # implementation, cache format, indices, extra indices, heads
    ("triton", "bf16", 0, 0, 16),
    ("triton", "v32_fp8", 200, 0, 128),
    ("triton", "model1_fp8", 100, 70, 64),
    ("hopper", "bf16", 0, 0, 16),
    ("hopper", "bf16", 0, 0, 128),
    ("hopper", "v32_fp8", 200, 0, 128),
    ("hopper", "model1_fp8", 100, 70, 64),
)


def arrays(cache_format: str, topk: int, extra: int, h_q: int) -> dict[str, torch.Tensor]:
    """Arguments of a call of two requests, on the GPU; dense where `topk` is 0."""
    generator = torch.Generator().manual_seed(0)
    d_qk = 512 if cache_format == "model1_fp8" else 576

    def cache() -> torch.Tensor:
        plain = torch.randn(PAGES, PAGE_SIZE, 1, d_qk, generator=generator).to(torch.bfloat16).cuda()
        return plain if cache_format == "bf16" else mla_torch.quantize_cache(plain, cache_format)

    def slots(count: int) -> torch.Tensor:
        found = torch.randint(-1, PAGES * PAGE_SIZE, (2, 1, count), generator=generator, dtype=torch.int32)
        found[:, :, 0] = PAGES * PAGE_SIZE - 1  # the last key of the cache
        return found.cuda()

    call = {"q": torch.randn(2, 1, h_q, d_qk, generator=generator).to(torch.bfloat16).cuda(), "kv_cache": cache()}
    if topk:
        call["indices"] = slots(topk)
        call["topk_length"] = torch.tensor([topk, topk // 3], dtype=torch.int32, device="cuda")
    else:
        # Requests own their pages from the last one on.
        pages = torch.arange(PAGES - 1, -1, -1, dtype=torch.int32, device="cuda")
        call["block_table"] = pages.view(2, PAGES // 2)
        call["cache_seqlens"] = torch.tensor([PAGES // 2 * PAGE_SIZE, 65], dtype=torch.int32, device="cuda")
    if extra:
        call["extra_kv_cache"] = cache()
        call["extra_indices"] = slots(extra)
        call["attn_sink"] = torch.randn(h_q, generator=generator).cuda()
    return call


def main() -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        if not racecheck_control.run():
            raise SystemExit("the control of racecheck: a value was not handed over")
        print("called the control of racecheck", flush=True)
    for implementation, cache_format, topk, extra, h_q in CALLS:
        call = arrays(cache_format, topk, extra, h_q)
        if implementation == "hopper" and mla_torch.explain(**call).implementation != "hopper":
            print("not called: hopper, which serves no such GPU", flush=True)
            continue
        for num_splits in (1, 3, None):  # whole, split, and with a schedule made on the device
            out, lse = mla_torch.decode(**call, num_splits=num_splits, implementation=implementation)
            torch.cuda.synchronize()
            if not bool(torch.isfinite(out).all() and torch.isfinite(lse).all()):
                raise SystemExit(f"{implementation}, {cache_format}, num_splits={num_splits}: a result is not finite")
            print(f"called {implementation} {cache_format} h_q={h_q} num_splits={num_splits}", flush=True)


if __name__ == "__main__":
    main()
