"""Tensors whose values are not in their memory: torch negates the imaginary part of a conjugate when it is read, and a gradient of zeros may have no memory."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.engine.tracing import eager

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 20
DYNAMIC = ("auto", "gather", "gather_torch", "reference", *(("gather_cpp",) if DEVICE == "cpu" else ()))


def dynamic(backend):
    scores = torch.linspace(-1, 1, 2 * T, device=DEVICE).view(1, 2, T)
    return lambda q, k, v: saccade.dynamic_mask_attention(q, k, v, scores, keep=5, is_causal=True, backend=backend)


def packed(backend):
    ends = torch.tensor([0, 8, T], dtype=torch.int32, device=DEVICE)
    return lambda *qkv: saccade.attention_varlen(*[x[0].transpose(0, 1) for x in qkv], ends, ends, 12, 12, backend=backend)


def biased(backend):
    bias = torch.linspace(-1, 1, T * T, device=DEVICE).view(1, T, T).expand(2, T, T)
    return lambda q, k, v: saccade.attention(q, k, v, bias, backend=backend)


def scores(backend):
    weight, factor = (torch.linspace(-1, 1, n, device=DEVICE) for n in (2 * 32, 2))
    return lambda q, k, v: saccade.dynamic_mask_scores(q + k + v, weight.view(2, 32).to(q.dtype), factor, backend=backend)


CALLS = {
    **{f"attention {x}": (lambda q, k, v, x=x: saccade.attention(q, k, v, backend=x)) for x in ("auto", "short", "ragged", "sdpa")},
    **{f"bias {x}": biased(x) for x in ("auto", "short", "shared_bias")},
    "packed QKV": lambda q, k, v: saccade.attention_qkvpacked(torch.stack((q, k, v), 2).transpose(1, 3), backend="short"),
    **{f"varlen {x}": packed(x) for x in ("auto", "ragged", "reference")},
    **{f"dynamic {x}": dynamic(x) for x in DYNAMIC},
    **{f"sparse {x}": (lambda q, k, v, x=x: saccade.nm_sparse_attention(q, k, v, backend=x)) for x in ("auto", "masked", "reference")},
    **{f"scores {x}": scores(x) for x in ("fused", "reference")},
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tensors_that_torch_negates_when_it_reads_them(call, dtype):
    """Inputs and the gradient that comes back: out and every gradient are those of the negated tensors."""
    leaves = [torch.randn(1, 2, T, 16, device=DEVICE).to(dtype).requires_grad_() for _ in range(3)]
    views, copies = [torch._neg_view(x) for x in leaves], [-x for x in leaves]
    assert not eager(*views)
    found, expected = CALLS[call](*views), CALLS[call](*copies)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    incoming = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, leaves, -incoming)
    for given in (-incoming, torch._neg_view(incoming)):
        for x, y in zip(torch.autograd.grad(found, leaves, given, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_without_memory(call):
    leaves = [torch.randn(1, 2, T, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    out, came = CALLS[call](*leaves), []
    out.register_hook(lambda gradient: came.append(gradient._is_zerotensor()))
    for gradient in torch.autograd.grad(out.sgn().sum(), leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert came == [True]


@pytest.mark.parametrize("backend", ["auto", "gather_torch"])
def test_a_cache_of_tensors_that_torch_negates(backend):
    caches = [saccade.DynamicMaskCache(keep=5) for _ in range(2)]
    for _ in range(8):
        tensors = [*(torch.randn(1, 2, 1, 16, device=DEVICE) for _ in range(3)), torch.randn(1, 2, 1, device=DEVICE)]
        found = caches[0].attend(*map(torch._neg_view, tensors), backend=backend)
        torch.testing.assert_close(found, caches[1].attend(*(-x for x in tensors), backend=backend))


def test_the_gradient_of_an_imaginary_part():
    """As a user meets it: the gradient of the imaginary part of what is conjugated has the other sign in memory."""
    q, k, v = (torch.randn(1, 2, T, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    signs = []

    def loss(out):
        out.register_hook(lambda gradient: signs.append(gradient.is_neg()))
        return torch.complex(torch.zeros_like(out), out).conj().abs().square().sum()

    found, expected = (
        torch.autograd.grad(loss(saccade.attention(q, k, v, backend=x)), (q, k, v)) for x in ("short", "reference")
    )
    assert any(signs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
