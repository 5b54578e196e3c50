"""MLA decode for JAX: `decode` over a paged latent KV cache, helpers to make caches, and a plain reference."""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("mla_jax needs JAX: install mla-decode[jax]") from error

from .api import decode, explain
from .cache import dequantize_cache, quantize_cache
from .cache_ops import append, copy_pages, read
from .device import device_facts
from .reference import decode_reference
from .slots import token_slots

__all__ = [
    "append",
    "copy_pages",
    "decode",
    "decode_reference",
    "dequantize_cache",
    "device_facts",
    "explain",
    "quantize_cache",
    "read",
    "token_slots",
]
