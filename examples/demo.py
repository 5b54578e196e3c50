"""One decode step of DeepSeek-V3, V3.2 and V4 (MODEL1) shape in PyTorch and JAX, compared with fp64.  Run by `make demo`.

On a CPU the step runs twice in each framework: through the reference, which serves CPU users, and through the real kernels
in Triton's interpreter.  Where a CUDA device is, it runs there too, compiled, and nothing is interpreted.
"""

import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

for name in ("torch", "jax"):
    if importlib.util.find_spec(name) is None:
        sys.exit(f"the demo shows both frameworks, and {name} is missing: pip install 'mla-decode[torch,jax]'")

import numpy as np
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import mla_jax
import mla_torch

HEADS, PAGE_SIZE = 128, 64
COSINE_LIMITS = {"bf16": 5e-6, "v32_fp8": 1e-5, "model1_fp8": 1e-5}  # fp8 values are rounded to bf16 before the products


def torch_step(q, kv_cache, block_table, cache_seqlens):
    """q [b, 1, 128, 576], kv_cache [pages, 64, 1, 576]; block_table [b, max_pages] and cache_seqlens [b] are int32."""
    return mla_torch.decode(q, kv_cache, block_table, cache_seqlens)


@jax.jit
def jax_step(q, kv_cache, indices):
    """q [b, 1, 128, 576], kv_cache uint8 [pages, 64, 1, 656], as quantize_cache(..., "v32_fp8") gives it;
    indices int32 [b, 1, topk] are slots page * 64 + offset, -1 where there is none."""
    return mla_jax.decode(q, kv_cache, indices=indices)


@dataclass(frozen=True)
class Step:
    """A decode call as numpy arrays; `caches` are unquantised and become `cache_format` in each framework."""

    title: str
    cache_format: str
    q: np.ndarray
    caches: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]

    def arguments(self, array: Callable[[np.ndarray], Any], quantize: Callable) -> dict[str, Any]:
        caches = {name: array(cache) for name, cache in self.caches.items()}
        sizes = {}
        if self.cache_format != "bf16":
            caches = {name: quantize(cache, self.cache_format) for name, cache in caches.items()}
        if any(cache.ndim == 2 for cache in caches.values()):
            pair = [self.caches[name].shape[1] if name in caches else None for name in ("kv_cache", "extra_kv_cache")]
            sizes = {"page_size": tuple(pair)}
        return {"q": array(self.q), **caches, **{name: array(x) for name, x in self.arrays.items()}, **sizes}


def pick(rng: np.random.Generator, slots: int, shape: tuple[int, int, int], holes: int) -> np.ndarray:
    """Distinct slots per query, the last `holes` of them -1."""
    rows = [rng.permutation(slots)[: shape[2]] for _ in range(shape[0] * shape[1])]
    indices = np.stack(rows).reshape(shape).astype(np.int32)
    indices[..., shape[2] - holes :] = -1
    return indices


