"""The efficient transformers that Dfss compares with (its Fig. 5 and 14), as fast as plain torch makes them.
`approximations.py` says what they should compute.

Each takes query, key and value `[B, H, n, D]`, Q not scaled, and returns `[B, H, n, D]`, like torch's function. Wherever one of them has
a softmax it calls torch's fused attention, which is faster than the steps by themselves, and whatever does not depend on the tokens is
made before. Nothing is compiled and nothing is trained. These choices are ours, since the text of Dfss does not say:

    performer       positive orthogonal features, the same for all heads; m = d ln d = 266 at d = 64, as in Dfss
    linformer       256 projected keys and values, one dense matrix for all heads
    nystromformer   64 landmarks and six iterations for the pseudo-inverse, in float32; without its learned convolution
    window          128 keys on each side of the query, in blocks of 128 queries that see three blocks of keys
"""

from __future__ import annotations

import math

import approximations
import torch
import torch.nn.functional as F
from approximations import Mechanism
from nm_check import Contender
from torch import Tensor

FEATURES, RANK, LANDMARKS, REACH = 266, 256, 64, 128


def rivals(length: int, dim: int, dtype: torch.dtype, device: str) -> dict[str, Contender]:
    """By name, for sequences of a length that is a multiple of RANK, LANDMARKS and REACH."""
    weights = approximations.orthogonal((), FEATURES, dim).to(device)
    matrix, seen = pooling(RANK, length, device).to(dtype), blocks_of_window(length, REACH).to(device)
    return {
        "performer": Contender(performer(weights.to(dtype)), approximations.with_features(weights)),
        "linformer": Contender(linformer(matrix), approximations.linformer(RANK)),
        "nystromformer": Contender(nystromformer(F.scaled_dot_product_attention), approximations.nystromformer(LANDMARKS)),
        "window": Contender(window(seen, dtype), approximations.pruned(lambda scores: near(scores, REACH))),
    }


def performer(weights: Tensor) -> Mechanism:
    """With vectors `[m, D]`. Its products have m columns as they are: 266 is no multiple of 8, and rounding it up would be another
    mechanism."""

    scaled = (weights * weights.shape[-1] ** -0.25).mT

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # of a query |q|^2 is one factor for all its features and cancels; of a key it does not
        left, right = query @ scaled, key @ scaled
        left = torch.exp(left - left.amax(-1, keepdim=True))
        right = right - key.square().sum(-1, keepdim=True) * (0.5 * weights.shape[-1] ** -0.5)
        right = torch.exp(right - right.amax((-2, -1), keepdim=True))
        return left @ (right.mT @ value) / (left @ right.sum(-2, keepdim=True).mT)

    return attend


def linformer(matrix: Tensor) -> Mechanism:
    """With a projection `[rank, n]` of keys and values."""
    return lambda query, key, value: F.scaled_dot_product_attention(query, projected(key, matrix), projected(value, matrix))


def projected(x: Tensor, matrix: Tensor) -> Tensor:
    """`[B, H, n, D]` as `[B, H, rank, D]`, all heads in one product."""
    rows = x.transpose(1, 2).flatten(2)
    # bmm, because matmul might copy the rows to fold the batch into them
    found = torch.bmm(matrix.expand(x.shape[0], -1, -1), rows)
    return found.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)


def pooling(rank: int, length: int, device: str) -> Tensor:
    """The matrix of a projection, float32 `[rank, length]`: each row takes the mean of an equal part of the sequence."""
    return torch.eye(rank, device=device).repeat_interleave(length // rank, dim=1) * (rank / length)


def nystromformer(outer: Mechanism) -> Mechanism:
    """Two fused attentions, `outer`, around the pseudo-inverse of the landmarks' scores."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        some_queries, some_keys = (approximations.pooled(x, LANDMARKS) for x in (query, key))
        scores = some_queries @ some_keys.mT * query.shape[-1] ** -0.5
        middle = approximations.pseudo_inverse(torch.softmax(scores, -1, dtype=torch.float32))
        summed = outer(some_queries, key, value)
        return outer(query, some_keys, (middle @ summed.float()).to(value.dtype))

    return attend


def window(seen: Tensor, dtype: torch.dtype) -> Mechanism:
    """With the mask of `blocks_of_window`: blocks of queries become heads, and their three blocks of keys overlap in memory."""
    reach = seen.shape[-2]
    # added to the scores, since torch turns a boolean mask into this in every call
    bias = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -math.inf)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = query.shape
        blocks = query.reshape(-1, shape[2] // reach, reach, shape[3])
        keys, values = (F.pad(x, (0, 0, reach, reach)).flatten(0, 1).unfold(1, 3 * reach, reach).mT for x in (key, value))
        return F.scaled_dot_product_attention(blocks, keys, values, bias).reshape(shape)

    return attend


def blocks_of_window(length: int, reach: int) -> Tensor:
    """bool `[1, length / reach, reach, 3 reach]`: which keys of the block before, its own and the one behind each query sees."""
    place = torch.arange(length).view(-1, reach, 1)
    key = torch.arange(-reach, 2 * reach) + reach * torch.arange(length // reach).view(-1, 1, 1)
    return ((place - key).abs() <= reach)[None] & (key >= 0) & (key < length)


def near(scores: Tensor, reach: int) -> Tensor:
    """The keys at most `reach` from the query of each row."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    return ((place - place[:, None]).abs() <= reach).expand_as(scores)
