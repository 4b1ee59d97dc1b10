"""The requirements of every Triton family on a device, as sentences for `why_not`. Imports only torch."""

from __future__ import annotations

import torch

from saccade.env import interpreting_triton
from saccade.hardware import has_package


def triton_reasons(device_type: str, arch: int, dtype: torch.dtype) -> list[str]:
    """Why Triton kernels on matrix units cannot run on a device; empty if they can, or if Triton's interpreter runs them in
    tests."""
    if not has_package("triton"):
        return ["needs Triton, which is not installed"]
    if device_type == "cpu":
        if not interpreting_triton():
            return ["needs a CUDA device, got cpu (TRITON_INTERPRET=1 runs the kernels there, slowly, for tests)"]
        if dtype == torch.bfloat16:
            return ["Triton's interpreter computes bfloat16 wrongly; use float16 or float32 there"]
        return []
    if device_type != "cuda":
        return [f"needs a CUDA device, got {device_type}"]
    if arch < 80:
        return [f"needs sm_80 or later (below it Triton has no matrix units), this device is sm_{arch}"]
    return []
