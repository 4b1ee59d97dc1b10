"""The peers in 8 bits: numbers, factors, and errors against dense attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fp8 import E4M3_MAX, eight_bits, quantised
from tables import nm_fp8


def test_numbers_of_eight_bits():
    torch.manual_seed(0)
    tensor = (torch.randn(2, 3, 5, 16) * 7).transpose(1, 2)
    numbers, factor = quantised(tensor)
    assert numbers.stride() == tensor.stride()
    assert numbers.float().abs().max() == E4M3_MAX
    made = numbers.float() * factor
    # three bits of fraction; below 2^-6 of the type their distance is fixed
    assert ((made - tensor).abs() <= tensor.abs() / 16 + factor * 2**-9).all()


class Small(nm_fp8.Setting):
    @property
    def sizes(self):
        return 2, 24, 8, 16


@pytest.mark.parametrize("causal", [False, True])
def test_the_error_is_of_all_heads(causal):
    setting = Small(24, 16, causal)
    torch.manual_seed(0)
    tensors = [torch.randn(setting.sizes).transpose(1, 2) for _ in range(3)]
    exact = F.scaled_dot_product_attention(*tensors, is_causal=causal)
    assert nm_fp8._error(setting, tensors, lambda: exact / 2, 2.0) < 1e-5
    assert nm_fp8._error(setting, tensors, lambda: exact * 1.25, 1.0) == pytest.approx(0.25, rel=1e-4)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr("fp8.has_package", lambda name: name == "sageattention")
    assert list(eight_bits()) == ["sage_int8"]
