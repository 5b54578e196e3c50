"""Timing of many calls over rotated inputs: CUDA graphs, eager loops, and calls unrolled in one jitted JAX function."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

SAMPLE_SECONDS = 0.012
JAX_SAMPLE_SECONDS = 0.032
JAX_REPETITIONS = 4
JAX_FIRST_REPETITIONS = 2
MAX_GRAPH_CALLS = 256
MAX_UNROLLED_CALLS = 64

# Microseconds a call.
Sampler = Callable[[], float]


def calls_per_sample(seconds: float, copies: int, target: float, most: int) -> tuple[int, int]:
    """(calls in a graph, repetitions of it) that last about `target` seconds when one call takes `seconds`.

    A graph holds whole rounds of the copies: at least one, and otherwise at most `most` calls.
    """
    wanted = max(1, round(target / max(seconds, 1e-7)))
    rounds = max(1, min(-(-wanted // copies), most // copies))
    calls = rounds * copies
    return calls, max(1, -(-wanted // calls))


def estimate_seconds(call: Callable[[int], Any], copies: int) -> float:
    """Seconds of one call, coarsely; the calls before it compile."""
    import torch

    for i in range(min(copies, 2)):
        call(i)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for i in range(4):
        call(i)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 4 / 1e3


def graph_sampler(call: Callable[[int], Any], copies: int, seconds: float) -> Sampler:
    """Captures calls 0, 1, ... in a CUDA graph; a sample is one or more replays."""
    import torch

    count, repetitions = calls_per_sample(seconds, copies, SAMPLE_SECONDS, MAX_GRAPH_CALLS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is cached by stream is cached for this one
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: what JAX's own threads do meanwhile is no part of the capture and must not spoil it.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(count):
            call(i)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        for _ in range(repetitions):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / (count * repetitions)

    return sample


def eager_sampler(call: Callable[[int], Any], copies: int, seconds: float) -> Sampler:
    """Issues calls one by one from Python and waits for the last: the longer of the host's and the device's time."""
    import torch

    count, repetitions = calls_per_sample(max(seconds, 20e-6), copies, SAMPLE_SECONDS, MAX_GRAPH_CALLS)

    def sample() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(count * repetitions):
            call(i)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6 / (count * repetitions)

    return sample


class Unrolled:
    """JAX calls unrolled in one jitted function.

    Every call has its own softmax scale among the arguments, all of the same value, so that no two calls are the same
    expression and none is computed once for both.
    """

    def __init__(self, decode: Callable[..., Any], shared: dict[str, Any], rotated: Sequence[dict[str, Any]], options: dict):
        self._decode = decode
        self._shared = shared
        self._rotated = list(rotated)
        self._options = options
        self._scale = np.float32(shared["q"].shape[-1] ** -0.5)

    def compile(self, rounds: int, first_values: bool = False) -> tuple[Callable[..., Any], tuple]:
        """The compiled function of `rounds` times all copies, and its arguments.

        It returns [(out, lse), ...], or the first value of each `out` alone: results that are used up on the device and that
        nobody gets, as those of the calls in a CUDA graph are.  Of every array that a function returns the host makes one.
        """
        import jax
        import jax.numpy as jnp

        def unrolled(shared: dict[str, Any], rotated: list[dict[str, Any]], scales: list[Any]) -> Any:
            results = [
                self._decode(**shared, **rotated[i % len(rotated)], softmax_scale=scale, **self._options)
                for i, scale in enumerate(scales)
            ]
            return jnp.stack([out[(0,) * out.ndim] for out, _ in results]) if first_values else results

        scales = [jnp.asarray(self._scale) for _ in range(rounds * len(self._rotated))]
        arguments = (self._shared, self._rotated, scales)
        return jax.jit(unrolled).lower(*arguments).compile(), arguments

    def sampler(self, seconds: float) -> tuple[Sampler, list[Any]]:
        """The sampler, and the results of a call of each copy."""
        import jax

        copies = len(self._rotated)
        target = JAX_SAMPLE_SECONDS / JAX_REPETITIONS
        count, repetitions = calls_per_sample(seconds, copies, target, MAX_UNROLLED_CALLS)
        repetitions *= JAX_REPETITIONS
        once, arguments = self.compile(1)
        results = jax.block_until_ready(once(*arguments))
        run, arguments = self.compile(count // copies, first_values=True)
        jax.block_until_ready(run(*arguments))

        def elapsed(executions: int) -> float:
            begin = time.perf_counter()
            for _ in range(executions):  # queued, so that all dispatches but the first are hidden where the device is busy
                last = run(*arguments)
            jax.block_until_ready(last)
            return time.perf_counter() - begin

        def sample() -> float:
            # What more executions take longer: the device waits for the first dispatch, which a graph's events do not count.
            while True:
                first = min(elapsed(JAX_FIRST_REPETITIONS) for _ in range(2))
                longer = elapsed(JAX_FIRST_REPETITIONS + repetitions) - first
                if longer > 0:  # nothing held up the shorter ones
                    return longer * 1e6 / (count * repetitions)

        return sample, results


def alternate(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, np.ndarray]:
    """Samples in turn, one of each a round, after one untimed round: microseconds [rounds] by name."""
    for sample in samplers.values():
        sample()
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            taken[name].append(sample())
    return {name: np.asarray(values) for name, values in taken.items()}
