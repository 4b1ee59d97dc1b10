"""torch's causal biases, `torch.nn.attention.bias.causal_upper_left` and `causal_lower_right`, as the arguments that mean the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.engine.arguments import check_flag
from saccade.errors import InvalidArgument


def is_causal_bias(mask: Any) -> bool:
    """Whether this is one of torch's causal biases. They are tensors that never hold a value."""
    # recognised by its module name: importing the module takes 1.5 s
    return mask is not None and type(mask) is not Tensor and type(mask).__module__ == "torch.nn.attention.bias"


def unbiased(bias: Any, device: torch.device) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) of the same meaning; a mask is formed if the diagonal ends at the last key and the lengths differ."""
    if bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv:
        return None, True
    visible = torch.ones(bias.seq_len_q, bias.seq_len_kv, dtype=torch.bool, device=device)
    return visible.tril(bias.seq_len_kv - bias.seq_len_q), False


def checked_unbiased(bias: Any, is_causal: Any, query: Any, key: Any) -> tuple[Tensor | None, bool]:
    """`unbiased` of a call, whose arguments are checked.

    Raises:
        InvalidArgument: the bias has other lengths than the call, or `is_causal` is given too.
    """
    sizes = bias.seq_len_q, bias.seq_len_kv
    for name, tensor, size in (("query", query, sizes[0]), ("key", key, sizes[1])):
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.is_nested or tensor.dim() < 2 or tensor.shape[-2] != size:
            given = "nested" if tensor.is_nested else f"of shape {list(tensor.shape)}"
            raise InvalidArgument(
                f"attn_mask is a causal bias of {sizes[0]} queries and {sizes[1]} keys, {name} is {given}; they must agree"
            )
    if check_flag("is_causal", is_causal):
        raise InvalidArgument("attn_mask is a causal bias and is_causal is True; give one of them")
    return unbiased(bias, query.device)
