"""Dense attention and its approximations in plain torch, written to be read, and how far an output is from another. As everywhere here
Q is scaled already. `rivals.py` has the same approximations as fast as plain torch makes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mechanism = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention."""
    return torch.softmax(query @ key.mT, -1) @ value


def pruned(keeps: Callable[[Tensor], Tensor]) -> Mechanism:
    """Attention to the scores that `keeps` selects; it sees them in float32 at least, since what 16 bits round to a tie is none."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        kept = keeps(query.to(wide) @ key.to(wide).mT)
        return torch.softmax((query @ key.mT).masked_fill(~kept, float("-inf")), -1) @ value

    return attend


def pooled(x: Tensor, count: int) -> Tensor:
    """Means of `count` equal parts of the rows."""
    return x.unflatten(-2, (count, x.shape[-2] // count)).mean(-2)


def linformer(rank: int) -> Mechanism:
    """Attention to `rank` pooled keys and values."""
    return lambda query, key, value: dense(query, pooled(key, rank), pooled(value, rank))


def performer(features: int) -> Mechanism:
    """Random features, drawn for each head: the same ones in every call."""
    return lambda query, key, value: with_features(orthogonal(query.shape[:2], features, query.shape[-1]))(query, key, value)


def orthogonal(heads: tuple[int, ...], features: int, dim: int) -> Tensor:
    """Normal vectors that are orthogonal in blocks of `dim`, float32 `[*heads, features, dim]`, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(*heads, -(-features // dim), dim, dim, generator=generator)
    lengths = torch.randn(drawn.shape, generator=generator).norm(dim=-1, keepdim=True)
    return (torch.linalg.qr(drawn).Q * lengths).flatten(-3, -2)[..., :features, :]


def with_features(weights: Tensor) -> Mechanism:
    """Performer with given vectors w: features `exp(w x - |x|^2 / 2) / sqrt m`; a common factor keeps them finite and cancels."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dim = query.shape[-1]
        # Q carries all of 1 / sqrt d: half of it goes to K
        query, key = query * dim**0.25, key * dim**-0.25
        logs = [x @ weights.to(x).mT - x.square().sum(-1, keepdim=True) / 2 for x in (query, key)]
        left = torch.exp(logs[0] - logs[0].amax(-1, keepdim=True))
        right = torch.exp(logs[1] - logs[1].amax((-2, -1), keepdim=True))
        return left @ (right.mT @ value) / (left @ right.sum(-2, keepdim=True).mT)

    return attend


def nystromformer(landmarks: int, outer: Mechanism = dense) -> Mechanism:
    """`softmax(Q K_m) softmax(Q_m K_m)^+ softmax(Q_m K) V` with the means of parts as landmarks; outer: what makes the first and the third
    softmax, times what stands right of it."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k = pooled(query, landmarks), pooled(key, landmarks)
        middle = pseudo_inverse(torch.softmax(q @ k.mT, -1))
        return outer(query, k, middle @ outer(q, key, value))

    return attend


def pseudo_inverse(matrix: Tensor, steps: int = 6) -> Tensor:
    """The pseudo-inverses of square matrices, by an iteration of third order that begins with the transpose over both norms."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    norms = matrix.abs().sum(-1).amax(-1) * matrix.abs().sum(-2).amax(-1)
    found = matrix.mT / norms[..., None, None]
    for _ in range(steps):
        product = matrix @ found
        found = found @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return found


def error(found: Tensor, expected: Tensor) -> Tensor:
    """`|found - expected| / |expected|` of each matrix, float32 `[texts, heads]`."""
    return (found - expected).flatten(2).norm(dim=-1) / expected.flatten(2).norm(dim=-1)
