"""The reference as a backend, under the contract of all."""

import pytest
import torch
from contracts.exact import AttentionContract
from contracts.opt_outs import opted_out

import saccade


@opted_out("exact/test_reference.py::TestReference")
class TestReference(AttentionContract):
    backend = "reference"


def test_declines_other_ranks():
    x = torch.randn(3, 4, 8)
    with pytest.raises(saccade.UnsupportedProblem, match=r"needs query of rank 4, \[B, H, T, D\], got rank 3"):
        saccade.attention(x, x, x, backend="reference")
