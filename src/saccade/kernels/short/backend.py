"""The short family as a backend: what it declines, and where the measured tables prefer it. Imports torch alone."""

from __future__ import annotations

import torch

from saccade.kernels.contract import Backend, Launchers
from saccade.kernels.requirements import triton_reasons
from saccade.kernels.short.config import SMALL_SHARED
from saccade.problem import Problem

MAX_LEN = 128
MAX_HEAD_DIM = 256
# batch x heads below which the host decides: a call takes 28 us of it in forward, torch's 22; with backward 171 against 189, which
# was measured at Tk = 32 alone (benchmarks/results/h200/short_overhead.csv)
MIN_PROBLEMS = 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not(problem: Problem) -> list[str]:
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    if problem.rank != 4:
        reasons.append(f"needs tensors of rank 4, [B, H, T, D], got rank {problem.rank}")
    if max(problem.q_len, problem.kv_len) > MAX_LEN:
        reasons.append(f"needs Tq and Tk of at most {MAX_LEN}, got {problem.q_len} and {problem.kv_len}")
    if problem.head_dim > MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of at most {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    if problem.dtype == torch.float32 and problem.arch in SMALL_SHARED and max(problem.q_len, problem.kv_len) > 64:
        reasons.append(f"float32 needs Tq and Tk of at most 64 on sm_{problem.arch} (99 KiB of shared memory)")
    if not problem.scale > 0:
        reasons.append(f"needs a positive scale, got {problem.scale}")
    if problem.head_dim > 1 and problem.last_strides != (1, 1, 1):
        reasons.append(f"needs a last stride of 1, got {problem.last_strides} for query, key and value")
    return reasons


def _prefers(problem: Problem) -> bool:
    """Follows benchmarks/results/h200 and docs/notes/short.md."""
    longest = max(problem.q_len, problem.kv_len)
    few = problem.batch * problem.heads < MIN_PROBLEMS
    trained = problem.needs_grad and longest <= 32 and problem.mask is None and problem.dtype != torch.float32
    if problem.device_type != "cuda" or (few and not trained):
        return False
    featured = problem.mask is not None or problem.dropout_p > 0 or problem.heads != problem.kv_heads
    if problem.dtype == torch.float32:  # no matrix units in full precision: 1.3x at S = 32, D = 64, but 0.7x at S = 64
        return longest <= 32 and problem.q_len > 1 and problem.head_dim <= 64 and not featured
    if problem.mask == "bias":
        return _shared_bias(problem) and longest > 32 and problem.head_dim <= 32 and (problem.bias_grad or not problem.needs_grad)
    if longest <= 64 or problem.q_len == 1:
        return True
    if problem.mask == "bool" and not problem.dropout_p and problem.heads == problem.kv_heads:
        return _is_row(problem)  # one row for all queries at S = 128, D = 64: forward 1.12x, backward 1.35x
    if featured:  # not measured there
        return False
    # plain, causal or lengths: forward 0.99x to 1.8x, backward 1.6x to 2.9x on sm_90; without its kernels forward 0.76x to 0.99x
    return problem.head_dim <= 32 or problem.needs_grad or problem.arch == 90


def _shared_bias(problem: Problem) -> bool:
    """A bias that the batch shares is held on chip: Swin windows (S = 49, D = 32), forward 3.6x, backward 3.9x. Others: 0.55x."""
    shape = (1,) * (4 - len(problem.mask_shape or ())) + (problem.mask_shape or ())
    small = max(problem.q_len, problem.kv_len) <= 64 and problem.q_len > 1
    return problem.mask == "bias" and shape[0] == 1 and small and not problem.dropout_p and problem.heads == problem.kv_heads


def _is_row(problem: Problem) -> bool:
    return len(problem.mask_shape or ()) < 2 or problem.mask_shape[-2] == 1  # type: ignore[index]


def _load() -> Launchers:
    from saccade.kernels.short.launchers import backward, forward

    return Launchers(forward, backward)


def _describe(problem: Problem) -> str:
    from saccade.kernels.short.config import is_plain, pick, takes_hopper, tile_size

    rows, dim = tile_size(max(problem.q_len, problem.kv_len)), tile_size(problem.head_dim)
    problems, grouped, size = problem.batch * problem.heads, problem.heads != problem.kv_heads, problem.dtype.itemsize
    masked = bool(problem.mask or problem.lengths or problem.dropout_p)
    plain = is_plain(problems, grouped, masked or problem.is_causal)
    hopper = takes_hopper(problem.arch, problems, problem.q_len, problem.kv_len, size, grouped, masked)
    kind = "pool_" if problem.q_len == 1 else ""
    directions = ("fwd", "bwd") if problem.needs_grad else ("fwd",)
    chosen = {d: pick(kind + d, rows, dim, size, problem.arch, plain, hopper, _shared_bias(problem)) for d in directions}
    return ", ".join(f"{d}={config}" for d, config in chosen.items())


BACKEND = Backend(
    name="short",
    operation="attention",
    summary="whole rows on chip, Triton, sm_80 and later",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    describe_config=_describe,
)
