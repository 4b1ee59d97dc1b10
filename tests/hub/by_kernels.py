"""Run by a test: `by_kernels.py NAME` gets the copy from the package `kernels`, which LOCAL_KERNELS tells where NAME lies, and compares
flash-attn's functions with torch's attention in float64."""

from __future__ import annotations

import itertools
import sys

import torch
import torch.nn.functional as F
from kernels import get_kernel, has_kernel

NAME = sys.argv[1]
assert has_kernel(NAME, version=1)
flash = get_kernel(NAME, version=1)
assert flash is get_kernel(NAME, version=1)
assert flash.__name__.startswith("_saccade_universal_")
assert "saccade" not in sys.modules

BATCH, HEADS, DIM, LENGTHS = 3, 4, 16, (9, 1, 5)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
query, key, value = torch.randn(3, sum(LENGTHS), HEADS, DIM)


def expected(q, k, v, causal):
    """softmax(Q K^T / sqrt(D)) V of `[B, S, H, D]`."""
    return F.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


for causal in (False, True):
    want = torch.cat([expected(*(x[None, a:b] for x in (query, key, value)), causal)[0] for a, b in itertools.pairwise(ENDS)])
    out = flash.flash_attn_varlen_func(query, key, value, ENDS, ENDS, max(LENGTHS), max(LENGTHS), causal=causal)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    qkv = torch.stack((query, key, value), 1)
    torch.testing.assert_close(flash.flash_attn_varlen_qkvpacked_func(qkv, ENDS, max(LENGTHS), causal=causal), out)

    dense = [x.unflatten(0, (BATCH, -1)).requires_grad_() for x in (query, key, value)]
    out = flash.flash_attn_func(*dense, causal=causal)
    want = expected(*dense, causal)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(flash.flash_attn_qkvpacked_func(torch.stack(dense, 2), causal=causal), out)
    weights = torch.randn_like(out)
    for found, wanted in zip(
        torch.autograd.grad((out * weights).sum(), dense), torch.autograd.grad((want * weights).sum(), dense), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
print("as torch, by kernels", NAME)
