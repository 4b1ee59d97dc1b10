"""The short family as a backend: what it declines, and where the measured tables prefer it. Imports torch alone."""

from __future__ import annotations

import torch

from saccade.kernels.contract import Backend, Launchers
from saccade.kernels.requirements import triton_reasons
from saccade.kernels.short.config import SMALL_SHARED
from saccade.problem import Problem

MAX_LEN = 128
MAX_HEAD_DIM = 256
# batch x heads below which the host decides (benchmarks/results/h200/short_auto.csv): a call takes 28 to 32 us of it in forward,
# torch's 22 to 26; with backward 171 to 208 against 126 to 189
MIN_PROBLEMS = 8192
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not(problem: Problem) -> list[str]:
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    if problem.rank != 4:
        reasons.append(f"needs tensors of rank 4, [B, H, T, D], got rank {problem.rank}")
    if max(problem.q_len, problem.kv_len) > MAX_LEN:
        reasons.append(f"needs Tq and Tk of at most {MAX_LEN}, got {problem.q_len} and {problem.kv_len}")
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {problem.head_dim}")
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
    """Follows benchmarks/results/h200/short_auto.csv, which a test holds against it, and short_models.csv."""
    longest = max(problem.q_len, problem.kv_len)
    problems = problem.batch * problem.heads
    if problem.device_type != "cuda" or problems < MIN_PROBLEMS:
        return False
    grouped = problem.heads != problem.kv_heads
    if problem.q_len == 1:  # the pooling kernels read the key heads once a query head: 0.26x to 0.57x
        return not grouped and problem.mask != "bias"
    if problem.dtype == torch.float32:  # no matrix units in full precision: 1.3x at S = 32, D = 64, but 0.7x at S = 64
        featured = problem.mask is not None or problem.dropout_p > 0 or grouped
        return longest <= 32 and problem.head_dim <= 64 and not featured
    if problem.mask == "bias":
        return _prefers_bias(problem)
    if longest <= 64:
        return True
    if problem.dropout_p > 0:  # 0.55x to 0.75x in forward
        return False
    if grouped:  # 0.83x in forward, 1.65x with backward
        return problem.needs_grad and problem.mask is None
    if problem.mask == "bool":  # one row for all queries 1.12x and 1.35x, full masks 0.64x
        return _is_row(problem)
    if problem.head_dim <= 32 and problem.needs_grad and problems < 2 * MIN_PROBLEMS:  # 0.95x: the host again
        return False
    # plain, causal or lengths: forward 1.0x to 1.8x, backward 1.6x to 2.9x on sm_90; without its kernels forward 0.76x to 0.99x
    return problem.head_dim <= 32 or problem.needs_grad or problem.arch == 90


def _prefers_bias(problem: Problem) -> bool:
    """One that the batch shares: on chip at S = 33 to 64, D <= 32 (Swin windows, 3.5x), and 1.1x to 1.4x at S = 128, D = 64 and 128."""
    if problem.needs_grad and not problem.bias_grad:  # not measured
        return False
    longest = max(problem.q_len, problem.kv_len)
    if _shared_bias(problem):
        return longest > 32 and problem.head_dim <= 32
    plain = not problem.dropout_p and problem.heads == problem.kv_heads
    return plain and longest > 64 and problem.head_dim > 32 and _batch_extent(problem) == 1


def _batch_extent(problem: Problem) -> int:
    return ((1,) * 4 + (problem.mask_shape or ()))[-4]


def _shared_bias(problem: Problem) -> bool:
    """Whether persistent programs hold the bias on chip."""
    small = max(problem.q_len, problem.kv_len) <= 64 and problem.q_len > 1
    plain = not problem.dropout_p and problem.heads == problem.kv_heads
    return problem.mask == "bias" and _batch_extent(problem) == 1 and small and plain


def _is_row(problem: Problem) -> bool:
    return len(problem.mask_shape or ()) < 2 or problem.mask_shape[-2] == 1  # type: ignore[index]


def _load() -> Launchers:
    from saccade.kernels.short.launchers import backward, forward

    return Launchers(forward, backward)


def _describe(problem: Problem) -> str:
    from saccade.kernels.short.config import is_plain, pick, takes_sm90, tile_size

    rows, dim = tile_size(max(problem.q_len, problem.kv_len)), tile_size(problem.head_dim)
    problems, grouped, size = problem.batch * problem.heads, problem.heads != problem.kv_heads, problem.dtype.itemsize
    masked = bool(problem.mask or problem.lengths or problem.dropout_p)
    plain = is_plain(problems, grouped, masked or problem.is_causal)
    lengths = problem.q_len, problem.kv_len
    sm90 = takes_sm90(problem.arch, problems, *lengths, problem.head_dim, size, grouped, masked, problem.is_causal)
    kind = "pool_" if problem.q_len == 1 else ""
    directions = ("fwd", "bwd") if problem.needs_grad else ("fwd",)
    chosen = {d: pick(kind + d, rows, dim, size, problem.arch, plain, sm90, _shared_bias(problem)) for d in directions}
    return ", ".join(f"{d}={config}" for d, config in chosen.items())


BACKEND = Backend(
    name="short",
    operation="attention",
    summary="whole rows on chip, Triton, sm_80 and later; CUDA C++ where sm_90 gains by it",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    describe_config=_describe,
)
