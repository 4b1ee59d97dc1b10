"""saccade: attention kernels for PyTorch, exact where torch is slow and sparse where exactness is not needed."""

from saccade import integrations, nm_sparse, nn
from saccade.cache import DynamicMaskCache
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.functional import attention, attention_qkvpacked, dynamic_mask_attention, expiry, explain, nm_sparse_attention

__version__ = "0.1.0"

__all__ = [
    "DynamicMaskCache",
    "InvalidArgument",
    "SaccadeError",
    "UnsupportedProblem",
    "attention",
    "attention_qkvpacked",
    "dynamic_mask_attention",
    "expiry",
    "explain",
    "integrations",
    "nm_sparse",
    "nm_sparse_attention",
    "nn",
]
