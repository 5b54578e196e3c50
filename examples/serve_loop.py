"""A server's loop around a step that is captured or compiled once: requests arrive and leave, and no shape changes.

    python examples/serve_loop.py --framework torch    # a tiny random model, on a CPU within a minute
    python examples/serve_loop.py --framework jax
    python examples/serve_loop.py --rows 64 --requests 256 --prompt 100 900 --new-tokens 100 400 --page-size 64 \\
        --layers 4 --heads 128 --hidden 2048           # for a GPU; --framework jax takes the same

A batch has a fixed number of rows.  A request waits until a row and pages for all it may come to are free, and gives both
back when it ends; a row without a request has length 0 and no pages.  All that changes from step to step is data: pages,
lengths and tokens.  So PyTorch replays one CUDA graph (and calls the step as it is on a CPU), and JAX runs one compiled
function that owns the donated caches.  Prompts go through the same step, a token at a time; a server would have a second
program for them.

The share of time in attention is measured apart, after all requests have ended: slots, writers and decode calls of one step,
captured or compiled alone, and the whole step, both run again and again with the pages and lengths that the fullest step
had.  CUDA graphs are timed by events, all else by the clock.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples know one another, run by path or imported

from examples.deepseek_config import SMALL, Config, random_weights


@dataclasses.dataclass
class Request:
    """A prompt and what becomes of it.

    Attributes:
      arrival: the step before which it is not there.
      new_tokens: it ends after so many, or with the token that ends a text.
      pages: of its row, while it has one.
      generated: tokens that the model has added.
    """

    arrival: int
    prompt: list[int]
    new_tokens: int
    pages: list[int] = dataclasses.field(default_factory=list)
    generated: list[int] = dataclasses.field(default_factory=list)

    def token(self, position: int) -> int:
        return self.prompt[position] if position < len(self.prompt) else self.generated[position - len(self.prompt)]


@dataclasses.dataclass
class Batch:
    """What a step is given, as numpy arrays of fixed shapes.

    Attributes:
      block_table: int32 [rows, max_pages], -1 where there is no page.
      tokens: int32 [rows], the newest token of each row.
      lengths: int32 [rows], tokens so far, the newest included; 0 in a free row.
    """

    block_table: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def empty(cls, rows: int, max_pages: int) -> Batch:
        return cls(np.full((rows, max_pages), -1, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32))

    def copy(self) -> Batch:
        return Batch(self.block_table.copy(), self.tokens.copy(), self.lengths.copy())


Step = Callable[[Batch], np.ndarray]  # to the next token of each row, int32 [rows]


class Server:
    """Rows, pages and waiting requests.

    Attributes:
      fullest: the batch with the most tokens so far.
      steps, read, written: steps run, tokens of prompts read, tokens generated.
      free: pages that no request has.
    """

    def __init__(self, step: Step, rows: int, pages: int, page_size: int, max_tokens: int, eos: int = -1):
        self.step, self.page_size, self.eos = step, page_size, eos
        self.batch = Batch.empty(rows, -(-max_tokens // page_size))
        self.rows: list[Request | None] = [None] * rows
        self.pages = pages
        self.free = list(range(pages))
        self.waiting: collections.deque[Request] = collections.deque()
        self.fullest = self.batch.copy()
        self.steps = self.read = self.written = 0

    def submit(self, request: Request) -> None:
        """Raises ValueError where a request could never be served."""
        if not request.prompt or request.new_tokens < 1:
            counts = f"{len(request.prompt)} and {request.new_tokens}"
            raise ValueError(f"request: expected at least one token of a prompt and one new token, got {counts}")
        needed, most = self.pages_of(request), min(self.pages, self.batch.block_table.shape[1])
        if needed > most:
            raise ValueError(f"request: it may come to need {needed} pages, and there are {most} for a row")
        self.waiting.append(request)

    def pages_of(self, request: Request) -> int:
        """For all but the last token, which no other follows."""
        return -(-(len(request.prompt) + request.new_tokens - 1) // self.page_size)

    def admit(self) -> None:
        """Gives free rows to those who wait, in the order in which they came."""
        for row, request in enumerate(self.rows):
            if request is None and self.waiting and self.pages_of(self.waiting[0]) <= len(self.free):
                admitted = self.waiting.popleft()
                admitted.pages = [self.free.pop() for _ in range(self.pages_of(admitted))]
                self.batch.block_table[row, : len(admitted.pages)] = admitted.pages
                self.rows[row] = admitted

    def release(self, row: int, request: Request) -> None:
        self.free += request.pages
        request.pages = []
        self.batch.block_table[row] = -1
        self.batch.lengths[row] = 0
        self.rows[row] = None

    def advance(self) -> None:
        """One step: each row that has a request goes on by one token."""
        running = [(row, request) for row, request in enumerate(self.rows) if request is not None]
        for row, request in running:
            self.batch.tokens[row] = request.token(int(self.batch.lengths[row]))
            self.batch.lengths[row] += 1
        if self.batch.lengths.sum() > self.fullest.lengths.sum():
            self.fullest = self.batch.copy()
        found = self.step(self.batch)
        self.steps += 1
        for row, request in running:
            if self.batch.lengths[row] < len(request.prompt):
                self.read += 1
                continue
            self.read += self.batch.lengths[row] == len(request.prompt)
            request.generated.append(int(found[row]))
            self.written += 1
            if len(request.generated) == request.new_tokens or request.generated[-1] == self.eos:
                self.release(row, request)

    def run(self, requests: list[Request], report_every: int) -> float:
        """Serves requests, which are sorted by arrival; says how it goes.  Returns seconds."""
        coming = collections.deque(requests)
        began, now = time.perf_counter(), 0
        while coming or self.waiting or any(self.rows):
            while coming and coming[0].arrival <= now:
                self.submit(coming.popleft())
            self.admit()
            now += 1
            if any(self.rows):
                self.advance()
                if self.steps % report_every == 0:
                    self.report(time.perf_counter() - began)
        return time.perf_counter() - began

    def report(self, seconds: float) -> None:
        used = sum(request is not None for request in self.rows)
        print(
            f"  step {self.steps:5}: {used:3} of {len(self.rows)} rows, {len(self.waiting):3} waiting, {len(self.free):5} free "
            f"pages, {self.written:6} tokens generated, {self.written / seconds:8.1f} tokens/s",
            flush=True,
        )


class TorchStep:
    """The step in PyTorch: a CUDA graph on a GPU, a plain call on a CPU."""

    def __init__(self, config: Config, rows: int, max_pages: int, pages: int, options: argparse.Namespace):
        import torch

        from examples import torch_mla as mla

        self.torch = torch
        self.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.name = torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU"
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        params = mla.arrange(config, random_weights(config), self.device, dtype)
        caches = mla.new_caches(config, pages, options.page_size, options.cache_format, self.device)
        empty = Batch.empty(rows, max_pages)
        self.inputs = {name: torch.from_numpy(x).to(self.device) for name, x in vars(empty).items()}

        def step() -> torch.Tensor:
            table, lengths = self.inputs["block_table"], self.inputs["lengths"] - 1
            hidden = mla.decode(config, params, caches, table, self.inputs["tokens"][:, None], lengths)
            return mla.logits(params, hidden[:, 0]).argmax(-1).int()

        q, latent, k_rope = (
            torch.randn((rows, 1, *shape), device=self.device, dtype=dtype)
            for shape in ((config.num_attention_heads, 576), (512,), (64,))
        )

        def attention() -> torch.Tensor:
            table, lengths = self.inputs["block_table"], self.inputs["lengths"] - 1
            return [mla.attend_cache(config, cache, table, lengths, q, latent, k_rope) for cache in caches][-1]

        self.step, self.attention = self.program(step), self.program(attention)

    def program(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The function itself on a CPU; on a GPU what replays it, with the tensors that it has left its results in."""
        if self.device.type == "cpu":
            return self.torch.no_grad()(function)
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.no_grad(), self.torch.cuda.stream(stream):
            function()  # kernels are compiled and buffers made before the capture
        self.torch.cuda.current_stream().wait_stream(stream)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.no_grad(), self.torch.cuda.graph(graph, stream=stream):
            result = function()

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def __call__(self, batch: Batch) -> np.ndarray:
        self.load(batch)
        return self.step().cpu().numpy()

    def load(self, batch: Batch) -> None:
        for name, tensor in self.inputs.items():
            tensor.copy_(self.torch.from_numpy(getattr(batch, name)))

    def seconds(self, batch: Batch, repeats: int) -> tuple[float, float]:
        """Of one step, and of the attention in it."""
        self.load(batch)
        return self.time(self.step, repeats), self.time(self.attention, repeats)

    def time(self, program: Callable[[], Any], repeats: int) -> float:
        program()
        if self.device.type == "cpu":
            began = time.perf_counter()
            for _ in range(repeats):
                program()
            return (time.perf_counter() - began) / repeats
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(repeats):
            program()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3 / repeats


