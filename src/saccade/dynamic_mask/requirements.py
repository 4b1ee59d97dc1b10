"""The requirements of the Triton kernels of `dynamic_mask_attention`."""

from __future__ import annotations

import torch

from saccade.dynamic_mask.problem import DynamicMaskProblem
from saccade.launch.requirements import triton_reasons

MAX_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(problem: DynamicMaskProblem) -> list[str]:
    """Why the kernels cannot run a call, one sentence for each reason."""
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    if problem.head_dim > 1 and problem.last_strides != (1, 1, 1):
        reasons.append(f"needs a last stride of 1, got {problem.last_strides} for query, key and value")
    return reasons
