"""An fp64 judge of decode calls in numpy, written apart from both references, and the bounds that results must keep.

A *call* is a dict of the arguments of `decode`, arrays as numpy arrays (bf16 and e4m3 as `ml_dtypes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BYTE_TYPES = (np.dtype(np.uint8), np.dtype(np.int8), E4M3)


@dataclass(frozen=True)
class Judgement:
    """What a call must give, all fp64, and what the bounds on the error are made of."""

    out: np.ndarray  # [b, s_q, h_q, d_v]
    lse: np.ndarray  # [b, h_q, s_q]
    spread: np.ndarray  # like out: the same sum over |v|
    score_norm: np.ndarray  # like lse: scale * |q| * (largest |k| among the keys of the row), 2-norms
    quantised: bool


def to_numpy(x: Any) -> Any:
    """A torch tensor (strides kept), a JAX array or a numpy array as a numpy array; anything else as it is."""
    if isinstance(x, np.ndarray):
        return x
    if type(x).__module__.split(".")[0] == "torch" and hasattr(x, "detach"):
        import torch

        x = x.detach().cpu()
        if x.dtype is torch.bfloat16:
            return x.view(torch.int16).numpy().view(BF16)
        if x.dtype is torch.float8_e4m3fn:
            return x.view(torch.uint8).numpy().view(E4M3)
        return x.numpy()
    if hasattr(x, "__array__") and hasattr(x, "dtype"):
        return np.asarray(x)
    return x


def to_fp64(x: Any) -> np.ndarray:
    return to_numpy(x).astype(np.float64)


def _numbers(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Bytes as numbers in fp64."""
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        return np.ascontiguousarray(x).view(dtype).astype(np.float64)


def _token(cache: np.ndarray, fmt: str, page_size: int, page: int, slot: int) -> np.ndarray:
    """One token's key in fp64, [h_kv, d_qk]."""
    if fmt in ("bf16", "fp16"):
        return cache[page, slot].astype(np.float64)
    if fmt == "v32_fp8":
        row = np.ascontiguousarray(cache[page, slot, 0]).view(np.uint8)
        scales = np.repeat(_numbers(row[512:528], "<f4"), 128)
        return np.concatenate([_numbers(row[:512], E4M3) * scales, _numbers(row[528:], BF16)])[None]
    if fmt == "model1_fp8":
        # The bytes of the page in memory order; the page dimension of a strided view says where it starts.
        data = np.ascontiguousarray(cache[page]).view(np.uint8).reshape(-1)
        row = data[slot * 576 : slot * 576 + 576]
        codes = data[page_size * 576 + slot * 8 : page_size * 576 + slot * 8 + 7]
        scales = np.repeat([np.nan if code == 255 else 2.0 ** (int(code) - 127) for code in codes], 64)
        return np.concatenate([_numbers(row[:448], E4M3) * scales, _numbers(row[448:], BF16)])[None]
    raise ValueError(f"no such format: {fmt}")


def _format(cache: np.ndarray, name: str | None) -> str:
    if name is not None:
        return name
    if cache.dtype not in BYTE_TYPES:
        return "fp16" if cache.dtype == np.float16 else "bf16"
    return "v32_fp8" if cache.ndim == 4 and cache.shape[3] == 656 else "model1_fp8"


