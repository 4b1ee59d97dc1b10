"""The table: each operation and the backends that compute it, most specific first, the reference last."""

from __future__ import annotations

from saccade.kernels.contract import Backend
from saccade.kernels.dynamic_mask.backend import DECODE, GATHER, GATHER_TORCH
from saccade.kernels.nm_sparse.backend import MASKED
from saccade.kernels.nm_sparse.fused_backend import MMA_SP
from saccade.kernels.sdpa.backend import BACKEND as SDPA
from saccade.kernels.short.backend import BACKEND as SHORT
from saccade.kernels.volta.backend import BACKEND as VOLTA
from saccade.kernels.volta.backend import HALF_SUMS as VOLTA_FP16
from saccade.reference.backend import ATTENTION as REFERENCE
from saccade.reference.backend import DYNAMIC_MASK as DYNAMIC_MASK_REFERENCE
from saccade.reference.backend import NM_SPARSE as NM_SPARSE_REFERENCE

ATTENTION: tuple[Backend, ...] = (SHORT, VOLTA, VOLTA_FP16, SDPA, REFERENCE)
DYNAMIC_MASK: tuple[Backend, ...] = (GATHER, GATHER_TORCH, DYNAMIC_MASK_REFERENCE)
# `DynamicMaskCache` asks this one first, then attends over its entries by a backend of dynamic_mask_attention
DYNAMIC_MASK_DECODE: tuple[Backend, ...] = (DECODE,)

NM_SPARSE: tuple[Backend, ...] = (MMA_SP, MASKED, NM_SPARSE_REFERENCE)

# what `saccade info`, `explain` and `verify` go through
OPERATIONS: dict[str, tuple[Backend, ...]] = {
    "attention": ATTENTION,
    "dynamic_mask_attention": DYNAMIC_MASK,
    "nm_sparse_attention": NM_SPARSE,
}


def find(operation: str, name: str) -> Backend:
    """The backend of that name; names reach here only after dispatch has checked them."""
    return next(b for b in OPERATIONS[operation] if b.name == name)
