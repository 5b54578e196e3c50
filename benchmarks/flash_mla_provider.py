"""FlashMLA's CUDA kernels behind the arguments of `mla_torch.decode`, where its package is installed."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

MODULES = ("flash_mla", "sgl_flash_mla")


def load() -> ModuleType:
    """The installed package.

    Raises:
      ImportError: none is installed, or it does not load here.
    """
    reasons = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if hasattr(module, "flash_mla_with_kvcache"):
            return module
        reasons.append(f"{name}: has no flash_mla_with_kvcache")
    raise ImportError("; ".join(reasons))


class FlashMLA:
    """Calls FlashMLA with a fresh schedule each time: what `decode` does in one call it does in one call."""

    def __init__(self) -> None:
        self._module = load()
        parameters = inspect.signature(self._module.flash_mla_with_kvcache).parameters
        # Where the current kernels and those for Hopper are apart, this option reaches the latter.
        self._options = {"use_legacy": True} if "use_legacy" in parameters else {}

    @property
    def version(self) -> str:
        return str(getattr(self._module, "__version__", "unknown"))

    def decode(
        self,
        q: Any,
        kv_cache: Any,
        block_table: Any = None,
        cache_seqlens: Any = None,
        *,
        indices: Any = None,
        extra_kv_cache: Any = None,
        extra_indices: Any = None,
        attn_sink: Any = None,
        causal: bool = False,
    ) -> tuple[Any, Any]:
        """Arguments, out and lse as in `mla_torch.decode`."""
        schedule, _ = self._module.get_mla_metadata()
        return self._module.flash_mla_with_kvcache(
            q,
            kv_cache,
            block_table,
            cache_seqlens,
            512,
            schedule,
            causal=causal,
            is_fp8_kvcache=indices is not None,
            indices=indices,
            attn_sink=attn_sink,
            extra_k_cache=extra_kv_cache,
            extra_indices_in_kvcache=extra_indices,
            **self._options,
        )
