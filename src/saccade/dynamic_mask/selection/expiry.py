"""The interval of every key on a GPU: computed in CUDA C++ if NVRTC is available, else in Triton. Both give the same bits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from saccade.dynamic_mask.selection import expiry_cuda, expiry_triton
from saccade.hardware import arch_of
from saccade.launch.flag import borrow
from saccade.nvrtc import obstacles


def causal_intervals(key_scores: Tensor, keep: int, lengths: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """(start, stop), int32 `[B, Hkv, Tk]`, as `saccade.dynamic_mask.selection.intervals.causal_intervals` without documents; None
    where `keep` is too large for Triton's kernels."""
    module = expiry_triton if obstacles(arch_of(key_scores.device)) else expiry_cuda
    return module.causal_intervals(key_scores, keep, lengths)


def watched_intervals(
    key_scores: Tensor, keep: int, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Callable[[], bool]] | None:
    """(start, stop, faulty): `faulty()` says whether any score is not finite. It waits only until the scores are ranked; call it once. None if there
    are no keys, or without NVRTC, because Triton would need another launch."""
    if obstacles(arch_of(key_scores.device)) or not key_scores.numel():
        return None
    flag = borrow(key_scores.device)
    start, stop = expiry_cuda.causal_intervals(key_scores, keep, lengths, flag)
    return start, stop, flag.read
