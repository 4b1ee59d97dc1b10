"""The reference as a backend, under the contract of all."""

import pytest
import torch
from contracts.exact import AttentionContract

import saccade


class TestReference(AttentionContract):
    backend = "reference"
    keeps_layout = False
    # it forms every score, several times: more than one device holds
    large_bytes = 250e9


def test_declines_other_ranks():
    x = torch.randn(3, 4, 8)
    with pytest.raises(saccade.UnsupportedProblem, match=r"needs query of rank 4, \[B, H, T, D\], got rank 3"):
        saccade.attention(x, x, x, backend="reference")
