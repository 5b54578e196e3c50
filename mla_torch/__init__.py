"""MLA decode for PyTorch: one attention step over a paged latent KV cache, dense or sparse, 16-bit or quantised."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("mla_torch needs PyTorch: pip install 'mla-decode[torch]'") from None

from .api import decode, explain
from .cache import dequantize_cache, quantize_cache
from .cache_ops import append, copy_pages, read
from .reference import decode_reference
from .slots import token_slots

__all__ = [
    "append",
    "copy_pages",
    "decode",
    "decode_reference",
    "dequantize_cache",
    "explain",
    "quantize_cache",
    "read",
    "token_slots",
]
