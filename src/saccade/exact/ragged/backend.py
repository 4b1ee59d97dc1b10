"""The ragged family as a backend: what it declines, and where it is preferred. Imports only torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from saccade.engine.backend import Backend, Launchers
from saccade.engine.rule import Rule, Source, square, table, taken
from saccade.engine.window import shown_window
from saccade.exact.long.config import rounded
from saccade.exact.ragged import config
from saccade.exact.ragged.config import (
    FASTER_IN_CHUNKS,
    MAX_HEAD_DIM,
    MOST_AT_ONCE,
    MOST_EAGER,
    TILES,
    fits,
    in_token_tiles,
    tile_config,
    token_config,
)
from saccade.launch.requirements import triton_reasons
from saccade.launch.triton import pow2
from saccade.nvrtc import obstacles

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
    if problem.window is not None and not problem.same_lengths:
        reasons.append(f"takes {shown_window(problem.window)} where queries and keys share one tensor of cu_seqlens, got two")
    return reasons


def _why_no_bias(problem: VarlenProblem) -> list[str]:
    if problem.bias_grad and problem.heads != problem.kv_heads:
        return ["the gradient of a bias needs as many key heads as query heads"]
    return []


_DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def _describe(problem: VarlenProblem) -> str:
    """The shapes of token tiles, if they take such a call, and of a batch of more than one launch."""
    if problem.window is not None:
        return _describe_window(problem)
    block, size, longest = _block(problem.head_dim), problem.dtype.itemsize, max(problem.max_q, problem.max_k)
    buckets = _describe_buckets(problem)
    packed = problem.device_type == "cuda" and problem.same_lengths
    if not packed or not in_token_tiles(size, block, longest, problem.bias is not None):
        return buckets
    most = MOST_EAGER // (problem.heads * block)
    return f"up to {most:,} tokens in {MOST_AT_ONCE:,} sequences {_describe_tokens(problem)}; beyond, {buckets}"


def _describe_buckets(problem: VarlenProblem) -> str:
    block, size = _block(problem.head_dim), problem.dtype.itemsize
    longest, featured = max(problem.max_q, problem.max_k), problem.bias is not None or problem.dropout_p > 0
    directions = ("fwd", "bwd") if problem.needs_grad else ("fwd",)
    from saccade.exact.long.choice import chunks, kind_of_packed
    from saccade.exact.ragged import choice

    kind = kind_of_packed(problem)
    all_by_chunks = choice.by_chunks(kind, *_DIRECTIONS.values())
    parts = []
    for below, tile in zip((0, *TILES), TILES, strict=False):
        if longest <= below or not fits(tile, block, size, problem.arch):
            continue
        for d in directions:
            by_chunks = all_by_chunks and tile >= FASTER_IN_CHUNKS
            shape = chunks(_DIRECTIONS[d], kind) if by_chunks else tile_config(d, tile, block, size, featured, problem.arch)
            parts.append(f"{d} to {tile} tokens: {shape}")
    if longest > TILES[-1] or not parts:
        parts += [f"{d} beyond: {choice.long_form(_DIRECTIONS[d], kind)}" for d in directions]
    return ", ".join(parts)


def _describe_window(problem: VarlenProblem) -> str:
    from saccade.exact.long import choice
    from saccade.exact.long import config as long_config

    kind = choice.kind_of_packed(problem)
    if problem.head_dim > long_config.TIMED_WINDOWS or not choice.takes(kind):
        return _describe_tokens(problem)
    return ", ".join(
        [f"{d}: {choice.chunks(d, kind)}" for d in (("forward", "backward") if problem.needs_grad else ("forward",))]
    )


def _describe_tokens(problem: VarlenProblem) -> str:
    block, size = _block(problem.head_dim), problem.dtype.itemsize
    directions = ("fwd", "bwd") if problem.needs_grad else ("fwd",)
    longest, found = max(problem.max_q, problem.max_k), []
    for d in directions:
        name = _DIRECTIONS[d]
        numbers = (problem.arch, size, problem.head_dim, longest, problem.window is not None)
        if config.in_tokens_sm90(name, *numbers) and not obstacles("90a"):
            said = f"{d}: CUDA C++ {config.TOKENS_SM90_CONFIGS[name, rounded(problem.head_dim)]}"
            captured = problem.dropout_p == 0 or problem.head_dim <= config.DROPOUT_TOKENS_SM90
            by_triton = f" below {config.FEWEST_TOKENS_SM90 // (problem.heads * block):,} tokens" * captured
            found.append(f"{said}, in CUDA graphs{by_triton} {token_config(d, size, problem.arch, block)}")
        else:
            found.append(f"{d}: {token_config(d, size, problem.arch, block)}")
    return ", ".join(found)


def _load() -> Launchers:
    from saccade.exact.ragged.launchers import backward, forward

    return Launchers(forward, backward)


def _prefers(problem: VarlenProblem) -> bool:
    return not _rule(problem).against


# the longest sequences of the measured batches, and their problems (sequences * H)
_MEASURED = ((64, 196_608), (128, 49_152), (417, 12_288), (512, 12_288))


def _rule(problem: VarlenProblem) -> Rule:
    """Follows benchmarks/results/h200/short_ragged.csv."""
    if problem.device_type != "cuda":
        return Rule("the interpreter is for tests")
    if problem.window is not None:
        return _window_rule(problem)
    longest, dim = max(problem.max_q, problem.max_k), next((d for d in (32, 64) if problem.head_dim <= d), 128)
    near = next((row for row in _MEASURED if longest <= row[0]), _MEASURED[-1])
    source = table("short_ragged", square(near[0], dim, near[1]), card="h200")
    if longest > near[0]:
        said = f"beyond {near[0]} tokens, which were measured, torch's packed attention is taken; the longest here has {longest}"
        return Rule(said, source)
    if dim == 128 and longest > TILES[-1] and not problem.needs_grad:
        both = table("short_ragged", *(square(most, dim, count) for most, count in _MEASURED if most > TILES[-1]), card="h200")
        return Rule(
            f"forward alone beyond D = 64 and {TILES[-1]} tokens: 0.89 to 1.01 of the speed of torch's packed attention", both
        )
    return taken(source, "measured faster than torch's packed attention")


# Keys of a wide window, and the longest sequence up to which our kernels were no slower with backward. Token tiles run if
# CUDA C++ does not take a call: at 8,192 tokens they took 1.09 times as long as torch's kernel. CUDA C++ beyond D = 64 took 1.04 times as long.
_WIDE_WINDOW, _LONGEST_WIDE = 512, 2048
_NOTES = Source("docs/notes/ragged.md")  # these trials are in no table


def _window_rule(problem: VarlenProblem) -> Rule:
    """Follows benchmarks/results/h200/windows.csv: +-64 and +-256 keys and 1,023 earlier ones, longest 256 to 8,192."""
    from saccade.exact.long import choice
    from saccade.exact.long import config as long_config

    if problem.head_dim > long_config.MAX_HEAD_DIM or problem.dtype.itemsize > 2:
        return Rule(f"with a window these kernels were measured in 16 bits up to D = {long_config.MAX_HEAD_DIM} alone")
    left, right = problem.window or (None, None)
    keys, longest = math.inf if left is None or right is None else left + right, max(problem.max_q, problem.max_k)
    if choice.takes(choice.kind_of_packed(problem)):
        if 64 < problem.head_dim < long_config.MAX_HEAD_DIM:
            said = f"with a window these kernels compute {long_config.MAX_HEAD_DIM} columns beyond D = 64, and were measured with as many"
            return Rule(f"{said}, got D = {problem.head_dim}", _NOTES)
        wide = problem.head_dim > 64 and problem.needs_grad and keys > _WIDE_WINDOW and longest > _LONGEST_WIDE
        if wide and problem.heads == problem.kv_heads:  # with 8 heads of keys for 32, torch's took 1.12 times as long at 8,192
            said = f"with backward, windows of more than {_WIDE_WINDOW} keys beyond D = 64 and {_LONGEST_WIDE} tokens, heads not grouped"
            return Rule(f"{said}: 0.96 of the speed of torch's packed attention at 8,192", _NOTES)
        source = table("windows", card="h200")
        return taken(source, "measured faster than torch's packed attention in CUDA graphs, forward and with backward")
    if problem.head_dim > 64:
        return Rule("with a window beyond D = 64 the kernels of sm_90 alone were measured")
    most = _LONGEST_WIDE if keys <= _WIDE_WINDOW else _WIDE_WINDOW
    if problem.needs_grad and keys >= _WIDE_WINDOW and longest > most:
        said = f"with backward, windows of {_WIDE_WINDOW} keys and more go to torch's packed attention beyond {most} tokens"
        return Rule(f"{said}: it took 0.92 of the time at 8,192", _NOTES)
    return taken(
        _NOTES, "measured 1.01 to 1.91 times as fast as torch's packed attention in CUDA graphs, forward and backward together"
    )


def _limits(args: Any) -> tuple[int, int, int, bool, bool]:
    from saccade.exact.ragged.call import limits

    return limits(args)


RAGGED = Backend(
    name="ragged",
    operation="attention_varlen",
    summary="real tokens alone, a tile for each bucket of lengths, Triton, sm_80 and later; beyond 64 tokens CUDA C++ on sm_90",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    saves_output=True,
    form=_describe,
    rule=_rule,
    replays=True,
    limits=_limits,
)
