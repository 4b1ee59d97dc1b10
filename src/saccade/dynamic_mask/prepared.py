"""The prepared call of `dynamic_mask_attention`: how its signature is made, and how it is described the first time."""

from __future__ import annotations

from saccade.dynamic_mask.backends import BACKENDS
from saccade.dynamic_mask.problem import describe_dynamic_mask
from saccade.engine.calls import gradient_needed
from saccade.engine.prepare import Prepared, metadata, prepare, remembered, traced


def prepare_dynamic_mask(
    query, key, value, key_scores, keep, is_causal, lengths, document_ids, add_scores, scale, enable_gqa, backend, sinks, window
) -> Prepared:
    """The prepared call of `dynamic_mask_attention`."""
    needs_grad = gradient_needed(query, key, value, key_scores)
    signature = None
    if not traced():
        try:
            signature = (
                "dynamic_mask_attention", type(query), query.shape, query.stride(), query.dtype, query.device,
                type(key), key.shape, key.stride(), key.dtype, key.device, type(value), value.shape, value.stride(), value.dtype, value.device,
                type(key_scores), key_scores.shape, key_scores.stride(), key_scores.dtype, key_scores.device,
                None if lengths is None else metadata(lengths), None if document_ids is None else metadata(document_ids),
                keep, type(keep), is_causal, add_scores, scale, type(scale), enable_gqa, needs_grad, backend,
                sinks, type(sinks), window, type(window),
            )  # fmt: skip
            found = remembered(signature)
            if found is not None:
                return found
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # describe_dynamic_mask says what is wrong
            signature = None
    arguments = (
        query, key, value, key_scores, keep, is_causal, lengths, document_ids, add_scores, scale, enable_gqa, needs_grad,
        sinks, window,
    )  # fmt: skip
    return prepare(signature, describe_dynamic_mask, arguments, BACKENDS, backend)
