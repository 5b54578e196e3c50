"""The contestants: `mla_torch`, `mla_jax` and FlashMLA behind one interface, and the check that they agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .data import CaseData
from .flash_mla_provider import FlashMLA
from .timing import Sampler, Unrolled, eager_sampler, estimate_seconds, graph_sampler

# Between two kernels that round P and the output to bf16 at different points of different sums.
MAX_COSINE_DIFFERENCE = 1e-4
MAX_LSE_DIFFERENCE = 2e-2

Results = tuple[torch.Tensor, torch.Tensor]


class TorchContestant:
    """One case's calls of a function of PyTorch tensors."""

    def __init__(self, provider: str, implementation: str, data: CaseData, decode: Callable[..., Results]):
        self.provider = provider
        self.implementation = implementation
        self._copies = data.copies
        self._calls = [data.call(i) for i in range(data.copies)]
        self._decode = decode
        self.seconds = estimate_seconds(self.call, self._copies)

    @property
    def label(self) -> str:
        return f"{self.provider}:{self.implementation}"

    def call(self, i: int) -> Results:
        return self._decode(**self._calls[i % self._copies])

    def results(self) -> list[Results]:
        return [self.call(i) for i in range(self._copies)]

    def graph_sampler(self) -> Sampler:
        return graph_sampler(self.call, self._copies, self.seconds)

    def eager_sampler(self) -> Sampler | None:
        return eager_sampler(self.call, self._copies, self.seconds)


class JaxContestant:
    """One case's calls of `mla_jax.decode`, on the memory of the PyTorch tensors."""

    provider = "mla_jax"

    def __init__(self, implementation: str | None, data: CaseData, seconds: float):
        import jax

        import mla_jax

        if data.shared["q"].is_cuda:
            torch.cuda.synchronize()

        def array(x: torch.Tensor) -> Any:
            return jax.dlpack.from_dlpack(x)

        tensors = {**data.shared, **data.pages}
        shared = {name: array(x) for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        options = {name: x for name, x in tensors.items() if not isinstance(x, torch.Tensor)}
        if data.pages:
            case = data.case
            options["cache_format"] = case.format
            options["page_size"] = (case.page_size, case.extra_page_size) if case.extra_topk else case.page_size
        if implementation is not None:
            options["implementation"] = implementation
        rotated = [{name: array(x) for name, x in call.items()} for call in data.rotated]
        self.implementation = mla_jax.explain(**shared, **rotated[0], **options).implementation
        self._sampler, self._results = Unrolled(mla_jax.decode, shared, rotated, options).sampler(seconds)

    @property
    def label(self) -> str:
        return f"{self.provider}:{self.implementation}"

    def results(self) -> list[Results]:
        return [(torch.from_dlpack(out), torch.from_dlpack(lse)) for out, lse in self._results]

    def graph_sampler(self) -> Sampler:
        self._results = []
        return self._sampler

    def eager_sampler(self) -> Sampler | None:
        return None


Contestant = TorchContestant | JaxContestant


def override_label(overrides: dict[str, int]) -> str:
    return "[" + ",".join(f"{name}={value}" for name, value in overrides.items()) + "]"


def register_overrides(base: str, overrides: dict[str, int]) -> str:
    """Makes a variant of an implementation of `mla_torch` whose plan has some fields replaced.

    Returns:
      The variant's name, for `implementation=`.

    Raises:
      ValueError: `base` is unknown or plans nothing.
    """
    from mla_torch.api import IMPLEMENTATIONS

    entry = IMPLEMENTATIONS.get(base)
    if entry is None or entry.plan is None:
        planned = [name for name, known in IMPLEMENTATIONS.items() if known.plan is not None]
        raise ValueError(f"override: expected --implementation to be one of {', '.join(planned)}, got {base!r}")
    name = base + override_label(overrides)
    plan = partial(entry.plan, overrides=dict(overrides))
    IMPLEMENTATIONS[name] = replace(entry, plan=plan, automatic=lambda facts: False)
    return name


def torch_contestant(data: CaseData, implementation: str | None) -> TorchContestant:
    """`mla_torch.decode` with this implementation; None: the one that it chooses."""
    import mla_torch

    options = {} if implementation is None else {"implementation": implementation}
    name = mla_torch.explain(**data.call(0), **options).implementation
    return TorchContestant("mla_torch", name, data, partial(mla_torch.decode, **options))


def flash_mla_contestant(data: CaseData, flash_mla: FlashMLA) -> TorchContestant:
    return TorchContestant("flash_mla", flash_mla.version, data, flash_mla.decode)


def cosine_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """`1 - 2 <x, y> / (<x, x> + <y, y>)` in fp64; NaN where there is one in the arguments."""
    x, y = x.double().flatten(), y.double().flatten()
    squares = torch.dot(x, x) + torch.dot(y, y)
    return float(1 - 2 * torch.dot(x, y) / squares) if squares != 0 else 0.0


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    width = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.contiguous().view(width), y.contiguous().view(width))


def disagreements(contestants: Sequence[Contestant], reference: Contestant) -> list[str]:
    """How the results on the timed inputs differ from those of `reference`, in sentences.

    `mla_jax` must give the bits of `mla_torch` with the same implementation; all others must be close.
    """
    found = []
    expected = reference.results()
    for contestant in contestants:
        if contestant is reference:
            continue
        exact = contestant.provider == "mla_jax" and contestant.implementation == reference.implementation
        for i, ((out, lse), (out0, lse0)) in enumerate(zip(contestant.results(), expected, strict=True)):
            what = f"{contestant.label} and {reference.label} on copy {i}"
            if exact:
                for name, x, y in (("out", out, out0), ("lse", lse, lse0)):
                    if not same_bits(x, y):
                        found.append(f"{what}: {name} differs in bits")
                continue
            cosine = cosine_difference(out, out0)
            shift = float((lse.double() - lse0.double()).abs().max()) if lse.shape == lse0.shape else float("nan")
            if not (cosine <= MAX_COSINE_DIFFERENCE and shift <= MAX_LSE_DIFFERENCE):
                found.append(f"{what}: cosine difference of out {cosine:.2e}, largest difference of lse {shift:.2e}")
    return found