class JaxStep:
    """The step in JAX: one compiled function on whatever device JAX has."""

    def __init__(self, config: Config, rows: int, max_pages: int, pages: int, options: argparse.Namespace):
        import jax
        import jax.numpy as jnp

        from examples import jax_deepseek as deepseek

        self.jax = jax
        self.name = jax.devices()[0].device_kind
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        self.params = deepseek.arrange(config, random_weights(config), dtype)
        self.caches = deepseek.new_caches(config, pages, options.page_size, options.cache_format)

        @functools.partial(jax.jit, donate_argnames="caches")
        def step(params: Any, caches: Any, block_table: Any, tokens: Any, lengths: Any) -> tuple[Any, Any]:
            hidden, caches = deepseek.decode(config, params, caches, block_table, tokens[:, None], lengths - 1)
            return deepseek.logits(params, hidden[:, 0]).argmax(-1).astype(jnp.int32), caches

        keys = jax.random.split(jax.random.key(0), 3)
        q, latent, k_rope = (
            jax.random.normal(key, (rows, 1, *shape), dtype)
            for key, shape in zip(keys, ((config.num_attention_heads, 576), (512,), (64,)), strict=True)
        )

        @functools.partial(jax.jit, donate_argnames="caches")
        def attention(params: Any, caches: Any, block_table: Any, tokens: Any, lengths: Any) -> tuple[Any, Any]:
            found = [deepseek.attend_cache(config, cache, block_table, lengths - 1, q, latent, k_rope) for cache in caches]
            return tuple(out for out, _ in found), tuple(cache for _, cache in found)

        self.step, self.attention = step, attention
        self(Batch.empty(rows, max_pages))  # compiles

    def run(self, program: Callable[..., Any], batch: Batch) -> Any:
        result, self.caches = program(self.params, self.caches, batch.block_table, batch.tokens, batch.lengths)
        return result

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray(self.run(self.step, batch))

    def seconds(self, batch: Batch, repeats: int) -> tuple[float, float]:
        """Of one step, and of the attention in it."""
        batch = Batch(*map(self.jax.device_put, vars(batch).values()))
        return self.time(self.step, batch, repeats), self.time(self.attention, batch, repeats)

    def time(self, program: Callable[..., Any], batch: Batch, repeats: int) -> float:
        self.jax.block_until_ready(self.run(program, batch))
        began = time.perf_counter()
        for _ in range(repeats):
            result = self.run(program, batch)
        self.jax.block_until_ready((result, self.caches))
        return (time.perf_counter() - began) / repeats


