"""jax-triton as this package calls it: what differs between its versions, and cures for what is broken in some.

jax-triton is imported when it is first needed, because it may be missing or unable to import on a machine without GPU
support, and because importing it changes the environment.  Every cure is applied only to versions that need it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from mla_kernels.launch import TileDescriptor

_BYTES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8))

# The CUDA driver's code of the TF32 tensor-map element type (CU_TENSOR_MAP_DATA_TYPE_TFLOAT32).
_TENSOR_MAP_TF32 = 11


class RuntimeInt(int):
    """An int32 that stays a kernel argument: jax-triton makes a constant of a scalar that compares equal to 1."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuntimeInt) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((RuntimeInt, int(self)))


def version_of(distribution: str) -> tuple[int, ...]:
    """The leading numbers of an installed distribution's version, `()` where it is not installed."""
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ()
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


@contextmanager
def keep_triton_cache_dir() -> Iterator[None]:
    """Puts TRITON_CACHE_DIR back as it was: 0.3.1 sets it to "" on import, 0.4.1 deletes it."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = before


@contextmanager
def provide_tma_tf32() -> Iterator[None]:
    """Lends Triton's driver module the name TMA_TF32, which 3.6 and 3.7.0 may lack.

    jax-triton 0.4 imports it together with the whole NVIDIA backend, and goes on without that backend when it is missing.
    """
    import triton.backends.nvidia.driver as driver

    missing = not hasattr(driver, "TMA_TF32")
    if missing:
        driver.TMA_TF32 = _TENSOR_MAP_TF32
    try:
        yield
    finally:
        if missing:
            del driver.TMA_TF32


def register_dce_rule(lib: ModuleType) -> None:
    """Gives jax 0.12, which calls dead-code rules with one argument more, a rule that takes it."""
    from jax._src.interpreters import partial_eval

    rules: dict[Any, Callable[..., Any]] = partial_eval.dce_rules
    rule = rules.get(lib.triton_kernel_call_p)
    if rule is None or len(inspect.signature(rule).parameters) != 2:
        return

    def three_arguments(used_outputs: list[bool], live_inputs: list[bool], equation: Any) -> Any:
        return rule(used_outputs, equation)

    rules[lib.triton_kernel_call_p] = three_arguments


def adapt_compiler(lib: ModuleType) -> None:
    """Corrects how jax-triton 0.4.0 and 0.4.1 compile, once.

    A Gluon kernel goes through the passes of plain Triton, a warp-specialised one is launched with the warps of its default
    partition instead of all, and Triton before 3.8 does not say `is_im2col` of a tensor descriptor.
    """
    from triton.experimental.gluon._runtime import GluonJITFunction

    original = lib.TritonFunction._compile_kernel
    if getattr(original, "adapted", False):
        return

    class Backend(lib.cb.CUDABackend):  # type: ignore[name-defined]
        def __init__(self, target: Any, is_gluon: bool, options: dict[str, Any]):
            super().__init__(target)
            self.is_gluon = is_gluon
            self.launch_options = options

        def make_ttir(self, mod, metadata, opt, capability):
            return mod if self.is_gluon else super().make_ttir(mod, metadata, opt, capability)

        def make_ttgir(self, mod, metadata, opt, capability):
            if self.is_gluon:
                mod = self.gluon_to_ttgir(mod, metadata, opt, capability)
            else:
                mod = super().make_ttgir(mod, metadata, opt, capability)
            metadata["tensordesc_meta"] = [{"is_im2col": False, **meta} for meta in metadata.get("tensordesc_meta") or ()]
            return mod

        def make_llir(self, src, metadata, options, capability):
            llir = super().make_llir(src, metadata, options, capability)
            # `_compile_kernel` reads the number of warps to launch from these options after it has compiled.
            self.launch_options["num_warps"] = metadata.get("num_warps", options.num_warps)
            return llir

    @functools.wraps(original)
    def compile_kernel(self, spec, gpu_target, backend, backend_options):
        if isinstance(backend, lib.cb.CUDABackend):
            backend_options = dict(backend_options)
            backend = Backend(gpu_target, isinstance(self.fn, GluonJITFunction), backend_options)
        before = _slim.set(self.fn.__module__.split(".")[0] == "mla_kernels")
        try:
            return original(self, spec, gpu_target, backend, backend_options)
        finally:
            _slim.reset(before)

    compile_kernel.adapted = True  # type: ignore[attr-defined]
    lib.TritonFunction._compile_kernel = compile_kernel


def slim_ptx(ptx: str) -> str:
    """PTX without what only people and debuggers read: comments, and where in the sources an instruction comes from."""
    code = re.sub(r"//[^\n]*", "", ptx)
    code = re.sub(r"^\s*\.section\b[^{]*\{[^}]*\}", "", code, flags=re.MULTILINE)
    lines = [line.strip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line and not re.match(r"\.(loc|file)\s", line)) + "\n"


_slim: ContextVar[bool] = ContextVar("slim", default=False)  # whether a kernel of this package is being compiled


def slim_calls(lib: ModuleType) -> None:
    """Leaves out of compiled calls of this package's kernels what nobody runs, once.

    jaxlib finds the kernel of a call, each time that it runs it, by the whole text of the call, and takes the longer for it
    the longer that is: PTX with its comments, and the source in Triton's own representation.  Other kernels keep theirs.
    """
    library = lib.triton_kernel_call_lib
    if isinstance(library, _SlimLibrary):
        return
    lib.triton_kernel_call_lib = _SlimLibrary(library)  # type: ignore[attr-defined]


class _SlimLibrary:
    """jaxlib's library of kernel calls, but that the kernels it makes are slim where `_slim` says so."""

    def __init__(self, library: ModuleType):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return self._make_kernel if name == "TritonKernel" else getattr(self._library, name)

    def _make_kernel(
        self, name: str, num_warps: int, num_ctas: int, shared_memory: int, binary: Any, source: str, *rest: Any
    ) -> Any:
        if _slim.get() and isinstance(binary, str):
            binary, source = slim_ptx(binary), ""
        return self._library.TritonKernel(name, num_warps, num_ctas, shared_memory, binary, source, *rest)


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """jax-triton's module with its cures applied, or None and why there is none."""
    version = version_of("jax-triton")
    if not version:
        return None, "jax-triton is not installed"
    try:
        with keep_triton_cache_dir():
            if version >= (0, 4):
                with provide_tma_tf32():
                    from jax_triton import triton_lib
            else:
                from jax_triton import triton_lib
    except Exception as error:  # whatever an import of a foreign stack may raise, CPU users must be served
        return None, f"jax-triton {'.'.join(map(str, version))} does not import: {type(error).__name__}: {error}"
    if not hasattr(triton_lib.triton_kernel_call_lib, "TritonKernel"):
        return None, "jaxlib has no GPU support here: a jax-cuda plugin of jax's version is missing"
    _register_byte_call(triton_lib)
    if version >= (0, 4) and jax.__version_info__ >= (0, 12):
        register_dce_rule(triton_lib)
    if (0, 4) <= version <= (0, 4, 1):
        adapt_compiler(triton_lib)
        slim_calls(triton_lib)
    return triton_lib, ""


