"""The table of operations, over which `saccade info`, `explain`, `verify` and the benchmarks loop."""

from __future__ import annotations

from saccade.dynamic_mask.backends import BACKENDS as DYNAMIC_MASK_BACKENDS
from saccade.dynamic_mask.backends import DECODING
from saccade.dynamic_mask.problem import describe_dynamic_mask
from saccade.dynamic_mask.testing.cases import DYNAMIC_MASK
from saccade.dynamic_mask.testing.check import check_dynamic_mask
from saccade.engine.backend import Backend
from saccade.engine.operation import Operation
from saccade.exact.backends import BACKENDS as ATTENTION_BACKENDS
from saccade.exact.problem import describe_attention
from saccade.exact.testing.cases import ATTENTION
from saccade.exact.testing.check import check_attention
from saccade.exact.testing.varlen_cases import VARLEN
from saccade.exact.testing.varlen_check import check_varlen
from saccade.exact.varlen.backends import BACKENDS as VARLEN_BACKENDS
from saccade.exact.varlen.problem import describe_as_packed
from saccade.nm_sparse.backends import BACKENDS as NM_SPARSE_BACKENDS
from saccade.nm_sparse.problem import describe_nm_sparse
from saccade.nm_sparse.testing.cases import NM_SPARSE
from saccade.nm_sparse.testing.check import check_nm_sparse

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("attention", ATTENTION_BACKENDS, describe_attention, ATTENTION, check_attention, ("short", "shared_bias", "volta", "auto", "tensor_parallel", "models", "pooled")),
        Operation("attention_varlen", VARLEN_BACKENDS, describe_as_packed, VARLEN, check_varlen, ("short_ragged", "encoders", "windows")),
        Operation(
            "dynamic_mask_attention", DYNAMIC_MASK_BACKENDS, describe_dynamic_mask, DYNAMIC_MASK, check_dynamic_mask,
            ("dynamic_mask", "context_parallel"), DECODING, {"keep": 16, "is_causal": True},
        ),
        Operation("nm_sparse_attention", NM_SPARSE_BACKENDS, describe_nm_sparse, NM_SPARSE, check_nm_sparse, ("nm_",)),
    )
}  # fmt: skip


def find(operation: str, name: str) -> Backend:
    """The backend of that name; dispatch has checked the name before."""
    return next(b for b in OPERATIONS[operation].backends if b.name == name)
