"""Executes a plan with jax-triton: one `triton_call` per launch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from mla_kernels.cache_plan import CachePlan
from mla_kernels.launch import Plan, TileDescriptor

from . import jax_triton_compat


def run(plan: Plan, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Traces the launches of `plan`.

    Args:
      plan: of an implementation whose kernels are compiled, not interpreted.
      arrays: the arrays of the call by the names that the plan's launches use.

    Returns:
      `(out, lse)` as the plan's buffers of these names describe them.
    """
    live = run_launches(plan, arrays)
    return live["out"], live["lse"]


def run_launches(plan: Plan | CachePlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Traces the launches of `plan`; returns all arrays, by name, as they are afterwards.

    What a launch updates in place shares its buffer with what it becomes: XLA copies an array before that if, and only if,
    somebody still needs what it was.
    """
    live = dict(arrays)
    for launch in plan.launches:
        outputs = [plan.buffers[name] if name in plan.buffers else live[name] for name in launch.outputs]
        with jax.named_scope(launch.name):
            results = jax_triton_compat.triton_call(
                launch.kernel,
                [(live[x.array], x) if isinstance(x, TileDescriptor) else live[x] for x in launch.inputs],
                launch.scalars,
                [jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs],
                launch.constexprs,
                grid=launch.grid,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                compute_capability=plan.facts.compute_capability,
                aliases=launch.aliases,
                name=launch.name,
            )
        live.update(zip(launch.outputs, results, strict=True))
    return live


# Stands for the kernels on every platform but CUDA.  It can be traced, because a traced function may be lowered for CUDA
# alone; only lowering it for another platform is an error.
_elsewhere_p = Primitive("mla_decode_needs_cuda")
_elsewhere_p.multiple_results = True
_elsewhere_p.def_impl(functools.partial(xla.apply_primitive, _elsewhere_p))


@_elsewhere_p.def_abstract_eval
def _elsewhere_abstract_eval(*, results: Sequence[jax.core.ShapedArray], **_: Any) -> Sequence[jax.core.ShapedArray]:
    return results


def _elsewhere_lowering(ctx: Any, *, implementation: str, **_: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(f"implementation: {implementation!r} needs a CUDA device and got platform {platforms}")


mlir.register_lowering(_elsewhere_p, _elsewhere_lowering)


def run_elsewhere(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Traces what raises NotImplementedError when it is lowered: the plan's kernels on a platform that is not CUDA."""
    problem = plan.problem
    results = (
        jax.core.ShapedArray(problem.out_shape, jax.numpy.dtype(problem.dtype)),
        jax.core.ShapedArray(problem.lse_shape, jax.numpy.dtype("float32")),
    )
    out, lse = refuse_elsewhere(plan.implementation, results)
    return out, lse


def refuse_elsewhere(implementation: str, results: Sequence[jax.core.ShapedArray]) -> list[jax.Array]:
    """Traces arrays that can be had on CUDA alone."""
    return _elsewhere_p.bind(results=tuple(results), implementation=implementation)
