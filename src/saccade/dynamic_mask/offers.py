"""GPU work for context parallelism besides attention: ranking keys and copying chosen rows, in one launch each.

`saccade.distributed` does the same with torch's operations, for other devices and for documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.switch import is_disabled
from saccade.hardware import arch_of
from saccade.launch.requirements import triton_reasons

Rows = tuple[Tensor, Tensor, Tensor]  # K, V and scores


def by_kernels(*tensors: Tensor) -> bool:
    """Whether kernels serve tensors `[..., D]` or scores: 16- or 32-bit floats whose rows are dense, on a GPU that Triton knows."""
    if is_disabled():
        return False
    device = tensors[0].device
    if device.type == "cpu":  # the interpreter, in tests
        reasons = [r for x in tensors for r in triton_reasons("cpu", 0, x.dtype)]
    else:
        reasons = triton_reasons(device.type, arch_of(device) if device.type == "cuda" else 0, torch.float32)
    return not reasons and all(x.dtype.itemsize in (2, 4) and (x.dim() == 3 or x.stride(-1) == 1) for x in tensors)


def rank(scores: Tensor, fault: Tensor | None = None) -> Tensor:
    """The ranks of keys of P parts, scores `[P, B, Hkv, n]`: int64 `[B, Hkv, P * n]`, ordered as (score, position). fault: becomes 1 if a score is
    not finite in float32."""
    from saccade.dynamic_mask.selection import offers_triton

    return offers_triton.rank(scores, fault)


def copy(source: Rows, places: Tensor | None, target: Rows) -> None:
    """Rows of P parts `[P, B, Hkv, n, ..]` at places int64 `[B, Hkv, m]` in P * n, or the first m for None, to target `[B, Hkv, m, ..]`."""
    from saccade.dynamic_mask.selection import offers_triton

    offers_triton.copy(source, places, target)