def _attended(call: dict[str, Any], request: int, query: int) -> list[np.ndarray]:
    """The keys of one query token, each [h_kv, d_qk]."""
    q = call["q"]
    sizes = call.get("page_size")
    sizes = sizes if isinstance(sizes, tuple) else (sizes, sizes)
    names = (
        ("kv_cache", "indices", "topk_length", sizes[0]),
        ("extra_kv_cache", "extra_indices", "extra_topk_length", sizes[1]),
    )
    keys = []
    for cache_name, index_name, length_name, page_size in names:
        cache = call.get(cache_name)
        if cache is None:
            continue
        fmt = _format(cache, call.get("cache_format"))
        page_size = cache.shape[1] if cache.ndim == 4 else page_size
        if call.get("indices") is not None:
            row = call[index_name][request, query]
            count = len(row)
            if call.get(length_name) is not None:
                count = min(max(int(call[length_name][request]), 0), count)
            for index in row[:count]:
                if 0 <= index < cache.shape[0] * page_size:
                    keys.append(_token(cache, fmt, page_size, int(index) // page_size, int(index) % page_size))
        else:
            table = call["block_table"][request]
            count = min(max(int(call["cache_seqlens"][request]), 0), len(table) * page_size)
            if call.get("causal"):
                count = count - q.shape[1] + query + 1
            for t in range(count):
                keys.append(_token(cache, fmt, page_size, int(table[t // page_size]), t % page_size))
    return keys


def judge(call: dict[str, Any]) -> Judgement:
    """The dense softmax of each (request, query, head), in fp64, over the keys as they are stored."""
    call = {name: to_numpy(x) for name, x in call.items()}
    q = call["q"].astype(np.float64)
    batch, s_q, h_q, d_qk = q.shape
    d_v = call.get("head_dim_v") or 512
    scale = call.get("softmax_scale")
    scale = d_qk**-0.5 if scale is None else float(scale)
    sink = call.get("attn_sink")

    out = np.zeros((batch, s_q, h_q, d_v))
    spread = np.zeros_like(out)
    lse = np.full((batch, h_q, s_q), np.inf)
    score_norm = np.zeros_like(lse)
    for i in range(batch):
        for j in range(s_q):
            keys = _attended(call, i, j)
            if not keys:
                continue
            k = np.stack(keys, 1)  # [h_kv, n, d_qk]
            norms = np.linalg.norm(k, axis=-1).max(-1)
            for h in range(h_q):
                kv_head = h // (h_q // k.shape[0])
                with np.errstate(all="ignore"):  # NaN keys
                    scores = scale * (k[kv_head] @ q[i, j, h])
                    top = scores.max()
                    p = np.exp(scores - top)
                    total = p.sum()
                    lse[i, h, j] = top + np.log(total)
                    p /= total
                    if sink is not None:
                        p /= 1 + np.exp(float(sink[h]) - lse[i, h, j])
                    out[i, j, h] = p @ k[kv_head, :, :d_v]
                    spread[i, j, h] = p @ np.abs(k[kv_head, :, :d_v])
                score_norm[i, h, j] = abs(scale) * np.linalg.norm(q[i, j, h]) * norms[kv_head]
    return Judgement(out, lse, spread, score_norm, call["kv_cache"].dtype in BYTE_TYPES)


def cosine_difference(x: np.ndarray, y: np.ndarray) -> float:
    norm = (x * x).sum() + (y * y).sum()
    return float(1 - 2 * (x * y).sum() / norm) if norm > 0 else 0.0


def _check(name: str, error: np.ndarray, bound: np.ndarray, got: np.ndarray, want: np.ndarray) -> None:
    over = ~(error <= bound)
    if over.any():
        worst = np.unravel_index(np.argmax(np.where(over, error / bound, -1)), error.shape)
        raise AssertionError(
            f"{name}{[int(i) for i in worst]} = {got[worst]!r}, expected {want[worst]!r}: off by {error[worst]:.3e}, "
            f"allowed {bound[worst]:.3e} ({int(over.sum())} of {over.size} elements are over)"
        )


def assert_close(
    out: Any,
    lse: Any,
    expected: Judgement,
    *,
    dtype: str | None = None,
    power_of_two_scales: bool = True,
    published_bounds: bool = False,
) -> None:
    """Asserts that a result agrees with the judge: the bounds of every implementation that computes in 16 bits.

    Args:
      dtype: that was computed with and rounded to; by default that of `out`.  `"bfloat16"`, `"float16"`, or, for
        references, `"float32"` and `"float64"` (which bound the error by accumulated rounding instead).
      power_of_two_scales: False for fp8 caches with other scales; a kernel that rounds value times scale to 16 bits
        moves its scores.
      published_bounds: on data of standard deviation 0.1, also the absolute bounds that published tests use.
    """
    out, lse = to_numpy(out), to_numpy(lse)
    assert out.shape == expected.out.shape, f"out has shape {out.shape}, expected {expected.out.shape}"
    assert lse.shape == expected.lse.shape, f"lse has shape {lse.shape}, expected {expected.lse.shape}"
    dtype = dtype or out.dtype.name
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    for name, got, want in (("out", out, expected.out), ("lse", lse, expected.lse)):
        for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
            wrong = np.argwhere(test(got) != test(want))
            if len(wrong):
                at = tuple(wrong[0])
                raise AssertionError(
                    f"{name}{[int(i) for i in at]} = {got[at]!r}, expected {want[at]!r}: {kind} at other places ({len(wrong)})"
                )
    no_key = np.isposinf(expected.lse).transpose(0, 2, 1)
    assert not out[no_key].any(), "out of a row without a key is not exactly 0"

    finite = np.isfinite(expected.out)
    got, want, spread = out[finite], expected.out[finite], expected.spread[finite]
    if got.size == 0:
        return
    eps, floor = {
        "bfloat16": (2.0**-8, 1e-6),
        "float16": (2.0**-11, 1e-6),
        "float32": (2.0**-18, 1e-12),
        "float64": (2.0**-44, 1e-18),
    }[dtype]
    # Scores of large magnitude carry an error of their own into fp32 and fp64 results.
    score_error = np.broadcast_to(expected.score_norm.transpose(0, 2, 1)[..., None], expected.out.shape)[finite]
    wobble = {"float32": 2.0**-20, "float64": 2.0**-49}.get(dtype, 0.0) * score_error * spread
    _check("out, finite part, ", np.abs(got - want), eps * spread + eps * np.abs(want) + floor + wobble, got, want)
    limit = 1e-5 if expected.quantised else 5e-6
    difference = cosine_difference(got, want)
    assert difference <= limit, f"out: cosine difference {difference:.3e}, allowed {limit:.0e}"

    finite = np.isfinite(expected.lse)
    got_lse, want_lse, norm = lse[finite], expected.lse[finite], expected.score_norm[finite]
    bound = 1e-6 * np.maximum(1, norm) + 8.01 / 65536 * np.abs(want_lse)
    if expected.quantised and not power_of_two_scales and dtype in ("bfloat16", "float16"):
        bound = bound + 2.0**-9 * norm / 8
    if dtype == "float64":
        bound = 1e-12 * np.maximum(1, norm)
    elif dtype == "float32":
        bound = 1e-6 * np.maximum(1, norm)
    _check("lse, finite part, ", np.abs(got_lse - want_lse), bound, got_lse, want_lse)

    if published_bounds:
        _check("out, finite part, ", np.abs(got - want), 8e-4 + 2.01 / 128 * np.abs(want), got, want)
        _check("lse, finite part, ", np.abs(got_lse - want_lse), 1e-6 + 8.01 / 65536 * np.abs(want_lse), got_lse, want_lse)
