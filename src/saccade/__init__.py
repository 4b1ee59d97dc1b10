"""saccade: attention kernels for PyTorch, exact where torch is slow and sparse where exactness is not needed."""

from saccade import integrations, nm_sparse, nn
from saccade import namesake as _namesake
from saccade.dynamic_mask.api import dynamic_mask_attention, expiry
from saccade.dynamic_mask.decode.cache import DynamicMaskCache
from saccade.dynamic_mask.scores.api import dynamic_mask_scores
from saccade.encoders.optimize import optimize
from saccade.engine import mkl as _mkl
from saccade.engine.disabled import disabled
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.exact.api import attention, attention_qkvpacked
from saccade.exact.explained import explain
from saccade.exact.varlen.api import attention_varlen, attention_varlen_qkvpacked
from saccade.integrations.sdpa import replace_sdpa
from saccade.nm_sparse import analysis
from saccade.nm_sparse.api import nm_sparse_attention

__version__ = "0.2.0"

_mkl.settle()
if __name__ == "saccade":  # a copy from the kernels hub has a name of its own
    _namesake.warn()

__all__ = [
    "DynamicMaskCache",
    "InvalidArgument",
    "SaccadeError",
    "UnsupportedProblem",
    "analysis",
    "attention",
    "attention_qkvpacked",
    "attention_varlen",
    "attention_varlen_qkvpacked",
    "disabled",
    "dynamic_mask_attention",
    "dynamic_mask_scores",
    "expiry",
    "explain",
    "integrations",
    "nm_sparse",
    "nm_sparse_attention",
    "nn",
    "optimize",
    "replace_sdpa",
]
