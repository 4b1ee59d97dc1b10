"""The prepared call of `attention`: how its signature is made, and how it is described the first time."""

from __future__ import annotations

from saccade.engine.calls import gradient_needed
from saccade.engine.kinds import check_kinds
from saccade.engine.prepare import Prepared, metadata, prepare, remembered, traced
from saccade.engine.problem import replayed
from saccade.exact.backends import BACKENDS
from saccade.exact.problem import describe_attention, must_broadcast


def prepare_attention(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, packed, backend
) -> Prepared | None:
    """The prepared call of `attention`, or of `attention_qkvpacked` if `packed`; None where the tensors must be broadcast
    first."""
    needs_grad = gradient_needed(query, key, value, attn_mask)
    signature = None
    if not traced():
        try:
            signature = (
                "attention", type(query), query.shape, query.stride(), query.dtype, query.device,
                type(key), key.shape, key.stride(), key.dtype, key.device,
                type(value), value.shape, value.stride(), value.dtype, value.device,
                None if attn_mask is None else metadata(attn_mask), None if lengths is None else metadata(lengths),
                dropout_p, type(dropout_p), is_causal, scale, type(scale), enable_gqa, return_lse, packed, needs_grad, backend, replayed(query),
            )  # fmt: skip
            found = remembered(signature)
            if found is not None:
                return found
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # describe_attention says what is wrong
            signature = None
    check_kinds(query=query, key=key, value=value, attn_mask=attn_mask, lengths=lengths)
    if must_broadcast(query, key, value, enable_gqa):
        return None
    arguments = (
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, packed, needs_grad,
    )  # fmt: skip
    return prepare(signature, describe_attention, arguments, BACKENDS, backend)
