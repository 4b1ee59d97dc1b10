"""The masking backend: which calls it declines, and where it is preferred. Imports only torch."""

from __future__ import annotations

import torch

from saccade.engine.backend import Backend
from saccade.launch.requirements import triton_reasons
from saccade.nm_sparse.args import NMSparseLaunchers
from saccade.nm_sparse.problem import NMSparseProblem

MAX_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not(problem: NMSparseProblem) -> list[str]:
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.head_dim > 1 and problem.last_strides != (1, 1, 1):
        reasons.append(f"needs a last stride of 1, got {problem.last_strides} for query, key and value")
    return reasons


def _load() -> NMSparseLaunchers:
    from saccade.nm_sparse.masked.launchers import backward, forward

    return NMSparseLaunchers(forward, backward)


MASKED = Backend(
    name="masked",
    operation="nm_sparse_attention",
    summary="any N:M in tiles, pruned scores masked, O(Tq + Tk) memory and one bit per score for backward; Triton, sm_80 and later",
    why_not=_why_not,
    # preferred not for its speed, but because the reference holds every score several times
    prefers=lambda problem: problem.device_type == "cuda",
    launchers=_load,
)
