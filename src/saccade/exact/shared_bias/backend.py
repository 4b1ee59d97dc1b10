"""The family as a backend of `attention`: what it declines, and where `auto` takes it. Imports only torch."""

from __future__ import annotations

from typing import Any

import torch

from saccade.engine.arguments import is_normal_scale
from saccade.engine.backend import Backend, Launchers
from saccade.engine.problem import Problem
from saccade.engine.rule import Rule, table, taken, thousands
from saccade.engine.window import why_no_window
from saccade.exact.shared_bias.config import MAX_HEAD_DIM, config_of
from saccade.launch.requirements import triton_reasons
from saccade.launch.triton import pow2

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LONGEST_SHORT = 128  # tokens that the backend `short` takes
# Pairs of a query and a key (B * H * Tq * Tk) below which host time decides. Python launches these kernels, so torch's function needs less of it. The
# bound of forward is an estimate, from about 1e9 pairs a millisecond. With backward it follows the table: 67 million pairs took 1.45 ms and torch's
# 0.77, and 90 million took 1.63 and torch's 2.27.
FEWEST_PAIRS, FEWEST_PAIRS_GRAD = 2**24, 5 * 2**24
MEASURED_HEAD_DIM = 64


def _why_not(problem: Problem) -> list[str]:
    reasons = triton_reasons(problem.device_type, problem.arch, problem.dtype)
    reasons += why_no_window(problem.window)
    if problem.mask != "bias":
        reasons.append("takes a floating attn_mask, got " + ("a boolean one" if problem.mask == "bool" else "none"))
    if problem.rank != 4:
        reasons.append(f"needs tensors of rank 4, [B, H, T, D], got rank {problem.rank}")
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"needs a head dim of 1 to {MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16, float16 or float32, got {problem.dtype}")
    if not is_normal_scale(problem.scale):
        reasons.append(f"needs a positive scale that is normal in float32, got {problem.scale}")
    return reasons


def _prefers(problem: Problem) -> bool:
    return not _rule(problem).against


def _rule(problem: Problem) -> Rule:
    """Calls for which `auto` takes these kernels: those of the table in which they are faster than torch's function, and sizes between them."""
    if problem.device_type != "cuda":
        return Rule("the interpreter is for tests")
    longest = max(problem.q_len, problem.kv_len)
    # beyond 64 tokens `short` is slower with a mask of keys next to a bias; 65 tokens share its largest tile with the 128 that were measured
    if longest <= (LONGEST_SHORT // 2 if problem.key_mask else LONGEST_SHORT):
        return Rule(f"with so few tokens it was not measured, or `short` is level with it; the longest here has {longest}")
    if problem.q_len == 1:
        return Rule("of one query it was not measured")
    if problem.head_dim > MEASURED_HEAD_DIM:
        return Rule(f"kernels were measured up to D = {MEASURED_HEAD_DIM} alone")
    if problem.dtype == torch.float32:
        return Rule("float32 is computed exactly, without matrix units; not measured")
    pairs = problem.batch * problem.heads * problem.q_len * problem.kv_len
    if problem.python_counts and pairs < (FEWEST_PAIRS_GRAD if problem.needs_grad else FEWEST_PAIRS):
        return Rule(f"the time of an eager call of {thousands(pairs)} pairs is host time, of which torch's function needs less")
    return taken(table("shared_bias", card="h200"), "a bias beyond 128 tokens, which torch's function reads again for each row")


def _form(problem: Problem) -> Any:
    return config_of(pow2(max(16, problem.head_dim)), problem.dtype.itemsize, problem.arch)


def _load() -> Launchers:
    from saccade.exact.shared_bias.launchers import backward, forward

    return Launchers(forward, backward)


SHARED_BIAS = Backend(
    name="shared_bias",
    operation="attention",
    summary="a bias of any shape with its gradient, of any number of tokens; a mask of keys beside it, dropout; Triton, sm_80 and later",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    saves_output=True,
    form=_form,
    rule=_rule,
)
