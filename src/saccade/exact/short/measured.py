"""The measured rows nearest to a call, which show what the kernels of `short` gain for its features."""

from __future__ import annotations

from saccade.engine.problem import Problem
from saccade.engine.rule import Row, Source, square, table

# a feature as tables describe it, and a test of a call for it; the first match decides
_FEATURES = (
    ("bias[", lambda p: p.mask == "bias"),
    ("mask[", lambda p: p.mask == "bool"),
    ("dropout=", lambda p: p.dropout_p > 0),
    ("Hkv=", lambda p: p.heads != p.kv_heads),
    ("lengths", lambda p: p.lengths),
    ("causal", lambda p: p.is_causal),
)


def gains(problem: Problem, few: bool) -> Source | None:
    """The table that shows that these kernels are faster for such a call; None if no committed table has it. few: so few problems that
    they are taken beyond 64 tokens too."""
    feature = next((said for said, has in _FEATURES if has(problem)), "")
    longest = max(problem.q_len, problem.kv_len)
    if problem.q_len == 1:
        return _one_query(problem)
    if problem.dtype.itemsize == 4:
        return None
    if not feature:
        return _plain(problem, longest, few)
    if longest <= 64:
        return table("short_auto", *(square(s, d, 8192, feature) for s, d in _SHORT[feature]), card="h200")
    if few:
        return table("short_auto", square(128, 64, 256, feature), card="h200")
    return table("short_auto", *_LONG[feature], card="h200")


_SHORT = {
    "bias[": ((32, 64), (64, 64)),
    "mask[": ((32, 64), (64, 64)),
    "dropout=": ((32, 64), (64, 64)),
    "Hkv=": ((32, 64), (64, 64)),
    "lengths": ((49, 32),),
    "causal": ((49, 32),),
}
_LONG = {
    "bias[": (square(128, 64, 8192, "bias[1x8x128x128]"), square(128, 64, 8192, "bias[1024x8x128x128]")),
    "mask[": (square(128, 64, 8192, "mask[1024x1x1x128]"), square(128, 128, 8192, "mask[1024x1x1x128]")),
    "Hkv=": (square(128, 64, 8192, "Hkv="),),
    "lengths": (square(128, 64, 8192, "lengths"), square(128, 128, 8192, "lengths")),
    "causal": (square(128, 64, 8192, "causal"), square(128, 128, 8192, "causal")),
}


def _one_query(problem: Problem) -> Source:
    if problem.dtype.itemsize == 4:
        return table("short_auto", *(Row(1, s, 64, 8192, "fp32") for s in (50, 128)), card="h200")
    if problem.mask == "bool":
        return table("short_auto", *(Row(1, s, 64, 8192, "mask[") for s in (50, 128)), card="h200")
    return table("short_pooling", *(Row(1, s, 64, 128_000) for s in (32, 128)))


def _plain(problem: Problem, longest: int, few: bool) -> Source:
    if problem.head_dim > 64:
        return table("short_full", square(32 if longest <= 64 else 128, 128, 128_000))
    dim, problems = (32 if problem.head_dim <= 32 else 64), (96 if few else 12_288)
    lengths = (32, 50) if longest <= 64 else (77, 128)
    return table("short_sizes", *(square(s, dim, problems) for s in lengths), card="h200")
