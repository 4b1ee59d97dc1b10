"""The plain-torch member of the family as a backend."""

from __future__ import annotations

from saccade.kernels.contract import Backend, DynamicMaskLaunchers
from saccade.problem_dynamic_mask import DynamicMaskProblem


def _load() -> DynamicMaskLaunchers:
    from saccade.kernels.dynamic_mask.gather_torch import attend_blocks, attend_blocks_backward

    return DynamicMaskLaunchers(attend_blocks, attend_blocks_backward)


def _why_not(problem: DynamicMaskProblem) -> list[str]:
    return []


GATHER_TORCH: Backend = Backend(
    name="gather_torch",
    operation="dynamic_mask_attention",
    summary="plain torch on any device: gathers the kept keys of each block of queries, O(Tq * keep)",
    why_not=_why_not,
    prefers=lambda problem: True,
    launchers=_load,
)
