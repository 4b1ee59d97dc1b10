"""The kernels of long sequences as a backend of `attention`, for dense rows `[B, H, T, D]`: beyond 128 tokens, and from 65 on if they are faster.

The family `ragged` runs the same kernels for packed sequences. With a bias, `shared_bias` computes the numbers of its rows and its gradient.
"""

from __future__ import annotations

import torch

from saccade.engine.arguments import is_normal_scale
from saccade.engine.backend import Backend, Launchers
from saccade.engine.problem import Problem
from saccade.engine.rule import Rule, Source, square, table, taken, thousands
from saccade.exact import measured
from saccade.exact.long import config
from saccade.exact.problem import SHORT_TOKENS
from saccade.launch.requirements import triton_reasons

SHORTEST, LONGEST = 65, 577  # the measured range; the kernels take other lengths too
# Problems from which these kernels are faster than those of `short` up to 128 tokens, by the largest D, forward and with backward. Timed in CUDA
# graphs (docs/notes/long.md). From FILLING numbers on, with rows and columns rounded up to tiles, `short` has kernels that are faster again.
FEWEST_SHORT = {32: (3072, 768), 64: (768, 384), 128: (384, 768)}
FILLING = 2**25
_DTYPES = (torch.bfloat16, torch.float16)
# Problems (B * H) from which backward itself is faster, by the most tokens: a multiprocessor computes the gradients of one problem at a time.
# In CUDA graphs, D = 64: 1.32x at 12 problems of 160, 1.09x at 48 of 384, 0.88x at 48 and 1.16x at 96 of 512 (docs/notes/long.md).
FEWEST_PROBLEMS = ((192, 1), (384, 48), (LONGEST, 96))
FEWEST_WIDE = 264  # beyond D = 64
# Numbers of q from which an eager call that Python launches takes longer than our host time, forward and with backward. Half as many up to D = 32.
# By short_sizes forward is 1.01x at 1,536 problems of S = 197, D = 64; with backward 3,072 of them are 0.93x, and 3,072 of S = 257 are 1.43x.
FEWEST_FORWARD, FEWEST = 2**24, 3 * 2**24
# The same for calls with a bias that C++ does not replay, in pairs of a query and a key (B * H * Tq * Tk). These are the bounds of `shared_bias`. Small
# replayed calls take 9 to 20 us, and 138 to 238 with backward. torch's take 14 to 60 and 145 to 391 (H200, docs/notes/long.md).
FEWEST_PAIRS, FEWEST_PAIRS_GRAD = 2**24, 5 * 2**24
# Problems from which calls with a bias were timed, by the most tokens: a row and a head is a block of backward (docs/notes/long.md)
FEWEST_BIASED = ((256, 32), (512, 48), (1024, 192))


