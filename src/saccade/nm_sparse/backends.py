"""The backends of `nm_sparse_attention`: the most specific first, the reference last."""

from saccade.engine.backend import Backend
from saccade.nm_sparse.fused.backend import MMA_SP
from saccade.nm_sparse.masked.backend import MASKED
from saccade.nm_sparse.reference import REFERENCE

BACKENDS: tuple[Backend, ...] = (MMA_SP, MASKED, REFERENCE)