def available() -> bool:
    """Whether kernels can be lowered for CUDA in this process."""
    return _load()[0] is not None


def reason() -> str:
    """Why kernels cannot be lowered for CUDA, empty where they can."""
    return _load()[1]


def gluon_supported() -> bool:
    """Whether Gluon kernels can be lowered (jax-triton 0.4 and later)."""
    return available() and version_of("jax-triton") >= (0, 4)


def triton_call(
    kernel: Any,
    inputs: Sequence[jax.Array | tuple[jax.Array, TileDescriptor]],
    scalars: Sequence[int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constexprs: Mapping[str, Any],
    *,
    grid: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    compute_capability: int,
    aliases: Mapping[int, int],
    name: str,
) -> tuple[jax.Array, ...]:
    """Launches a kernel whose parameters are inputs, scalars, outputs and constexprs, in this order.

    Args:
      inputs: arrays; each becomes a pointer.  Those of float8_e4m3fn and int8 become pointers to uint8, without a copy.  An
        array (of 16-bit elements) with a `TileDescriptor` becomes a TMA descriptor of the view that it states.
      scalars: 32-bit integers; none of them is specialised on its value.
      outputs: shapes and dtypes of the results; each becomes a pointer to memory that nobody has initialised.
      compute_capability: 90 for Hopper.
      aliases: positions in `inputs` to positions in `outputs` that share one buffer.  The kernel still gets both pointers.
      name: of the call, for profiles.

    Raises:
      RuntimeError: where jax-triton is not available, or is too old for descriptors.
      ValueError: a descriptor's view does not lie within its array.
    """
    lib, why = _load()
    if lib is None:
        raise RuntimeError(f"cannot launch a Triton kernel: {why}")
    options = {"num_warps": num_warps, "num_stages": num_stages}
    # Triton's own launcher is told the same: its default and jax-triton's may differ, and the binaries must not.
    fusion = {"enable_fp_fusion": True}
    runtime = [RuntimeInt(value) for value in scalars]
    launch = {"kernel": kernel, "grid": grid, "name": name, "compute_capability": compute_capability}
    arrays = [item[0] if isinstance(item, tuple) else item for item in inputs]
    tiles = {i: item[1] for i, item in enumerate(inputs) if isinstance(item, tuple)}
    if tiles and version_of("jax-triton") < (0, 4):
        raise RuntimeError("cannot launch a Triton kernel: its TMA descriptors need jax-triton 0.4 or later")

    def call(*operands: jax.Array) -> Sequence[jax.Array]:
        arrays = [_describe(lib, x, tiles[i]) if i in tiles else x for i, x in enumerate(operands)]
        if version_of("jax-triton") < (0, 4):
            more = {"out_shape": list(outputs), "input_output_aliases": dict(aliases), **options, **fusion}
            return lib.triton_call(*arrays, *runtime, **launch, **more, **constexprs)
        if not aliases:
            more = {"out_type": list(outputs), "backend_options": fusion, **options}
            return lib.triton_call(*arrays, *runtime, **launch, **more, **constexprs)
        return _bind_aliased(lib, kernel, [*arrays, *runtime], outputs, constexprs, aliases, launch, {**options, **fusion})

    if aliases:
        arrays = _behind_barrier(arrays)
    results = _call_on_bytes(call, arrays) if any(array.dtype in _BYTES for array in arrays) else call(*arrays)
    return tuple(_behind_barrier(results) if aliases else results)


def _behind_barrier(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays, which XLA cannot see through: for those on both sides of a call that updates in place.

    On GPUs the XLA of jax 0.11 and 0.12 fuses a call with the slices that it is given and with the updates of slices that
    its results go into, as those of a `scan` do.  The fusion no longer says which buffers are shared, and what the kernel
    does not write is lost.
    """
    return jax.lax.optimization_barrier(list(arrays)) if jax.__version_info__ >= (0, 11) else list(arrays)


def _describe(lib: ModuleType, array: jax.Array, tile: TileDescriptor) -> Any:
    """jax-triton's descriptor of a view of `array`.  It states the view's own shape and strides, so nothing is reshaped."""
    rows, columns = tile.shape
    if (rows - 1) * tile.row_stride + columns > array.size:
        view = f"{list(tile.shape)} with rows {tile.row_stride} elements apart"
        raise ValueError(f"{tile.array}: a view of {view} does not lie within {array.dtype} {list(array.shape)}")
    return lib.TensorDescriptor(array, tile.shape, (tile.row_stride, 1), tile.block_shape, tile.layout)


def _bind_aliased(
    lib: ModuleType,
    kernel: Any,
    operands: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constexprs: Mapping[str, Any],
    aliases: Mapping[int, int],
    launch: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Sequence[jax.Array]:
    """A call of 0.4 whose kernel has a parameter for the input and one for the output of an aliased pair.

    `triton_call` of 0.4 wants the output's parameter left out.  The launcher behind it hands the kernel all operands and
    then all results, in order, so placeholders for every result, aliased or not, say what we want.
    """
    leaves, tree = jax.tree_util.tree_flatten(
        [lib._StaticArg(operand) if isinstance(operand, int) else operand for operand in operands]
        + [lib._OutputPlaceholder(i) for i in range(len(outputs))]
    )
    return lib.triton_kernel_call_p.bind(
        *leaves,
        fn=kernel,
        name=launch["name"],
        in_tree=tree,
        out_shapes=tuple(outputs),
        grid=launch["grid"],
        compute_capability=launch["compute_capability"],
        backend_options=lib.FrozenDict({**options, "num_ctas": 1, "debug": False}),
        input_output_aliases=lib.FrozenDict(aliases),
        zeroed_outputs=(),
        serialized_metadata=b"",
        cost_estimate=None,
        has_side_effect=False,
        metaparams=lib.FrozenDict(constexprs),
    )


# A kernel call whose operands are lowered as if they were uint8 where they are of another one-byte dtype.  XLA would copy
# an array to convert it (its bitcast-convert is a computation), and Triton refuses even a pointer to float8_e4m3fn on
# devices without native conversions.
_byte_call_p = Primitive("triton_kernel_call_on_bytes")
_byte_call_p.multiple_results = True
_byte_call_p.def_impl(functools.partial(xla.apply_primitive, _byte_call_p))


@_byte_call_p.def_abstract_eval
def _byte_call_abstract_eval(*_: Any, out_shapes: Sequence[jax.ShapeDtypeStruct], **__: Any) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(out.shape, out.dtype) for out in out_shapes]


def _as_bytes(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, "uint8" if array.dtype in _BYTES else array.dtype)


def _call_on_bytes(call: Callable[..., Any], inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    (equation,) = jax.make_jaxpr(call)(*map(_as_bytes, inputs)).eqns
    return _byte_call_p.bind(*inputs, **equation.params)


def _register_byte_call(lib: ModuleType) -> None:
    target = lib.make_cuda_target if hasattr(lib, "make_cuda_target") else lib.get_cuda_backend

    def lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
        avals = [aval.update(dtype=_as_bytes(aval).dtype) for aval in ctx.avals_in]
        return lib.triton_kernel_call_lowering(target, ctx.replace(avals_in=avals), *operands, **params)

    mlir.register_lowering(_byte_call_p, lowering, platform="cuda")
