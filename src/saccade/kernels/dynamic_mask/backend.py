"""The family's backends: what each declines, and where it is preferred. Imports torch alone."""

from __future__ import annotations

import torch

from saccade.env import interpreting_triton
from saccade.hardware import has_package
from saccade.kernels.contract import Backend, DynamicMaskLaunchers
from saccade.problem_dynamic_mask import DynamicMaskProblem

MAX_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not_gather(problem: DynamicMaskProblem) -> list[str]:
    reasons = _device_reasons(problem)
    if problem.head_dim > MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of at most {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    if problem.head_dim > 1 and problem.last_strides != (1, 1, 1):
        reasons.append(f"needs a last stride of 1, got {problem.last_strides} for query, key and value")
    return reasons


def _device_reasons(problem: DynamicMaskProblem) -> list[str]:
    if not has_package("triton"):
        return ["needs Triton, which is not installed"]
    if problem.device_type == "cpu":
        if not interpreting_triton():
            return ["needs a CUDA device, got cpu (TRITON_INTERPRET=1 runs the kernels there, slowly, for tests)"]
        if problem.dtype == torch.bfloat16:
            return ["Triton's interpreter computes bfloat16 wrongly; use float16 or float32 there"]
        return []
    if problem.device_type != "cuda":
        return [f"needs a CUDA device, got {problem.device_type}"]
    if problem.arch < 80:
        return [f"needs sm_80 or later (below it Triton has no matrix units), this device is sm_{problem.arch}"]
    return []


def _load_gather() -> DynamicMaskLaunchers:
    from saccade.kernels.dynamic_mask.launchers import backward, forward

    return DynamicMaskLaunchers(forward, backward)


def _load_torch() -> DynamicMaskLaunchers:
    from saccade.kernels.dynamic_mask.gather_torch import attend_blocks, attend_blocks_backward

    return DynamicMaskLaunchers(attend_blocks, attend_blocks_backward)


GATHER = Backend(
    name="gather",
    operation="dynamic_mask_attention",
    summary="gathers the kept keys of each block of queries, Triton, sm_80 and later",
    why_not=_why_not_gather,
    prefers=lambda problem: False,  # until its table is measured
    launchers=_load_gather,
)

GATHER_TORCH = Backend(
    name="gather_torch",
    operation="dynamic_mask_attention",
    summary="plain torch on any device: gathers the kept keys of each block of queries, O(Tq * keep)",
    why_not=lambda problem: [],
    prefers=lambda problem: True,
    launchers=_load_torch,
)
