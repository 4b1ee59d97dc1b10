"""The peers, one function each: torch's SDPA backends forced one at a time, and FlashAttention-4 where it is installed.

A peer takes query, key, value as `[B, H, T, D]` and returns the output; if it raises, it is skipped and its reason is printed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.hardware import has_package

SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def _forced(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, **options)


def _fa4(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    from flash_attn.cute.interface import flash_attn_func

    # its own layout is [B, T, H, D]: the transposes are views
    out = flash_attn_func(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=is_causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def peers(with_fa4: bool = True) -> dict[str, Callable[..., Tensor]]:
    """Name -> call."""
    found: dict[str, Callable[..., Tensor]] = {name: functools.partial(_forced, backend) for name, backend in SDPA.items()}
    if with_fa4 and has_package("flash_attn"):
        found["fa4"] = _fa4
    return found
