"""Attentions that tables of encoders register beside ours: none at all, to see what share of the time attention takes, and the peers
for batches without padding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from peers import fa4_packed, torch_packed
from torch import Tensor

from saccade.hardware import has_package
from saccade.integrations.transformers import register

NOTHING, VARLEN_PEER, FA4_PEER = "bench_nothing", "bench_varlen", "bench_fa4"


class _Nothing(torch.autograd.Function):
    """V as it is, `[B, T, H, D]` of `[B, H, T, D]`; its gradient goes to Q, K and V, so that the projections have theirs to compute."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient = dout[0].transpose(1, 2)
        return gradient, gradient, gradient


def _nothing(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
    return _Nothing.apply(query, key, value), None


def _packed(
    function: Callable[..., Tensor], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *,
    cu_seq_lens_q: Tensor, max_length_q: int, sliding_window: int | None = None, **kwargs: Any
) -> tuple[Tensor, None]:  # fmt: skip
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    # ModernBERT hands over one more than the keys on each side
    options = {} if sliding_window is None else {"window": (sliding_window - 1, sliding_window - 1)}
    return function(*tokens, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options).unsqueeze(0), None


def _mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """torch's mask for padded batches, as stock makes it; none for packed ones."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if attention_mask is None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](attention_mask=attention_mask, **kwargs)


def register_all() -> None:
    """Make "saccade" and the names above known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    register()
    packed = {VARLEN_PEER: torch_packed, FA4_PEER: fa4_packed}
    for name, function in {NOTHING: _nothing, **{name: functools.partial(_packed, f) for name, f in packed.items()}}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _mask)


def peer_names(device: str) -> dict[str, str]:
    """The name of each peer's rows that runs here, and of its attention."""
    if device != "cuda":
        return {}
    return {"varlen_unpadded": VARLEN_PEER} | ({"fa4_unpadded": FA4_PEER} if has_package("flash_attn") else {})
