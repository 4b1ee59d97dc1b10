"""The short family as a backend: which calls it declines, and where the measured tables prefer it. Imports only torch."""

from __future__ import annotations

from typing import Any

import torch

from saccade.engine.arguments import is_normal_scale
from saccade.engine.backend import Backend, Launchers
from saccade.engine.problem import Problem
from saccade.engine.rule import Row, Rule, square, table, taken, thousands
from saccade.engine.window import why_no_window
from saccade.exact import measured
from saccade.exact.problem import SHORT_TOKENS
from saccade.exact.short.measured import gains
from saccade.hardware import SMALL_SHARED
from saccade.launch.requirements import triton_reasons

MAX_HEAD_DIM = 256
# batch x heads below which host time decides, and torch's function needs less of it. An eager call of ours costs 28 to 64 us of
# host time in forward and 300 us with backward; torch's costs 20 to 29 us and 150 us. In benchmarks/results/h200/short_auto.csv
# forward is 0.5x at 768 problems; at 3,072 it is 1.1x to 1.5x up to S = 64 or D = 32, and 0.8x beyond. With backward it is 0.6x
# to 0.8x at 3,072 and 1.1x to 2.4x at 8,192.
FEWEST_FORWARD, FEWEST = 3072, 8192
# If host time does not count, these kernels are the faster ones up to this many problems beyond 64 tokens too: plain forward
# is 1.2x at 96 problems of D = 64 by kernel time and 0.93x at 768 (1.8x and 1.16x when called from C++); with dropout, masks that
# differ by query and grouped heads calls are 1.3x to 3.1x at 256 problems, and 0.5x to 0.9x at 8,192
FEW = 512
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not(problem: Problem) -> list[str]:
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    reasons += why_no_window(problem.window)
    if problem.rank != 4:
        reasons.append(f"needs tensors of rank 4, [B, H, T, D], got rank {problem.rank}")
    if reasons and torch.compiler.is_compiling():
        return reasons  # lengths may be symbols, and a comparison would add a guard to the graph
    if max(problem.q_len, problem.kv_len) > SHORT_TOKENS:
        reasons.append(f"needs Tq and Tk of at most {SHORT_TOKENS}, got {problem.q_len} and {problem.kv_len}")
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    if problem.dtype == torch.float32 and problem.arch in SMALL_SHARED and max(problem.q_len, problem.kv_len) > 64:
        reasons.append(f"float32 needs Tq and Tk of at most 64 on sm_{problem.arch} (99 KiB of shared memory)")
    if not is_normal_scale(problem.scale):
        reasons.append(f"needs a positive scale that is normal in float32, got {problem.scale}")
    if problem.head_dim > 1 and problem.last_strides != (1, 1, 1):
        reasons.append(f"needs a last stride of 1, got {problem.last_strides} for query, key and value")
    return reasons


def _prefers(problem: Problem) -> bool:
    return not _rule(problem).against


def _rule(problem: Problem) -> Rule:
    """Why these kernels are chosen, or torch's function instead of them.

    Follows h100/short_models.csv and h200/short_auto.csv in benchmarks/results; a test compares the latter with this function.
    """
    if problem.device_type != "cuda":
        return Rule("the interpreter is for tests")
    return _too_small(problem) or measured.rule(problem, "short") or _slower(problem) or taken(gains(problem, _few(problem)))


def _few(problem: Problem) -> bool:
    return not problem.host_counts and problem.batch * problem.heads <= FEW and problem.head_dim <= 64


def _too_small(problem: Problem) -> Rule | None:
    if not problem.host_counts:
        return None
    longest = max(problem.q_len, problem.kv_len)
    problems = problem.batch * problem.heads
    small = longest <= 64 or problem.head_dim <= 32
    fewest = FEWEST_FORWARD if small and not problem.needs_grad else FEWEST
    if problem.bias_grad and longest <= 64:  # Swin windows, 8,192 problems: 0.90x
        fewest = 2 * FEWEST
    if problems >= fewest:
        return None
    direction = "a call with backward" if problem.needs_grad else "a forward call"
    return Rule(
        f"the time of {direction} of {thousands(problems)} problems is host time, of which torch's function needs less below {fewest:,} (B * H); "
        "under CUDA graphs and torch.compile these kernels are chosen",
        table("short_overhead", square(32, 64, 8), card="h200"),
    )


