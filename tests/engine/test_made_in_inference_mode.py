"""Tensors that were made in inference mode, as masks and positions often are, in calls that need a gradient of others."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.engine.calls import recordable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 6
MADE = {
    "mask": lambda: torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril(),
    "bias": lambda: torch.linspace(-1, 1, T * T, device=DEVICE).view(T, T),
    "one row of a bias": lambda: torch.linspace(-1, 1, T, device=DEVICE).expand(1, 2, T, T),
    "key_mask": lambda: torch.arange(T, device=DEVICE)[None] < 4,
    "lengths": lambda: torch.tensor([4], device=DEVICE),
    "block_mask": lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE),
    "ends": lambda: torch.tensor([0, 2, T], dtype=torch.int32, device=DEVICE),
    "long ends": lambda: torch.tensor([0, 2, T], device=DEVICE),
    "documents": lambda: torch.tensor([[0, 0, 1, 1, 1, 1]], device=DEVICE),
    "scores": lambda: torch.linspace(1, -1, 2 * T, device=DEVICE).view(1, 2, T),
    "keys": lambda: torch.linspace(-1, 1, 2 * T * 16, device=DEVICE).view(1, 2, T, 16),
}


def exact(argument, **options):
    return lambda x, made: saccade.attention(x, x, x, **{argument: made}, **options)


def sparse(argument, backend):
    return lambda x, made: saccade.nm_sparse_attention(x, x, x, **{argument: made}, backend=backend)


def packed(backend):
    return lambda x, made: saccade.attention_varlen(*[x[0].transpose(0, 1)] * 3, made, made, 4, 4, backend=backend)


def dynamic(argument, backend, **options):
    def call(x, made):
        given = {"key_scores": MADE["scores"](), argument: made}
        return saccade.dynamic_mask_attention(x, x, x, **given, keep=2, backend=backend, **options)

    return call


TORCHS = ("auto", "sdpa", "reference")
CALLS = {
    f"{name}, {backend}": (name, exact("attn_mask", backend=backend))
    for name in ("mask", "bias", "one row of a bias")
    for backend in ("short", *TORCHS)
}
CALLS |= {
    f"{name}, {backend}": (name, exact(name, backend=backend))
    for name in ("key_mask", "lengths")
    for backend in ("short", *TORCHS)
}
CALLS |= {
    f"keys, {backend}": ("keys", lambda x, made, backend=backend: saccade.attention(x, made, made, backend=backend))
    for backend in ("short", *TORCHS)
}
CALLS |= {f"{name}, {backend}": (name, packed(backend)) for name in ("ends", "long ends") for backend in ("ragged", *TORCHS)}
CALLS |= {
    f"{name} of N:M, {backend}": (name.rpartition(" ")[2], sparse(argument, backend))
    for name, argument in (("mask", "attn_mask"), ("bias", "attn_mask"), ("block_mask", "block_mask"), ("lengths", "lengths"))
    for backend in ("masked", "reference")
}
CALLS |= {
    f"{name} of dynamic masks, {backend}": (name, dynamic(argument, backend))
    for name, argument in (
        ("documents", "document_ids"),
        ("scores", "key_scores"),
        ("ends", "cu_seqlens"),
        ("lengths", "lengths"),
    )
    for backend in ("gather", "gather_torch", "reference")
}
CALLS["documents, both sides"] = "documents", dynamic("document_ids", "auto", is_causal=False)
if DEVICE == "cpu":
    CALLS |= {f"{name} with lse": (name, exact("attn_mask", return_lse=True, backend="sdpa")) for name in ("mask", "bias")}


def gradient(call, made):
    torch.manual_seed(0)
    x = torch.randn(1, 2, T, 16, device=DEVICE, requires_grad=True)
    out = call(x, made)
    out = out[0] if isinstance(out, tuple) else out
    return torch.autograd.grad(out.square().sum(), x)[0]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_other_tensors(name):
    made, call = CALLS[name]
    with torch.inference_mode():
        given = MADE[made]()
    assert given.is_inference()
    torch.testing.assert_close(gradient(call, given), gradient(call, MADE[made]()), rtol=0, atol=0)


def test_copies_are_made_outside_of_inference_mode_alone():
    with torch.inference_mode():
        made = MADE["mask"]()
        assert recordable(made) is made
    copied = recordable(made)
    assert copied.data_ptr() != made.data_ptr()
    assert recordable(copied) is copied
    assert recordable(None) is None


def test_a_change_after_forward_leaves_the_gradient_as_it_was():
    """Such a tensor counts no versions, so that nobody would notice."""
    with torch.inference_mode():
        mask = MADE["mask"]()
    x = torch.randn(1, 2, T, 16, device=DEVICE, requires_grad=True)
    out = saccade.attention(x, x, x, mask, backend="short")
    (before,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    with torch.inference_mode():
        mask.fill_(True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], before, rtol=0, atol=0)
