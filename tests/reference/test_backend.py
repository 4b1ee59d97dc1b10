"""The reference as a backend, under the contract of all."""

import pytest
import torch
from contracts.attention import AttentionContract

import saccade


class TestReference(AttentionContract):
    backend = "reference"
    nan_at_infinite_bias = "logsumexp differentiates a row of -inf to NaN where no masked_fill comes after the bias"


def test_declines_other_ranks():
    x = torch.randn(3, 4, 8)
    with pytest.raises(saccade.UnsupportedProblem, match=r"needs query of rank 4, \[B, H, T, D\], got rank 3"):
        saccade.attention(x, x, x, backend="reference")
