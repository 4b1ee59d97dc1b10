"""The interpreter as patched by the test suite gives bitwise the same results as Triton's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, sys, torch, saccade
if sys.argv[1] == "fast":
    import interpreter
    interpreter.speed_up()
torch.manual_seed(0)
digest = hashlib.sha256()
for call in (
    lambda q, k, v: saccade.attention(q, k, v, is_causal=True, enable_gqa=True, backend="short"),
    lambda q, k, v: saccade.nm_sparse_attention(q, k, v, enable_gqa=True, pattern="2:4", backend="masked"),
    lambda q, k, v: saccade.dynamic_mask_attention(q, k, v, torch.randn(2, 1, 37), keep=9, enable_gqa=True, backend="gather"),
):
    leaves = [torch.randn(2, h, 37, 16, dtype=torch.float16, requires_grad=True) for h in (2, 1, 1)]
    out = call(*leaves)
    for x in (out, *torch.autograd.grad(out, leaves, torch.randn_like(out))):
        digest.update(x.detach().numpy().tobytes())
# masks, biases, dropout, integers of 64 bits and those without a sign
mask, ends = torch.rand(1, 2, 13, 13) < 0.8, torch.tensor([0, 5, 20, 26], dtype=torch.int32)
for call, shape in (
    (lambda q, k, v, b: saccade.attention(q, k, v, b, dropout_p=0.3, backend="short"), (2, 2, 13, 16)),
    (lambda q, k, v, b: saccade.attention(q, k, v, mask, dropout_p=0.3, backend="ragged"), (2, 2, 13, 16)),
    (lambda q, k, v, b: saccade.attention_varlen(q, k, v, ends, ends, 15, 15, 0.3, backend="ragged"), (26, 2, 16)),
    (lambda q, k, v, b: saccade.nm_sparse_attention(q, k, v, b, dropout_p=0.3, pattern="1:2", backend="masked"), (2, 2, 13, 16)),
):
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)] + [torch.randn(1, 2, 13, 13, requires_grad=True)]
    out = call(*leaves)
    for x in (out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)):
        if x is not None:
            digest.update(x.detach().numpy().tobytes())
print(digest.hexdigest())
"""


def test_the_same_bits_as_triton_s_own():
    pytest.importorskip("triton")
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    found = [
        subprocess.run([sys.executable, "-c", PROGRAM, way], env=environment, capture_output=True, text=True, check=True).stdout
        for way in ("fast", "plain")
    ]
    assert len(found[0].split()) == 1
    assert found[0] == found[1]