def _why_not(problem: Problem) -> list[str]:
    if problem.device_type != "cuda" or problem.arch != 90:
        device = f"sm_{problem.arch}" if problem.device_type == "cuda" else problem.device_type
        return [f"needs an sm_90 GPU (its wgmma and copy engine), got {device}"]
    reasons = []
    if problem.dtype not in _DTYPES:
        reasons.append(f"needs bfloat16 or float16, got {problem.dtype}")
    if problem.rank != 4:
        reasons.append(f"needs tensors of rank 4, [B, H, T, D], got rank {problem.rank}")
    if problem.mask == "bias":
        reasons += _why_no_bias(problem)
    sharing = problem.q_len * (problem.heads // max(1, problem.kv_heads))
    if problem.heads != problem.kv_heads and sharing > config.MAX_SHARING and problem.window is None:
        reasons.append(
            f"needs at most {config.MAX_SHARING:,} queries that share a key head (Tq * H / Hkv), got {thousands(sharing)}"
        )
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= config.MAX_HEAD_DIM:
        reasons.append(f"needs a head dim that is a multiple of 8, from 8 to {config.MAX_HEAD_DIM}, got {problem.head_dim}")
    if problem.value_dim != problem.head_dim:
        reasons.append(f"needs values as wide as keys, got D = {problem.head_dim} and Dv = {problem.value_dim}")
    most = config.most_tokens(problem.window is not None)
    if max(problem.q_len, problem.kv_len) > most:
        reasons.append(f"needs Tq and Tk of at most {most}, got {problem.q_len} and {problem.kv_len}")
    if not is_normal_scale(problem.scale):
        reasons.append(f"needs a positive scale that is normal in float32, got {problem.scale}")
    if reasons:
        return reasons
    # checked last and imported late: importing the compiler imports torch.compile
    from saccade.nvrtc import obstacles

    return list(obstacles("90a"))


def _why_no_bias(problem: Problem) -> list[str]:
    reasons, shape = [], problem.mask_shape or ()
    if problem.bias_dtype not in (None, problem.dtype):
        reasons.append(f"needs a bias in the dtype of query, {problem.dtype}, got {problem.bias_dtype}")
    if shape[-2:] != (problem.q_len, problem.kv_len):
        reasons.append(f"needs a bias for each query and key, [.., {problem.q_len}, {problem.kv_len}], got {list(shape)}")
    if problem.needs_grad:
        reasons += triton_reasons(
            problem.device_type, problem.arch, problem.dtype
        )  # the numbers of the rows are those of `shared_bias`
    if problem.needs_grad and problem.head_dim > config.MAX_BIAS_HEAD_DIM:
        most = config.MAX_BIAS_HEAD_DIM
        reasons.append(f"needs a head dim of at most {most} for the gradients of a call with a bias, got {problem.head_dim}")
    return reasons


def _prefers(problem: Problem) -> bool:
    return not _rule(problem).against


_NOTES = Source("docs/notes/long.md")  # the only place with times in CUDA graphs and next to those of `short`


def _rule(problem: Problem) -> Rule:
    """Follows benchmarks/results/h200/short_long.csv and short_sizes.csv."""
    if problem.mask == "bias":
        return _rule_of_biases(problem)
    shortest, longest = sorted((problem.q_len, problem.kv_len))
    if shortest < SHORTEST or longest > LONGEST or shortest <= SHORT_TOKENS < longest:
        range_of = f"{SHORTEST} to {SHORT_TOKENS}, or {SHORT_TOKENS + 1} to {LONGEST}, queries and keys"
        ends = table("short_long", square(160, 64, 13_104), square(LONGEST, 64, 3632), card="h200")
        return Rule(f"was measured with {range_of}, got {problem.q_len} and {problem.kv_len}", ends)
    return host_time(problem) or measured.rule(problem, "long") or unmeasured_rule(problem)


def _rule_of_biases(problem: Problem) -> Rule:
    """Calls with a bias, where they were timed (`config.TIMED_BIAS_TOKENS`)."""
    shortest, longest = sorted((problem.q_len, problem.kv_len))
    (least_dim, most_dim), (least, most) = config.TIMED_BIAS_HEAD_DIM, config.TIMED_BIAS_TOKENS
    if not least_dim <= problem.head_dim <= most_dim or shortest < least or longest > most:
        ranges = f"D = {least_dim} to {most_dim} and {least} to {most} tokens"
        return Rule(
            f"biases were timed at {ranges}, got D = {problem.head_dim}, {problem.q_len} queries and {problem.kv_len} keys",
            _NOTES,
        )
    matrices = problem.mask_rows * ((1, 1, 1) + (problem.mask_shape or ()))[-3]
    if problem.batch * problem.heads < 2 * matrices:
        return Rule("two teams of a block take rows that share a bias, and here each row and head has its own", _NOTES)
    problems = problem.batch * problem.heads
    fewest = next(count for tokens, count in FEWEST_BIASED if longest <= tokens)
    if problems < fewest:
        return Rule(f"up to {longest} tokens a bias was timed from {fewest} problems (B * H) on, got {problems}", _NOTES)
    pairs = problems * problem.q_len * problem.kv_len
    if problem.host_counts and pairs < (FEWEST_PAIRS_GRAD if problem.needs_grad else FEWEST_PAIRS):
        return Rule(
            f"the time of an eager call of {thousands(pairs)} pairs is host time, of which torch's function needs less", _NOTES
        )
    return taken(_NOTES, "a bias that rows share, whose tiles two of them read at once")


def unmeasured_rule(problem: Problem) -> Rule:
    """The rule of calls far from every committed row."""
    longest = max(problem.q_len, problem.kv_len)
    slower = _slower_than_short if longest <= SHORT_TOKENS else _slower
    return (
        _not_timed(problem, longest)
        or _too_small(problem, longest)
        or slower(problem, longest)
        or taken(_gains(problem, longest))
    )


def _features(problem: Problem) -> list[str]:
    """The features that a call has besides `lengths` and a causal mask, as `config.TIMED_TOKENS` names them."""
    present = (problem.heads != problem.kv_heads, problem.mask is not None, problem.dropout_p > 0)
    return [name for name, there in zip(config.TIMED_TOKENS, present, strict=True) if there]


def _not_timed(problem: Problem, longest: int) -> Rule | None:
    found = _features(problem)
    if not found:
        return None
    if len(found) > 1:
        return Rule(f"{' and '.join(found)} were not timed together on these kernels", _NOTES)
    name = found[0]
    if name == "masks" and problem.row_mask and longest <= SHORT_TOKENS:
        return Rule("a mask that all queries share was timed on the kernels of `short`", _NOTES)
    most = config.TIMED_TOKENS[name] if problem.needs_grad else min(config.TIMED_FORWARD, config.TIMED_TOKENS[name])
    if longest <= most and config.timed(name, problem.head_dim):
        return None
    said = f"these kernels were timed with {name} at D = {config.TIMED_FROM[name]} to {config.TIMED_HEAD_DIM} and up to {most} tokens"
    return Rule(f"{said}, got D = {problem.head_dim} and {longest}", _NOTES)


def _gains(problem: Problem, longest: int) -> Source:
    if longest <= SHORT_TOKENS or _features(problem):
        return _NOTES
    if problem.head_dim > 64:
        return table("short_long", square(160, 128, 6552), square(197, 128, 5320), card="h200")
    if problem.lengths:
        return table("short_long", square(512, 64, 3072, "lengths"), card="h200")
    if problem.is_causal:
        # without a gradient, 256 tokens ran at 0.92 of torch's speed on an H100; an H200's measured row has 1.24
        lengths = ((256, 8192), (512, 4096)) if problem.needs_grad else ((512, 4096),)
        return table("short_long", *(square(s, 64, n, "causal") for s, n in lengths), card="h200")
    rows = ((197, 21_288), (577, 7264)) if problem.head_dim <= 32 else ((197, 10_640), (577, 3632))
    return table("short_long", *(square(s, 32 if problem.head_dim <= 32 else 64, n) for s, n in rows), card="h200")


def _launched_by_python(problem: Problem) -> bool:
    """C++ replays all calls but those under masks, and backward beyond D = 64, where another kernel computes delta."""
    by_python = problem.mask is not None or (problem.needs_grad and problem.head_dim > 64)
    return problem.python_counts if by_python else problem.host_counts


def host_time(problem: Problem) -> Rule | None:
    """The rule of eager calls that Python launches and that end before it launched them."""
    fewest = (FEWEST if problem.needs_grad else FEWEST_FORWARD) // (2 if problem.head_dim <= 32 else 1)
    if problem.batch * problem.heads * problem.q_len * problem.head_dim >= fewest or not _launched_by_python(problem):
        return None
    said = f"the time of an eager call of fewer than {fewest:,} numbers (B * H * Tq * D) is host time, of which torch's function needs less"
    return Rule(said, table("short_overhead", square(32, 64, 8), card="h200"))


def _too_small(problem: Problem, longest: int) -> Rule | None:
    if not problem.needs_grad or (problem.python_counts and not _launched_by_python(problem)):
        return None  # host time of a call with backward: 82 us if C++ replays it, 115 us for torch's
    fewest = FEWEST_WIDE if problem.head_dim > 64 else next(count for most, count in FEWEST_PROBLEMS if longest <= most)
    owned, letter = problem.batch * problem.kv_heads, "H" if problem.heads == problem.kv_heads else "Hkv"
    if owned >= fewest:
        return None
    said = f"{owned} problems (B * {letter}) do not fill a GPU, of which each multiprocessor takes one at a time in backward; {fewest} do"
    return Rule(said, _NOTES)


def _slower_than_short(problem: Problem, longest: int) -> Rule | None:
    problems, dim = problem.batch * problem.heads, next(d for d in FEWEST_SHORT if problem.head_dim <= d)
    fewest = FEWEST_SHORT[dim][problem.needs_grad]
    if problems < fewest:
        said = f"up to {SHORT_TOKENS} tokens the kernels of `short` are faster for fewer than {fewest} problems (B * H), got {problems}"
        return Rule(said, _NOTES)
    if _features(problem):
        return None  # `short` has its fastest kernels for none of them
    # forward at D <= 32 is faster for any number: 1.44x to 1.83x torch at 12,288 problems for 1.24x to 1.47x
    if problems * SHORT_TOKENS * dim >= FILLING and not problem.lengths and (problem.needs_grad or dim > 32):
        filling = FILLING // (SHORT_TOKENS * dim)
        said = f"up to {SHORT_TOKENS} tokens the kernels of `short` are faster from {filling:,} problems (B * H) on, got {thousands(problems)}"
        return Rule(said, _NOTES)
    if problem.needs_grad or problem.lengths or dim == 32:
        return None
    # against torch's function: D = 64 1.09x at 112 tokens and 0.97x at 128, D = 128 1.04x at 77 and 0.98x at 96, for 1,536 problems
    most = 80 if dim == 128 else 112
    if longest <= most or (dim == 64 and problems <= 1024):
        return None
    return Rule(f"forward alone beyond {most} tokens: 0.96 to 0.98 of torch's speed", _NOTES)


def _slower(problem: Problem, longest: int) -> Rule | None:
    """The calls for which the kernels themselves are slower."""
    if problem.head_dim <= 64:
        return None
    losing = table("short_long", square(384, 128, 2728), square(512, 128, 2048), card="h200")
    if problem.needs_grad:
        said = "beyond D = 64 and 256 tokens: 0.8 of torch's speed with backward"
        return None if longest <= 256 else Rule(said, losing)
    filled = problem.q_len % 128 == problem.kv_len % 128 == 0
    if longest <= 257 and not filled:
        return None
    return Rule("beyond D = 64: 0.91 to 0.98 of torch's speed in forward where tokens fill its tiles", losing)


def _load() -> Launchers:
    from saccade.exact.long.launchers import backward, forward

    return Launchers(forward, backward)


def _describe(problem: Problem) -> str:
    from saccade.exact.long.choice import chunks, kind_of_dense

    directions = ("forward", "backward") if problem.needs_grad else ("forward",)
    return ", ".join(f"{d}: {chunks(d, kind_of_dense(problem))}" for d in directions)


def _not_timed_at_all(problem: Problem) -> str:
    if problem.window is not None:
        return "its windows are not timed on dense rows"
    return ""


LONG = Backend(
    name="long",
    operation="attention",
    summary="65 tokens and more, plain, causal, in windows, under boolean masks or a bias, grouped heads, dropout; backward in five products; CUDA C++, sm_90",
    why_not=_why_not,
    prefers=_prefers,
    launchers=_load,
    saves_output=True,
    form=_describe,
    by_name_only=_not_timed_at_all,
    spares_reference=True,
    rule=_rule,
    replays=True,
)
