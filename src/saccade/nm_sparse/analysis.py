"""How much quality pruning loses and how much time it could save: measured on given scores, and by the closed forms of the Dfss
paper.

Letters of the formulas:
    s       density, the kept share of the scores
    p       the exponent of the quality
    sigma   the standard deviation of normal scores
    n, d    the sequence length and the head dim
    T       the side of a tile of the paper's matrix products

The speed-ups count the memory traffic of the unfused pipeline, whose three kernels write and read the scores. They do not apply to
a fused kernel, which moves no scores.

Source: "Dynamic N:M Fine-grained Structured Sparse Attention Mechanism" (Dfss, paper 003), section 4 and appendices A.2 to A.5.
Eq. 8 and Eq. 33 are printed upside down in the paper; the inverted forms used here give the numbers quoted in its text.

A density that is not in 0..1 raises `InvalidArgument`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.engine.arguments import FLOATING, real_number, shown
from saccade.engine.kinds import check_kinds
from saccade.errors import InvalidArgument
from saccade.nm_sparse.problem import check_dense, parse_pattern
from saccade.nm_sparse.reference import select


def kept_by_pattern(scores: Tensor, pattern: str, dense_first: int = 0, dense_recent: int = 0) -> Tensor:
    """The `scores [.., Tk]` (-inf if invisible) that an N:M pattern keeps, bool; the rule of `nm_sparse_attention`.

    Args:
        scores: `[.., Tk]`, or `[.., Tq, Tk]` of the queries from 0 on, which `dense_first` and `dense_recent` need.
        pattern: "N:M".
        dense_first: as in `nm_sparse_attention`.
        dense_recent: as in `nm_sparse_attention`.

    Source:
        Dfss (paper 003), section 3; groups that are not pruned are ours.
    """
    _check_scores(scores)
    keep, group = parse_pattern(pattern)
    dense = check_dense(dense_first, dense_recent, group)
    if any(dense) and scores.dim() < 2:
        raise InvalidArgument(f"scores has shape {list(scores.shape)}; with dense_first or dense_recent it must be [.., Tq, Tk]")
    return select(scores, keep, group, *dense)


def kept_by_top_k(scores: Tensor, density: float) -> Tensor:
    """The `scores [.., Tk]` that are among the `round(density * Tk)` largest of their row, at least one; bool. NaN ranks first."""
    _check_scores(scores)
    count = min(max(1, round(_density(density) * scores.shape[-1])), scores.shape[-1])
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (scores != float("-inf"))


def kept_by_truncation(scores: Tensor, density: float) -> Tensor:
    """The paper's fixed pattern, the first `round(density * Tk)` keys of every row; bool."""
    _check_scores(scores)
    count = round(_density(density) * scores.shape[-1])
    return (torch.arange(scores.shape[-1], device=scores.device) < count).expand_as(scores) & (scores != float("-inf"))


def quality(scores: Tensor, kept: Tensor, p: float = 1.0) -> Tensor:
    """`Q^p`, the mean over rows of `sum(kept A^p) / sum(A^p)` with `A = softmax(scores)` (Eq. 2); 1 if nothing is lost.

    Args:
        scores: `[.., Tq, Tk]`, -inf where invisible; rows without a visible key are skipped.
        kept: bool, the same shape.
        p: a larger p gives large weights more influence.

    Returns:
        float64 `[..]`.

    Source:
        Dfss (paper 003), Eq. 2.
    """
    _check_scores(scores)
    check_kinds(kept=kept)
    if not isinstance(kept, Tensor) or kept.shape != scores.shape or kept.dtype != torch.bool or kept.device != scores.device:
        given = f"{kept.dtype} of shape {list(kept.shape)} on {kept.device}" if isinstance(kept, Tensor) else shown(kept)
        raise InvalidArgument(f"kept is {given}; it must be bool of the shape of scores, {list(scores.shape)}")
    if scores.dim() < 2:
        raise InvalidArgument(f"scores has shape {list(scores.shape)}; it must be [.., Tq, Tk]")
    (p,) = _positive(p=p)
    sees = (scores != float("-inf")).any(-1)
    # the sum of a row cancels, so softmax(p * scores) is A^p up to a factor
    powers = torch.softmax(p * scores.double().masked_fill(~sees.unsqueeze(-1), 0.0), dim=-1)
    share = (powers * kept).sum(-1).masked_fill(~sees, 0.0)
    return share.sum(-1) / sees.sum(-1)


def top_k_quality(p_sigma: float, density: float) -> float:
    """`Q^p` of the largest share `s` of many independent normal scores, `(1 + erf(p sigma / sqrt 2 - erfinv(1 - 2 s))) / 2` (Eq.
    3)."""
    edge = torch.erfinv(torch.tensor(1 - 2 * _density(density), dtype=torch.float64, device="cpu")).item()
    return (1 + math.erf(_positive(p_sigma=p_sigma)[0] / math.sqrt(2) - edge)) / 2


