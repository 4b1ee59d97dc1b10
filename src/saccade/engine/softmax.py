"""The softmax of the references: weights and log-sum-exp of rows, including rows of only -inf."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, lse) of `scores [.., Tk]`; a row of only -inf has weights 0, lse -inf and no gradient.

    Each row of weights is divided by its own sum, and the derivative of lse is these weights. `exp(scores - lse)` is not the
    same. Next to a largest score of 1e9 the logarithm of the sum is lost in float32, and the weights of a row would add up to Tk.
    """
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1) - float("inf")
    # detached: the row's maximum cancels in the weights and is added back in lse
    largest = scores.detach().amax(-1, keepdim=True)
    blind = largest == float("-inf")
    powers = torch.exp(scores - largest.masked_fill(blind, 0.0))
    total = powers.sum(-1, keepdim=True).masked_fill(blind, 1.0)
    lse = (largest + total.log()).masked_fill(blind, float("-inf"))
    return powers / total, lse.squeeze(-1)
