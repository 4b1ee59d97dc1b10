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
