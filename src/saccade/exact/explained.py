"""The public function `explain`: which backend computes a call of `attention`, and why."""

from __future__ import annotations

from torch import Tensor

from saccade.engine.calls import autocast, gradient_needed
from saccade.engine.dispatch import explain as _explain
from saccade.engine.kinds import check_kinds
from saccade.exact.backends import BACKENDS
from saccade.exact.causal_bias import checked_unbiased, is_causal_bias
from saccade.exact.problem import broadcast, describe_attention, must_broadcast, with_key_mask


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
) -> str:
    """Say which backend and configuration `attention` would use for these arguments, and why it would not use each of the
    others.

    Only metadata of the tensors is read, and nothing is computed.

    Args:
        query: as in `attention`, but a plain tensor, such as the local one of a DTensor.
        key: as in `attention`.
        value: as in `attention`.
        attn_mask: as in `attention`.
        dropout_p: as in `attention`.
        is_causal: as in `attention`.
        scale: as in `attention`.
        enable_gqa: as in `attention`.
        lengths: as in `attention`.
        window: as in `attention`.
        key_mask: as in `attention`.
        return_lse: as in `attention`.

    Returns:
        the call in one line, then a line for each backend in the order in which `auto` tries them; an arrow marks the one that runs.

    Raises:
        InvalidArgument: as `attention`; or a nested tensor or DTensor.
    """
    if key_mask is not None:
        attn_mask, key_mask = with_key_mask(query, key, value, attn_mask, key_mask, is_causal, enable_gqa, window)
    if is_causal_bias(attn_mask):
        attn_mask, is_causal = checked_unbiased(attn_mask, is_causal, query, key)
    check_kinds(query=query, key=key, value=value, attn_mask=attn_mask, lengths=lengths)
    query, key, value = autocast(query, key, value)
    if must_broadcast(query, key, value, enable_gqa):
        query, key, value = broadcast(query, key, value, enable_gqa)
    needs_grad = gradient_needed(query, key, value, attn_mask)
    problem = describe_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        lengths,
        return_lse,
        False,
        needs_grad,
        window,
        key_mask,
    )
    return _explain(BACKENDS, problem)
