"""The backend on sparse tensor cores: which calls it declines, and where it is preferred. Imports only torch."""

from __future__ import annotations

import torch

from saccade.engine.arguments import is_normal_scale
from saccade.engine.backend import Backend
from saccade.hardware import has_package
from saccade.nm_sparse.args import NMSparseLaunchers
from saccade.nm_sparse.problem import NMSparseProblem

MAX_HEAD_DIM = 256
MAX_HEAD_DIM_TF32 = 128
PATTERNS = ("2:4", "1:2")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MASKED = "backend 'masked' takes it"


def _why_not(problem: NMSparseProblem) -> list[str]:
    reasons = _of_the_machine(problem)
    if problem.pattern not in PATTERNS:
        reasons.append(f"sparse tensor cores multiply {' and '.join(PATTERNS)}, got {problem.pattern}; {_MASKED}")
    if problem.dense_first or problem.dense_recent:
        # without sizes, which the text of the call has: torch.compile cannot format symbolic sizes
        reasons.append(f"prunes every group of keys, and dense_first or dense_recent exempts some; {_MASKED}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}; {_MASKED}")
    if problem.dtype == torch.float32:
        reasons += _of_float32(problem)
    if not is_normal_scale(problem.scale):
        reasons.append(f"needs a positive scale that is normal in float32, got {problem.scale}: it selects before it scales")
    widest = MAX_HEAD_DIM_TF32 if problem.dtype == torch.float32 else MAX_HEAD_DIM
    if problem.head_dim % 16 or not 16 <= problem.head_dim <= widest:
        reasons.append(f"needs a head dim that is a multiple of 16 up to {widest}, got {problem.head_dim}")
    if problem.needs_grad and not has_package("triton"):
        reasons.append("its backward needs Triton, which is not installed, and a gradient is required (use torch.no_grad())")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.last_strides != (1, 1, 1):
        reasons.append(f"needs a last stride of 1, got {problem.last_strides} for query, key and value")
    elif not problem.aligned:
        reasons.append(
            "needs query, key and value whose address and strides are multiples of 16 bytes; call .contiguous() on them"
        )
    return reasons


def _of_float32(problem: NMSparseProblem) -> list[str]:
    reasons = []
    if problem.pattern != "1:2":
        reasons.append(f"sparse tensor cores multiply float32 (as TF32) only with '1:2', got {problem.pattern}; {_MASKED}")
    if not problem.tf32:
        reasons.append(
            "multiplies float32 as TF32, which torch is set not to do; torch.backends.cuda.matmul.allow_tf32 = True allows it, "
            f"{_MASKED} in full precision"
        )
    return reasons


def _of_the_machine(problem: NMSparseProblem) -> list[str]:
    if problem.device_type != "cuda":
        return [f"needs a CUDA device, got {problem.device_type}"]
    if problem.arch < 80:
        return [f"needs sparse tensor cores, sm_80 or later, this device is sm_{problem.arch}"]
    # imported late, because it imports torch._dynamo
    from saccade.nvrtc import architecture_for, obstacles

    return list(obstacles("90a" if problem.arch == 90 else architecture_for(problem.arch)))


def _load() -> NMSparseLaunchers:
    from saccade.nm_sparse.fused.launchers import forward

    return NMSparseLaunchers(forward)


MMA_SP = Backend(
    name="mma_sp",
    operation="nm_sparse_attention",
    summary="2:4 and 1:2 fused on sparse tensor cores, O(Tq + Tk) memory; CUDA C++ compiled at the first call, sm_80 and later",
    why_not=_why_not,
    prefers=lambda problem: True,
    launchers=_load,
)
