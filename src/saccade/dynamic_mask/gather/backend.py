"""The backends of this family: which calls each declines, and where it is preferred. Imports only torch."""

from __future__ import annotations

import torch

from saccade.dynamic_mask.args import DynamicMaskLaunchers
from saccade.dynamic_mask.problem import DynamicMaskProblem
from saccade.dynamic_mask.requirements import why_not
from saccade.engine.backend import Backend


def _prefers_gather(problem: DynamicMaskProblem) -> bool:
    """Preferred on a GPU: in 16 bits see benchmarks/results/h100/dynamic_mask_length.csv. In float32 neither it nor plain torch uses matrix
    units. But plain torch gathers through memory, and waits for the device in each call, so it cannot be captured. Forward with 8 heads
    and keep n / 16 to n / 8, on an H100 that other work ran on: at n = 1,024 plain torch takes 0.085 s and the kernels 0.005 s, and at 16,384 they
    take 0.65 s and 0.015 s."""
    return problem.device_type == "cuda"


def _describe_gather(problem: DynamicMaskProblem) -> str:
    """Names the kernels that run: on sm_90 the Triton kernels take two to three times as long as those in CUDA C++."""
    if problem.arch != 90 or problem.dtype == torch.float32 or problem.head_dim not in (64, 128):
        return "Triton"
    from saccade.nvrtc import obstacles

    missing = obstacles("90a")
    return f"Triton, two to three times slower than the kernels in CUDA C++: {missing[0]}" if missing else "CUDA C++ for sm_90a"


def _load_gather() -> DynamicMaskLaunchers:
    from saccade.dynamic_mask.gather.launchers import backward, forward
    from saccade.dynamic_mask.gather.sm90.one_call import find
    from saccade.dynamic_mask.selection.expiry import causal_intervals, watched_intervals

    return DynamicMaskLaunchers(forward, backward, causal_intervals, watched_intervals, find)


_CPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _why_not_cpp(problem: DynamicMaskProblem) -> list[str]:
    from saccade.native.compiler import no_compiler

    reasons = []
    if problem.device_type != "cpu":
        reasons.append(f"needs tensors on a CPU, got {problem.device_type}")
    if problem.dtype not in _CPU_DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    missing = no_compiler()
    return [*reasons, f"needs C++ that is compiled here: {missing}"] if missing else reasons


def _describe_cpp(problem: DynamicMaskProblem) -> str:
    return f"C++ for {torch.backends.cpu.get_cpu_capability()}"


def _load_cpp() -> DynamicMaskLaunchers:
    from saccade.dynamic_mask.gather.cpu.launchers import backward, causal_intervals, forward

    return DynamicMaskLaunchers(forward, backward, causal_intervals)


def _load_torch() -> DynamicMaskLaunchers:
    from saccade.dynamic_mask.gather.torch_blocks import attend_blocks, attend_blocks_backward

    return DynamicMaskLaunchers(attend_blocks, attend_blocks_backward)


GATHER = Backend(
    name="gather",
    operation="dynamic_mask_attention",
    summary="gathers the kept keys of each block of queries, sm_80 and later",
    why_not=why_not,
    prefers=_prefers_gather,
    launchers=_load_gather,
    form=_describe_gather,
)

GATHER_CPP = Backend(
    name="gather_cpp",
    operation="dynamic_mask_attention",
    summary="C++ on a CPU: reads the kept keys of each block of queries where they lie, O(Tq * keep)",
    why_not=_why_not_cpp,
    prefers=lambda problem: True,
    launchers=_load_cpp,
    form=_describe_cpp,
)

GATHER_TORCH = Backend(
    is_torch=True,
    name="gather_torch",
    operation="dynamic_mask_attention",
    summary="plain torch on any device: gathers the kept keys of each block of queries, O(Tq * keep)",
    why_not=lambda problem: [],
    prefers=lambda problem: True,
    launchers=_load_torch,
)
