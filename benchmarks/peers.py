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

Window = tuple[int, int] | None
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


def fa4_packed(
    query: Tensor, key: Tensor, value: Tensor, offsets_q: Tensor, offsets_k: Tensor, max_q: int, max_k: int, window: Window = None
) -> Tensor:
    """FlashAttention-4 on packed sequences, `[T, H, D]`. window: (left, right)."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    options = {} if window is None else {"window_size": window}
    out = flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, max_seqlen_q=max_q, max_seqlen_k=max_k, **options
    )
    return out[0] if isinstance(out, tuple) else out


def torch_packed(*call, window: Window = None) -> Tensor:
    """torch's function for packed sequences, with the arguments of `fa4_packed`."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*call, **({} if window is None else {"window_size": window}))
