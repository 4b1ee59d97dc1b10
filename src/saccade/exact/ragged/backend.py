"""The ragged family as a backend: what it declines, and where it is preferred. Imports torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from saccade.engine.backend import Backend
from saccade.exact.ragged.config import MAX_HEAD_DIM, TILES, fits, forward_by_triton, long_config, tile_config
from saccade.exact.varlen.args import VarlenLaunchers
from saccade.launch.requirements import triton_reasons
from saccade.launch.triton import pow2

if TYPE_CHECKING:
    from saccade.exact.varlen.problem import VarlenProblem

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _block(head_dim: int) -> int:
    return pow2(max(16, head_dim))


def _why_not(problem: VarlenProblem) -> list[str]:
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    if problem.bias is not None:
        reasons += _why_no_bias(problem)
    return reasons


def _why_no_bias(problem: VarlenProblem) -> list[str]:
    whole = [t for t in TILES if fits(t, _block(problem.head_dim), problem.dtype.itemsize, problem.arch)]
    longest = max(problem.max_q, problem.max_k)
    reasons = []
    if not whole or longest > max(whole):
        reasons.append(f"a bias needs sequences that fit a tile, {max(whole, default=0)} tokens here, got up to {longest}")
    if problem.bias_grad and problem.heads != problem.kv_heads:
        reasons.append("the gradient of a bias needs as many key heads as query heads")
    return reasons


def _describe(problem: VarlenProblem) -> str:
    block, size = _block(problem.head_dim), problem.dtype.itemsize
    longest, featured = max(problem.max_q, problem.max_k), problem.bias is not None or problem.dropout_p > 0
    directions = ("fwd", "bwd") if problem.needs_grad else ("fwd",)
    parts = []
    for below, tile in zip((0, *TILES), TILES, strict=False):
        if longest > below and fits(tile, block, size, problem.arch):
            parts += [f"{d} to {tile} tokens: {tile_config(d, tile, block, size, featured, problem.arch)}" for d in directions]
    if longest > TILES[-1] or not parts:
        parts += [f"{d} beyond: {_beyond(problem, d)}" for d in directions]
    return ", ".join(parts)


def _beyond(problem: VarlenProblem, direction: str) -> str:
    """What computes sequences beyond the tiles: CUDA C++ on sm_90 where it takes the call, else Triton."""
    featured = problem.bias is not None or problem.dropout_p > 0 or problem.heads != problem.kv_heads
    wide = problem.head_dim > 128 or problem.head_dim % 8 > 0
    taken = problem.arch == 90 and problem.dtype.itemsize == 2 and not (featured or wide)
    if taken and not (direction == "fwd" and forward_by_triton(problem.head_dim, problem.causal, problem.max_q)):
        from saccade.exact.ragged.sm90 import CONFIGS, rounded

        return f"CUDA C++ {CONFIGS['forward' if direction == 'fwd' else 'backward', rounded(problem.head_dim)]}"
    block, size = _block(problem.head_dim), problem.dtype.itemsize
    kinds = ("fwd",) if direction == "fwd" else ("keys", "queries")
    return " and ".join([f"{k} {long_config(k, block, size, problem.arch)}" for k in kinds])


def _load() -> VarlenLaunchers:
    from saccade.exact.ragged.launchers import backward, forward

    return VarlenLaunchers(forward, backward)


def _prefers(problem: VarlenProblem) -> bool:
    return not _unpreferred(problem)


def _unpreferred(problem: VarlenProblem) -> str:
    """Follows benchmarks/results/h200/short_ragged.csv."""
    if problem.device_type != "cuda":
        return "the interpreter is for tests"
    longest = max(problem.max_q, problem.max_k)
    if longest > 512:
        return f"beyond 512 tokens, which were measured, torch's packed attention is taken; the longest here has {longest}"
    return ""


def _describe_forward(*call: Any) -> Any:
    from saccade.exact.ragged.native import describe_forward

    return describe_forward(*call)


def _describe_backward(*call: Any) -> Any:
    from saccade.exact.ragged.native import describe_backward

    return describe_backward(*call)


def _limits(args: Any) -> tuple[int, int, int]:
    from saccade.exact.ragged.native import limits

    return limits(args)


RAGGED = Backend(
    name="ragged",
    operation="attention_varlen",
    summary="real tokens alone, a tile for each bucket of lengths, Triton, sm_80 and later; beyond 128 tokens CUDA C++ on sm_90",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    saves_output=True,
    describe_config=_describe,
    unpreferred=_unpreferred,
    describe_launches=_describe_forward,
    describe_backward=_describe_backward,
    limits=_limits,
)
