"""Run by a test, under Triton's interpreter: `interpreted.py VARIANT` runs a kernel of the copy and the same of the installed package."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from loading import load

import saccade

copy = load(Path(sys.argv[1]))
q, k, v = torch.randn(3, 1, 2, 16, 32)
results = []
for package in (saccade, copy):
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = package.attention(*given, backend="short")
    results.append((out, *torch.autograd.grad(out.square().sum(), given)))
for one, other in zip(*results, strict=True):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
torch.testing.assert_close(results[1][0], torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-4)
print("short, interpreted")
