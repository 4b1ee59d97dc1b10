"""The prepared call of `nm_sparse_attention`: how its signature is made, and how it is described the first time."""

from __future__ import annotations

from saccade.engine.calls import gradient_needed
from saccade.engine.prepare import Prepared, metadata, prepare, remembered, traced
from saccade.hardware import allows_tf32
from saccade.nm_sparse.backends import BACKENDS
from saccade.nm_sparse.problem import describe_nm_sparse


def prepare_nm_sparse(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, pattern, block_mask, lengths, return_lse, backend, dense_first,
    dense_recent,
) -> Prepared:  # fmt: skip
    """The prepared call of `nm_sparse_attention`."""
    needs_grad = gradient_needed(query, key, value, attn_mask)
    signature = None
    if not traced():
        try:
            signature = (
                "nm_sparse_attention", type(query), query.shape, query.stride(), query.dtype, query.device, query.storage_offset() * query.element_size() % 16,
                type(key), key.shape, key.stride(), key.dtype, key.device, key.storage_offset() * key.element_size() % 16,
                type(value), value.shape, value.stride(), value.dtype, value.device, value.storage_offset() * value.element_size() % 16,
                None if attn_mask is None else metadata(attn_mask), None if block_mask is None else metadata(block_mask),
                None if lengths is None else metadata(lengths),
                dropout_p, type(dropout_p), is_causal, scale, type(scale), enable_gqa, pattern, return_lse, needs_grad, backend, allows_tf32(),
                dense_first, type(dense_first), dense_recent, type(dense_recent),
            )  # fmt: skip
            found = remembered(signature)
            if found is not None:
                return found
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # describe_nm_sparse says what is wrong
            signature = None
    arguments = (
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, pattern, block_mask, lengths, return_lse, needs_grad,
        dense_first, dense_recent,
    )  # fmt: skip
    return prepare(signature, describe_nm_sparse, arguments, BACKENDS, backend)
