"""The family's backends: what each declines, and where it is preferred. Imports torch alone."""

from __future__ import annotations

import torch

from saccade.kernels.contract import Backend, DecodeLaunchers, DynamicMaskLaunchers
from saccade.kernels.requirements import triton_reasons
from saccade.problem_dynamic_mask import DynamicMaskProblem

MAX_HEAD_DIM = 256
MAX_DECODE_TOKENS = 8  # one launch each
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not_gather(problem: DynamicMaskProblem) -> list[str]:
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


def _prefers_gather(problem: DynamicMaskProblem) -> bool:
    """16 bits on a GPU: see benchmarks/results/h200/dynamic_mask_length.csv. In float32 it uses no matrix units, as torch does not."""
    return problem.device_type == "cuda" and problem.dtype != torch.float32


def _describe_gather(problem: DynamicMaskProblem) -> str:
    """Which kernels run: on sm_90 the Triton ones take two to three times as long."""
    if problem.arch != 90 or problem.dtype == torch.float32 or problem.head_dim not in (64, 128):
        return "Triton"
    from saccade.nvrtc import obstacles

    missing = obstacles("90a")
    return f"Triton, two to three times slower than the kernels in CUDA C++: {missing[0]}" if missing else "CUDA C++ for sm_90a"


def _load_gather() -> DynamicMaskLaunchers:
    from saccade.kernels.dynamic_mask.expiry import causal_intervals, watched_intervals
    from saccade.kernels.dynamic_mask.hopper_causal import find
    from saccade.kernels.dynamic_mask.launchers import backward, forward

    return DynamicMaskLaunchers(forward, backward, causal_intervals, watched_intervals, find)


def _load_torch() -> DynamicMaskLaunchers:
    from saccade.kernels.dynamic_mask.gather_torch import attend_blocks, attend_blocks_backward

    return DynamicMaskLaunchers(attend_blocks, attend_blocks_backward)


def _why_not_decode(problem: DynamicMaskProblem) -> list[str]:
    reasons = _why_not_gather(problem)
    if problem.q_len > MAX_DECODE_TOKENS:
        reasons.append(f"takes at most {MAX_DECODE_TOKENS} tokens at a time, got {problem.q_len}")
    if problem.needs_grad:
        reasons.append("has no backward, and query requires a gradient (use torch.no_grad())")
    return reasons


def _load_decode() -> DecodeLaunchers:
    from saccade.kernels.dynamic_mask.decode_launcher import Decode

    return DecodeLaunchers(Decode)


GATHER = Backend(
    name="gather",
    operation="dynamic_mask_attention",
    summary="gathers the kept keys of each block of queries, Triton, sm_80 and later",
    why_not=_why_not_gather,
    prefers=_prefers_gather,
    launchers=_load_gather,
    describe_config=_describe_gather,
)

GATHER_TORCH = Backend(
    name="gather_torch",
    operation="dynamic_mask_attention",
    summary="plain torch on any device: gathers the kept keys of each block of queries, O(Tq * keep)",
    why_not=lambda problem: [],
    prefers=lambda problem: True,
    launchers=_load_torch,
)

# the problem describes the new tokens alone
DECODE = Backend(
    name="decode",
    operation="dynamic_mask_decode",
    summary="one launch a token over the entries of a DynamicMaskCache, in place, Triton, sm_80 and later",
    why_not=_why_not_decode,
    prefers=lambda problem: problem.device_type == "cuda",  # not in the interpreter, unless asked for
    launchers=_load_decode,
)
