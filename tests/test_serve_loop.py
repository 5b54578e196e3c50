"""The serving example: what its batches hold, its tokens in both frameworks, and what is compiled."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from examples import serve_loop
from examples.deepseek_config import random_weights
from examples.serve_loop import Batch, Request, Server
from tests.writer_calls import FRAMEWORKS

pytestmark = pytest.mark.usefixtures("one_thread")

ARGUMENTS = "--rows 3 --requests 7 --prompt 1 12 --new-tokens 1 10 --arrive-within 12 --page-size 4 --hidden 64 --layers 2"
ARGUMENTS += " --timed-steps 2 --report-every 5"


def successor(tokens: Any, lengths: Any) -> Any:
    return (7 * tokens + 3 * lengths + 1) % 97


def alone(request: Request, eos: int) -> list[int]:
    """What `successor` makes of a request."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.new_tokens and (len(tokens) == len(request.prompt) or tokens[-1] != eos):
        tokens.append(successor(tokens[-1], len(tokens)))
    return tokens[len(request.prompt) :]


@pytest.mark.parametrize("pages", [8, 14, 40])
@pytest.mark.parametrize("eos", [-1, 5])
def test_batches(pages: int, eos: int) -> None:
    """No page has two owners, tokens stand where they were, free rows are empty; all ends with every page free."""
    rng = np.random.default_rng(0)
    requests = [
        Request(int(arrival), rng.integers(0, 97, rng.integers(1, 20)).tolist(), int(rng.integers(1, 12)))
        for arrival in np.sort(rng.integers(0, 60, 40))
    ]
    stored = np.full((pages, 4), -1)  # the token of each slot
    held_up = []

    def step(batch: Batch) -> np.ndarray:
        held_up.append(bool(server.waiting) and None in server.rows)
        owned = [page for request in server.rows if request is not None for page in request.pages]
        assert sorted(owned + server.free) == list(range(pages))
        for row, request in enumerate(server.rows):
            table, length = batch.block_table[row], batch.lengths[row]
            if request is None:
                assert length == 0 and (table == -1).all()
                continue
            assert table[: len(request.pages)].tolist() == request.pages and (table[len(request.pages) :] == -1).all()
            stored[table[(length - 1) // 4], (length - 1) % 4] = batch.tokens[row]
            seen = stored[table[np.arange(length) // 4], np.arange(length) % 4]
            assert seen.tolist() == (request.prompt + request.generated)[:length]
        return successor(batch.tokens, batch.lengths)

    server = Server(step, rows=5, pages=pages, page_size=4, max_tokens=31, eos=eos)
    server.run(requests, report_every=10**9)
    assert [request.generated for request in requests] == [alone(request, eos) for request in requests]
    assert sorted(server.free) == list(range(pages))
    assert server.read == sum(len(request.prompt) for request in requests)
    assert server.written == sum(len(request.generated) for request in requests)
    assert any(held_up) == (pages < 40)  # there, a request waits for pages though a row is free


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, [], 3), "got 0 and 3"),
        (Request(0, [1], 0), "got 1 and 0"),
        (Request(0, [1] * 30, 4), r"request: it may come to need 9 pages, and there are 8 for a row"),
    ],
)
def test_requests_that_cannot_be_served(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server(lambda batch: batch.tokens, 2, 10, 4, 32).submit(request_)


def plain_logits_torch(config: Any, tokens: list[int]) -> np.ndarray:
    """Logits [n, vocab] without a cache, in fp32."""
    import torch

    from examples import torch_mla as mla

    params = mla.arrange(config, random_weights(config))
    given = torch.tensor([tokens])

    def attend(i: int, layer: Any, x: Any, rope: Any) -> Any:
        q_nope, q_rope, latent, k_rope = mla.project(config, layer, x, rope)
        keys, values = (torch.einsum("btc,hdc->bthd", latent, layer[name]) for name in ("W_UK", "W_UV"))
        scores = torch.einsum("bshd,bthd->bhst", q_nope, keys) + torch.einsum("bshd,btd->bhst", q_rope, k_rope)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        p = (scores * config.softmax_scale).masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("bhst,bthd->bshd", p, values)

    return mla.logits(params, mla.forward(config, params, given, torch.arange(len(tokens))[None], attend))[0].numpy()


def plain_logits_jax(config: Any, tokens: list[int]) -> np.ndarray:
    import jax

    from examples import jax_deepseek as deepseek

    params = deepseek.arrange(config, random_weights(config))
    table, lengths = np.full((1, 1), -1, np.int32), np.array([len(tokens)], np.int32)
    caches = deepseek.new_caches(config, 1)  # which nothing is written into
    padded = np.array([tokens + [0] * (24 - len(tokens))], np.int32)
    hidden, _ = jax.jit(deepseek.prefill, static_argnums=0)(config, params, caches, table, padded, lengths)
    return np.asarray(deepseek.logits(params, hidden))[0, : len(tokens)]


PLAIN_LOGITS = {"torch": plain_logits_torch, "jax": plain_logits_jax}


def parse(more: str, implementation: str | None = "reference") -> tuple[Any, Any]:
    config, options = serve_loop.parse(f"{ARGUMENTS} {more}".split())
    return dataclasses.replace(config, implementation=implementation), options


@pytest.mark.parametrize("cache_format", ["bf16", "v32_fp8"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_tokens(framework: str, cache_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is the best one, but for rounding, after all before it, by attention without a cache."""
    config, options = parse(f"--framework {framework} --device cpu --cache-format {cache_format}")
    server, _, requests = serve_loop.serve(config, options)
    printed = capsys.readouterr().out
    gaps = []
    for request in requests[:4]:
        assert len(request.generated) == request.new_tokens
        found = PLAIN_LOGITS[framework](config, request.prompt + request.generated)[len(request.prompt) - 1 : -1]
        gaps += (found.max(-1) - found[np.arange(len(found)), request.generated]).tolist()
    # Logits have a standard deviation of 1; cached values are rounded by 2**-9 or, in e4m3, 2**-4 of themselves.
    assert max(gaps) < {"bf16": 0.1, "v32_fp8": 1.0}[cache_format]
    assert len(server.free) == server.pages
    assert re.search(r"step +5: +\d of 3 rows, +\d waiting, +\d+ free pages, +\d+ tokens generated, +[\d.]+ tokens/s", printed)
    assert re.search(r"7 requests in \d+ steps and [\d.]+ s: [\d.]+ tokens/s generated, [\d.]+ tokens/s of prompts", printed)
    assert re.search(r"attention \(append and decode of all layers\): \d+% of a step of [\d.]+ ms", printed)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_one_compilation(device: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != device:
        pytest.skip(f"JAX runs on a {jax.default_backend()} here")
    compiled = []

    def note(event: str, duration: float, **more: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    config, options = parse("--framework jax", "reference" if device == "cpu" else None)
    step = serve_loop.JaxStep(config, 3, 6, 12, options)
    before = [cache.unsafe_buffer_pointer() for cache in step.caches]
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        server = Server(step, 3, 12, 4, 22)
        server.run(serve_loop.make_requests(config, options), report_every=10**9)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert server.steps > 20
    assert step.step._cache_size() == 1 and not compiled
    assert [cache.unsafe_buffer_pointer() for cache in step.caches] == before  # written in place


@pytest.mark.gpu
def test_a_graph_of_the_step() -> None:
    """The same programs without a graph give the same tokens."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    config, options = parse("--framework torch", None)
    server, step, requests = serve_loop.serve(config, options)
    assert step.device.type == "cuda" and len(server.free) == server.pages

    class Eager(serve_loop.TorchStep):
        def program(self, function: Any) -> Any:
            return torch.no_grad()(function)

    rows, max_pages = server.batch.block_table.shape
    eager = Eager(config, rows, max_pages, server.pages, options)
    again = serve_loop.make_requests(config, options)
    Server(eager, rows, server.pages, options.page_size, max_pages * options.page_size).run(again, report_every=10**9)
    assert [request.generated for request in again] == [request.generated for request in requests]
