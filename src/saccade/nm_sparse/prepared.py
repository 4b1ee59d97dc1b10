"""The prepared call of `nm_sparse_attention`: how it is found, and how it is described the first time."""

from __future__ import annotations

from saccade.engine.calls import gradient_needed
from saccade.engine.prepare import Prepared, finder, prepare
from saccade.hardware import allows_tf32
from saccade.nm_sparse.args import NMSparseCall
from saccade.nm_sparse.backends import BACKENDS
from saccade.nm_sparse.problem import describe_nm_sparse

_find = finder("nm_sparse_attention", NMSparseCall)


def prepare_nm_sparse(call: tuple) -> Prepared:
    """The prepared call of `nm_sparse_attention`. call: in the order of `NMSparseCall`."""
    needs_grad = gradient_needed(*call[:4])
    signed, found = _find(call, needs_grad, allows_tf32())
    if found is not None:
        return found
    *given, dense_first, dense_recent, return_lse, backend = call
    return prepare(signed, describe_nm_sparse, (*given, return_lse, needs_grad, dense_first, dense_recent), BACKENDS, backend)
