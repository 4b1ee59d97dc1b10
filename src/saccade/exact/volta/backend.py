"""The Volta kernels as a backend: what they decline. Imports only torch."""

from __future__ import annotations

import functools

import torch

from saccade.engine.arguments import is_normal_scale
from saccade.engine.backend import Backend, Launchers
from saccade.engine.problem import Problem
from saccade.engine.rule import Rule, Source, taken
from saccade.engine.window import why_no_window

MAX_HEAD_DIM = 128
_MOST_BLOCKS = 2**31 - 1
# architectures whose tensor cores know the instruction
_NATIVE = (70, 75)


def _why_not(problem: Problem) -> list[str]:
    reasons = [*_device_reasons(problem), *why_no_window(problem.window)]
    if problem.dtype != torch.float16:
        reasons.append(f"needs float16, the only dtype of these matrix instructions, got {problem.dtype}")
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim that is a multiple of 8, from 8 to {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.rank != 4:
        reasons.append(f"needs tensors of rank 4, [B, H, T, D], got rank {problem.rank}")
    if problem.windows:
        reasons.append(f"takes no bias for each of {problem.windows} windows, which the images share")
    if problem.key_mask:
        reasons.append("takes no key_mask beside a bias")
    if problem.last_strides != (1, 1, 1):
        reasons.append(f"needs a last stride of 1, got {problem.last_strides} for query, key and value")
    if not is_normal_scale(problem.scale):
        reasons.append(f"needs a positive scale that is normal in float32, got {problem.scale}")
    if reasons and torch.compiler.is_compiling():
        return reasons  # lengths may be symbols, and a comparison would add a guard to the graph
    # backward has a block for each 64 keys and head, forward for 128 queries; `delta` for 32 rows
    blocks = problem.batch * problem.heads * -(-max(problem.q_len, problem.kv_len) // 32)
    if blocks > _MOST_BLOCKS:
        reasons.append(f"needs B * H * max(Tq, Tk) / 32 of at most {_MOST_BLOCKS}, got {blocks}")
    return reasons


def _device_reasons(problem: Problem) -> list[str]:
    if problem.device_type != "cuda":
        return [f"needs a CUDA device, got {problem.device_type}"]
    if problem.arch < 70:
        return [f"needs tensor cores, of sm_70 and later; this device is sm_{problem.arch}"]
    # imported late: importing the compiler imports torch.compile
    from saccade.errors import InvalidArgument
    from saccade.nvrtc import architecture_for, obstacles

    try:
        return list(obstacles(architecture_for(problem.arch)))
    except InvalidArgument as error:  # a compute capability that we do not compile for
        return [str(error)]


def _emulated(problem: Problem) -> str:
    return "" if problem.arch in _NATIVE else f"sm_{problem.arch} has no such matrix instruction: emulated, for checking"


def _prefers(problem: Problem) -> bool:
    return not _rule(problem).against


def _rule(problem: Problem) -> Rule:
    # not measured on such a GPU yet: what docs/notes/volta.md predicts
    predicted = Source("benchmarks/results/predictions/volta.csv")
    if problem.arch in _NATIVE and problem.q_len >= 128:
        return taken(predicted, "predicted to be faster than torch's function, not timed")
    return Rule(f"a block has 128 queries, of which {problem.q_len} would leave some idle", predicted)


def _load() -> Launchers:
    from saccade.exact.volta.launchers import backward, forward

    return Launchers(forward, backward)


def _load_half() -> Launchers:
    from saccade.exact.volta.launchers import backward, forward

    return Launchers(functools.partial(forward, half_sums=True), functools.partial(backward, half_sums=True))


def _describe(problem: Problem) -> str:
    from saccade.exact.volta.config import backward_tile, forward_tile

    text = f"fwd={forward_tile(problem.head_dim, problem.q_len, problem.mask is not None, problem.arch)}"
    return f"{text}, bwd={backward_tile(problem.head_dim, problem.arch)}" if problem.needs_grad else text


VOLTA = Backend(
    name="volta",
    operation="attention",
    summary="tensor cores of Volta and Turing (mma.m8n8k4), CUDA C++, float16; emulated from sm_80 on, for checking",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    saves_output=True,
    form=_describe,
    rule=_rule,
    by_name_only=_emulated,
)

# Products are added in float16, forward and backward: relative errors of 0.1 to 0.2 % where VOLTA has 0.03 %, and sums beyond 65,504 are infinite.
# So it is used only by name.
HALF_SUMS = Backend(
    name="volta_fp16",
    operation="attention",
    summary="volta with float16 sums, forward and backward: fewer instructions, less exact (the paper's FP16-ACC)",
    why_not=_why_not,
    prefers=lambda problem: False,
    launchers=_load_half,
    saves_output=True,
    form=_describe,
    by_name_only=lambda problem: "its sums are float16, less exact",
)