STEPS = {"torch": TorchStep, "jax": JaxStep}


def make_requests(config: Config, options: argparse.Namespace) -> list[Request]:
    """Random prompts, with lengths from the ranges of the options; some come together, some later."""
    rng = np.random.default_rng(options.seed)
    arrivals = np.sort(rng.integers(0, max(options.arrive_within, 1), options.requests))
    return [
        Request(
            int(arrival),
            rng.integers(2, config.vocab_size, rng.integers(options.prompt[0], options.prompt[1] + 1)).tolist(),
            int(rng.integers(options.new_tokens[0], options.new_tokens[1] + 1)),
        )
        for arrival in arrivals
    ]


def serve(config: Config, options: argparse.Namespace) -> tuple[Server, Any, list[Request]]:
    """Makes the step, serves the requests of the options and prints what it took."""
    requests = make_requests(config, options)
    max_tokens = options.prompt[1] + options.new_tokens[1]
    max_pages = -(-max_tokens // options.page_size)
    pages = options.pages or options.rows * max_pages * 3 // 4  # so that now and then pages are what a request waits for
    began = time.perf_counter()
    step = STEPS[options.framework](config, options.rows, max_pages, pages, options)
    print(
        f"{options.framework} on {step.name}; {config.num_hidden_layers} layers, {config.num_attention_heads} heads; ", end=""
    )
    print(f"{options.rows} rows, {pages} pages of {options.page_size}, {options.cache_format}; ", end="")
    print(f"ready in {time.perf_counter() - began:.1f} s", flush=True)
    server = Server(step, options.rows, pages, options.page_size, max_tokens, options.eos)
    seconds = server.run(requests, options.report_every)
    print(f"{len(requests)} requests in {server.steps} steps and {seconds:.2f} s: ", end="")
    print(f"{server.written / seconds:.1f} tokens/s generated, {server.read / seconds:.1f} tokens/s of prompts read")
    whole, attention = step.seconds(server.fullest, options.timed_steps)
    print(f"attention (append and decode of all layers): {attention / whole:.0%} of a step of {1e3 * whole:.3f} ms; ", end="")
    print(f"each timed alone, {options.timed_steps} runs with {server.fullest.lengths.sum()} tokens cached")
    return server, step, requests


def parse(arguments: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=STEPS, default="torch")
    parser.add_argument("--device", help="of PyTorch; a GPU where there is one without")
    parser.add_argument("--rows", type=int, default=4, help="requests that run at a time")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--prompt", type=int, nargs=2, default=(3, 40), help="tokens of a prompt, least and most")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(5, 24), help="tokens after it, least and most")
    parser.add_argument("--arrive-within", type=int, default=40, help="steps")
    parser.add_argument("--pages", type=int, help="of a cache; three quarters of what all rows could need without")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--cache-format", choices=("bf16", "fp16", "v32_fp8"), default="bf16")
    parser.add_argument("--layers", type=int, default=SMALL.num_hidden_layers)
    parser.add_argument("--heads", type=int, default=SMALL.num_attention_heads)
    parser.add_argument("--hidden", type=int, default=SMALL.hidden_size)
    parser.add_argument("--eos", type=int, default=-1, help="token that ends a request")
    parser.add_argument("--report-every", type=int, default=20, help="steps")
    parser.add_argument("--timed-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    sizes = {"num_hidden_layers": options.layers, "first_k_dense_replace": options.layers, "hidden_size": options.hidden}
    sizes |= {"num_attention_heads": options.heads, "intermediate_size": 2 * options.hidden}
    return dataclasses.replace(SMALL, **sizes), options


if __name__ == "__main__":
    serve(*parse())