def make_steps() -> list[Step]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    lengths = np.array([1, 140, 577, 1000], np.int32)
    pages = -(-lengths // PAGE_SIZE)
    table = np.full((len(lengths), pages.max()), -1, np.int32)
    order = rng.permutation(pages.sum())
    for row, (first, count) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[row, :count] = order[first : first + count]

    dense = Step(
        f"DeepSeek-V3, dense bf16, lengths {lengths.tolist()}",
        "bf16",
        normal(len(lengths), 1, HEADS, 576),
        {"kv_cache": normal(pages.sum(), PAGE_SIZE, 1, 576)},
        {"block_table": table, "cache_seqlens": lengths},
    )
    v32 = Step(
        "DeepSeek-V3.2, sparse fp8, topk 512",
        "v32_fp8",
        normal(2, 1, HEADS, 576),
        {"kv_cache": normal(16, PAGE_SIZE, 1, 576)},
        {"indices": pick(rng, 16 * PAGE_SIZE, (2, 1, 512), holes=12)},
    )
    model1 = Step(
        "DeepSeek-V4 (MODEL1), sparse fp8, window 128 + 512 extra, sink",
        "model1_fp8",
        normal(2, 1, HEADS, 512),
        {"kv_cache": normal(4, PAGE_SIZE, 1, 512), "extra_kv_cache": normal(512, 2, 1, 512)},
        {
            "indices": pick(rng, 4 * PAGE_SIZE, (2, 1, 128), holes=0),
            "topk_length": np.array([128, 77], np.int32),
            "extra_indices": pick(rng, 1024, (2, 1, 512), holes=30),
            "attn_sink": normal(HEADS),
        },
    )
    return [dense, v32, model1]


def to_torch(device: str) -> Callable[[np.ndarray], torch.Tensor]:
    def array(x: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(x).to(device)
        return tensor.bfloat16() if x.ndim == 4 else tensor

    return array


def to_jax(device: Any) -> Callable[[np.ndarray], jax.Array]:
    return lambda x: jax.device_put(jnp.asarray(x, jnp.bfloat16) if x.ndim == 4 else jnp.asarray(x), device)


def timed(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> tuple[Any, float]:
    """The result and the least seconds of `repeats` calls after a first one, or of the first one where repeats is 0."""
    start = time.perf_counter()
    result = wait(call())
    seconds = [time.perf_counter() - start]
    for _ in range(repeats):
        start = time.perf_counter()
        wait(call())
        seconds.append(time.perf_counter() - start)
    return result, min(seconds[1:] or seconds)


def run_torch(step: Step, device: str, implementation: str, repeats: int) -> tuple[np.ndarray, np.ndarray, float]:
    arguments = step.arguments(to_torch(device), mla_torch.quantize_cache)

    def wait(result: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    (out, lse), seconds = timed(lambda: mla_torch.decode(**arguments, implementation=implementation), wait, repeats)
    return out.float().cpu().numpy(), lse.cpu().numpy(), seconds


def run_jax(step: Step, device: Any, implementation: str, repeats: int) -> tuple[np.ndarray, np.ndarray, float]:
    with jax.default_device(device):
        arguments = step.arguments(to_jax(device), mla_jax.quantize_cache)
        sizes = {"page_size": arguments.pop("page_size")} if "page_size" in arguments else {}
        decode = jax.jit(lambda arrays: mla_jax.decode(**arrays, **sizes, implementation=implementation))
        (out, lse), seconds = timed(lambda: decode(arguments), jax.block_until_ready, repeats)
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse), seconds


def report(step: Step, runs: list[tuple[str, Callable, Any, str, int]]) -> bool:
    judge = step.arguments(to_torch("cpu"), mla_torch.quantize_cache)
    want_out, want_lse = (x.numpy() for x in mla_torch.decode_reference(**judge, dtype=torch.float64))
    limit = COSINE_LIMITS[step.cache_format]
    print(f"\n{step.title}")
    print(f"  {'':34}{'max |out - fp64|':>18}{'cosine diff':>13}{'max |lse - fp64|':>18}{'ms':>10}")
    good = True
    kernels = []
    for label, run, device, implementation, repeats in runs:
        out, lse, seconds = run(step, device, implementation, repeats)
        error = np.abs(out - want_out).max()
        cosine = 1 - 2 * np.sum(out * want_out) / np.sum(out.astype(np.float64) ** 2 + want_out**2)
        lse_error = np.abs(lse - want_lse).max()
        agrees = cosine <= limit and lse_error <= 1e-5 + 2e-4 * np.abs(want_lse).max()
        good &= bool(agrees)
        verdict = "" if agrees else "   DISAGREES"
        print(f"  {label:34}{error:18.2e}{cosine:13.1e}{lse_error:18.2e}{1e3 * seconds:10.2f}{verdict}")
        if implementation == "triton":
            kernels.append((out, lse))
    if len(kernels) == 2:
        equal = all(np.array_equal(a, b) for a, b in zip(*kernels, strict=True))
        good &= equal
        print(f"  the kernels' results in PyTorch and JAX are {'bitwise equal' if equal else 'NOT bitwise equal'}")
    return good


def show_code(dense: Step, sparse: Step) -> None:
    """Prints the functions above, and what they return."""
    print("\nIn your code:\n\nimport mla_torch, mla_jax\n")
    torch_call = dense.arguments(to_torch("cuda" if GPU else "cpu"), mla_torch.quantize_cache)
    jax_call = sparse.arguments(to_jax(jax.devices()[0]), mla_jax.quantize_cache)
    for function, arguments in ((torch_step, torch_call), (jax_step, jax_call)):
        out, lse = function(**arguments)
        print(inspect.getsource(function))
        print(f"# out {list(out.shape)} {out.dtype}, lse {list(lse.shape)} {lse.dtype}\n")


def main() -> int:
    start = time.perf_counter()
    cpu = jax.devices("cpu")[0]
    runs: list[tuple[str, Callable, Any, str, int]] = [
        ("PyTorch, CPU, reference", run_torch, "cpu", "reference", 3),
        ("JAX, CPU, reference", run_jax, cpu, "reference", 3),
    ]
    if GPU:
        runs.append((f"PyTorch, {torch.cuda.get_device_name()[:20]}, triton", run_torch, "cuda", "triton", 20))
        if jax.default_backend() == "gpu":
            runs.append((f"JAX, {jax.devices()[0].device_kind[:24]}, triton", run_jax, jax.devices()[0], "triton", 20))
        else:
            print("JAX sees no GPU here: install jax[cuda13] to run it there")
    else:
        print("No GPU here: the kernels run in Triton's interpreter, so their times say nothing about their speed.")
        runs.append(("PyTorch, kernels interpreted", run_torch, "cpu", "triton", 0))
        runs.append(("JAX, kernels interpreted", run_jax, cpu, "triton", 0))
    print(f"{HEADS} heads, pages of {PAGE_SIZE}, std 1; ms is the best call as seen by the host")
    good = True
    steps = make_steps()
    for step in steps:
        good &= report(step, runs)
    show_code(steps[0], steps[1])
    print(f"{'All results agree with fp64' if good else 'SOME RESULTS DISAGREE'}; {time.perf_counter() - start:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
