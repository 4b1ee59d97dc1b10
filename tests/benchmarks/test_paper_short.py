"""The kernels that are written from paper 002 compute attention and its gradients."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("paper_short").paper_attention
    sys.modules.pop("paper_short", None)


@pytest.mark.parametrize(("tokens", "dim"), [(32, 32), (20, 24), (1, 16)])
@pytest.mark.parametrize("packed", [True, False])
def test_out_and_gradients(attention, tokens, dim, packed):
    torch.manual_seed(0)
    if packed:
        leaf = torch.randn(2, tokens, 3, 4, dim, device=DEVICE, requires_grad=True)
        leaves, qkv = [leaf], leaf.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        leaves = [torch.randn(2, tokens, 4, dim, device=DEVICE, requires_grad=True) for _ in range(3)]
        qkv = [x.transpose(1, 2) for x in leaves]
    dout = torch.randn(2, 4, tokens, dim, device=DEVICE)
    out, want = attention(*qkv), F.scaled_dot_product_attention(*qkv)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=2e-5)
    for got, expected in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-5)