def _slower(problem: Problem) -> Rule | None:
    """The calls for which the kernels themselves are slower."""
    longest, dim = max(problem.q_len, problem.kv_len), problem.head_dim
    grouped = problem.heads != problem.kv_heads
    if problem.q_len == 1:
        return _slower_for_one_query(problem, grouped)
    # full precision uses no matrix units: 1.3x at S = 32, D = 64, but 0.7x at S = 64
    if problem.dtype == torch.float32:
        featured = problem.mask is not None or problem.dropout_p > 0 or grouped
        if longest <= 32 and dim <= 64 and not featured:
            return None
        return Rule(f"float32 is computed exactly, without matrix units: 0.7 of torch's speed at S = 64 {_EARLIER}")
    if problem.mask == "bias":
        if problem.key_mask and longest > 64:
            # 0.059 ms captured for torch's 0.050, and 0.022 by `shared_bias` (H100)
            return Rule("a mask of keys next to a bias, beyond 64 tokens: 0.85 of torch's speed in forward")
        said = "a bias of this shape was measured slower, or not at all"
        return None if _prefers_bias(problem) else Rule(said)
    if longest <= 64 or _few(problem):
        return None
    if problem.dropout_p > 0:
        rows = (square(128, d, 8192, "dropout=") for d in (64, 128))
        return Rule("dropout beyond 64 tokens: 0.55 to 0.75 of torch's speed in forward", table("short_auto", *rows, card="h200"))
    if grouped:
        if problem.needs_grad and problem.mask is None:
            return None
        said = "grouped heads beyond 64 tokens: 0.83 of torch's speed in forward"
        return Rule(said, table("short_auto", square(128, 64, 8192, "Hkv="), card="h200"))
    if problem.mask == "bool":
        said = "a mask that differs by query, beyond 64 tokens: 0.64 of torch's speed"
        return (
            None
            if problem.row_mask
            else Rule(said, table("short_auto", square(128, 64, 8192, "mask[1024x1x128x128]"), card="h200"))
        )
    # plain, causal or with lengths: with backward 1.2x to 2.9x. Forward at D > 32 is 1.0x to 1.8x with the kernels of sm_90,
    # which are used from 2^25 elements; 0.86x to 0.93x below that, and 0.76x to 0.99x where they do not apply
    elements = problem.batch * problem.heads * longest * dim
    if dim <= 32 or problem.needs_grad or (problem.arch == 90 and elements >= 2**25):
        return None
    said = "forward alone beyond 64 tokens at D > 32: 0.76 to 0.99 of torch's speed"
    return Rule(said, table("short_sizes", *(square(s, 64, 3072) for s in (77, 128)), card="h200"))


# these rows are missing from the table since it was measured again
_EARLIER = "in an earlier table, whose rows are not committed now"


def _slower_for_one_query(problem: Problem, grouped: bool) -> Rule | None:
    if problem.mask == "bias":
        return Rule(f"one query with a bias: slower than torch's function {_EARLIER}")
    if not grouped:
        return None
    rows = (Row(1, s, 64, 8192, "Hkv=") for s in (50, 128))
    return Rule("one query with grouped heads: 0.22 to 0.71 of torch's speed", table("short_auto", *rows, card="h200"))


def _prefers_bias(problem: Problem) -> bool:
    """Whether these kernels are faster for a bias: up to D = 64, 1.2x to 4.1x up to 64 tokens and 1.0x to 2.2x at 128; at D = 128
    for one that the batch shares (1.1x to 1.4x). If host time counts, only the latter and Swin's windows were measured."""
    if problem.dropout_p or problem.heads != problem.kv_heads:
        return False
    longest = max(problem.q_len, problem.kv_len)
    if not problem.host_counts and problem.head_dim <= 64:
        return True
    if problem.needs_grad and not problem.bias_grad:
        return False
    if _shared_bias(problem):
        return longest > 32 and problem.head_dim <= 32
    return longest > 64 and problem.head_dim > 32 and problem.mask_rows == 1


def _shared_bias(problem: Problem) -> bool:
    """Whether persistent programs hold the bias on chip: one that the batch shares, or that of a window, which several images share.
    It is not measured yet whether windows gain as much; torch's kernels are also given a copy of their bias."""
    small = max(problem.q_len, problem.kv_len) <= 64 and problem.q_len > 1
    plain = not problem.dropout_p and problem.heads == problem.kv_heads
    shared = problem.mask_rows == 1 or 0 < problem.windows < problem.batch
    return problem.mask == "bias" and shared and small and plain


def _load() -> Launchers:
    from saccade.exact.short.launchers import backward, forward

    return Launchers(forward, backward)


def _forms(problem: Problem) -> Any:
    from saccade.exact.short.choice import forms

    return forms(problem)


SHORT = Backend(
    name="short",
    operation="attention",
    summary="whole rows on chip, Triton, sm_80 and later; CUDA C++ where that is faster on sm_90",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    form=_forms,
    rule=_rule,
    replays=True,
)