def fixed_quality(density: float) -> float:
    """`Q^p` of a pattern that does not look at the scores: `s` (Eq. 3)."""
    return _density(density)


def one_of_two_quality(p_sigma: float) -> float:
    """`Q^p` of 1:2 on independent normal scores, `(1 + erf(p sigma / 2)) / 2`; a lower bound of that of 2:4 (Eq. 3)."""
    return (1 + math.erf(_positive(p_sigma=p_sigma)[0] / 2)) / 2


def top_k_speedup(density: float, head_dim: float = 64, tile: float = 128) -> float:
    """The largest speed-up of top-K attention over dense, for `n >> d` and with free selection of the K keys (Eq. 4)."""
    d, t = _positive(head_dim=head_dim, tile=tile)
    s = _density(density)
    return (4 * d + 3 * t) / (2 * d + t + (d + 2 * t + d * t) * s)


def fixed_speedup(density: float, head_dim: float = 64, tile: float = 128) -> float:
    """The speed-up of a fixed pattern made of whole tiles, for `n >> d` (Eq. 5)."""
    d, t = _positive(head_dim=head_dim, tile=tile)
    s = _density(density)
    return (4 * d + 3 * t) / ((1 + 3 * s) * d + 3 * s * t)


def nm_speedup(head_dim: float = 64, tile: float = 128) -> float:
    """The speed-up of 1:2 and 2:4, for `n >> d`: `(64 d + 48 T) / (57 d + 25 T)` (Eq. 6)."""
    d, t = _positive(head_dim=head_dim, tile=tile)
    return (64 * d + 48 * t) / (57 * d + 25 * t)


def top_k_density_as_fast(head_dim: float = 64, tile: float = 128) -> float:
    """The density at which top-K could be as fast as 1:2 and 2:4 (Eq. 7)."""
    d, t = _positive(head_dim=head_dim, tile=tile)
    width = d + 2 * t + d * t
    return (4 * d + 3 * t) / (nm_speedup(d, t) * width) - (2 * d + t) / width


def fixed_density_as_fast(head_dim: float = 64, tile: float = 128) -> float:
    """The density at which a fixed pattern is as fast as 1:2 and 2:4 (Eq. 8, whose first fraction is printed upside down)."""
    d, t = _positive(head_dim=head_dim, tile=tile)
    return (4 * d + 3 * t) / (nm_speedup(d, t) * (3 * d + 3 * t)) - d / (3 * d + 3 * t)


def dense_traffic(length: float, head_dim: float = 64, tile: float = 128) -> float:
    """Numbers that unfused dense attention moves for one head: scores, softmax, weights times values (Table 5)."""
    n, d, t = _positive(length=length, head_dim=head_dim, tile=tile)
    return n * n * (2 * d / t + 1) + 2 * n * n + n * d * (2 * n / t + 1)


def nm_traffic(length: float, head_dim: float = 64, tile: float = 128) -> float:
    """The same for 1:2 and 2:4: half of the scores, and metadata of a sixteenth (denominator of Eq. 6)."""
    n, d, t = _positive(length=length, head_dim=head_dim, tile=tile)
    return n * n * (2 * d / t + 1 / 2 + 1 / 16) + n * n + n * d * (n / t + n / (2 * t) + n / (16 * t) + 1)


def performer_traffic(length: float, head_dim: float = 64, tile: float = 128, features: float = 266) -> float:
    """The same for a Performer with `m` random features, `d ln d` by default (Eq. 32 and 33)."""
    n, d, t, m = _positive(length=length, head_dim=head_dim, tile=tile, features=features)
    projected = 2 * (n * m * (2 * d / t + 1) + n * (d + 1) + n * (m + 1) + n * (m + 3))
    return projected + m * (n + 1) + n * (m / t + m + 1) + m * d * (2 * n / t + 1) + n * d * (2 * m / t + 1) + n


def performer_speedup(length: float, head_dim: float = 64, tile: float = 128, features: float = 266) -> float:
    """The speed-up of a Performer over dense (Eq. 33, printed upside down)."""
    return dense_traffic(length, head_dim, tile) / performer_traffic(length, head_dim, tile, features)


def _density(density: float) -> float:
    number = real_number(density)
    if number is None or not 0.0 <= number <= 1.0:
        raise InvalidArgument(f"density is {shown(density)}; it must be in 0..1")
    return number


def _positive(**given: float) -> tuple[float, ...]:
    """Numbers that are finite and above 0."""
    found = []
    for name, value in given.items():
        number = real_number(value)
        if number is None or not 0.0 < number < math.inf:
            raise InvalidArgument(f"{name} is {shown(value)}; it must be positive, and a finite number")
        found.append(number)
    return tuple(found)


def _check_scores(scores: Tensor) -> None:
    check_kinds(scores=scores)
    if not isinstance(scores, Tensor) or scores.dtype not in FLOATING or scores.dim() < 1:
        raise InvalidArgument(f"scores is {shown(scores)}; it must be a floating-point torch.Tensor [.., Tk]")
