"""The calls that the staged kernels decline. Imports only torch."""

from __future__ import annotations

import torch

from saccade.engine.switch import REASON, is_disabled
from saccade.nm_sparse.staged.config import softmax_lanes

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(device: torch.device, arch: int, dtype: torch.dtype, kv_len: int, head_dim: int | None = None) -> list[str]:
    """The obstacles to running a call, one sentence each; empty if it can run."""
    if is_disabled():
        return [REASON]
    if device.type != "cuda":
        return [f"needs a CUDA device, got {device.type}"]
    if arch < 80:
        return [f"needs sparse tensor cores, of sm_80 and later; this device is sm_{arch}"]
    # imported late, because importing the compiler imports torch.compile
    from saccade.nvrtc import architecture_for, obstacles

    reasons = list(obstacles(architecture_for(arch)))
    if dtype not in DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {dtype}")
    elif softmax_lanes(-(-kv_len // (128 // dtype.itemsize)) * 4) is None:
        reasons.append(f"takes at most {1024 * 8 * 32 // dtype.itemsize} keys of {dtype}, got {kv_len}")
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of at most {MAX_HEAD_DIM}, got {head_dim}")
    return reasons
