"""Nothing that is remembered holds a tensor or the graph of a call: weak references die with the caller's own."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade import native
from saccade.engine import prepare
from saccade.native.build import Build

B, H, T, D = 2, 3, 17, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Token:
    """Lives as long as the node of a graph."""


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.token = Token()
        seen.append(weakref.ref(ctx.token))
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def tensors(device, *shapes):
    dtype = torch.float16 if device == "cuda" else torch.float32
    return [torch.randn(*shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def ends(device):
    return F.pad(torch.tensor([5, 9, 3], device=device).cumsum(0), (1, 0)).int()


def dense(function, **options):
    def call(q, k, v, *others):
        return function(q, k, v, *others, **options)

    return call, lambda: [(B, H, T, D)] * 3


FORMS = {
    "attention": dense(saccade.attention),
    "causal": dense(saccade.attention, is_causal=True),
    "dropout": dense(saccade.attention, dropout_p=0.3),
    "lse": dense(lambda *given: saccade.attention(*given, return_lse=True)[0]),
    "lengths": (
        lambda q, k, v: saccade.attention(q, k, v, lengths=torch.tensor([T, 4], device=q.device)),
        lambda: [(B, H, T, D)] * 3,
    ),
    "mask": (
        lambda q, k, v: saccade.attention(q, k, v, torch.ones(B, 1, T, T, dtype=torch.bool, device=q.device).tril()),
        lambda: [(B, H, T, D)] * 3,
    ),
    "bias": (saccade.attention, lambda: [(B, H, T, D)] * 3 + [(1, H, T, T)]),
    "qkvpacked": (saccade.attention_qkvpacked, lambda: [(B, T, 3, H, D)]),
    "varlen": (lambda q, k, v: saccade.attention_varlen(q, k, v, *[ends(q.device)] * 2, 9, 9), lambda: [(T, H, D)] * 3),
    "keys that are values": (lambda q, k: saccade.attention(q, k, k), lambda: [(B, H, T, D)] * 2),
    "windows": (saccade.attention, lambda: [(B, 4, H, T, D)] * 3 + [(4, H, T, T)]),
    "varlen, long": (
        lambda q, k, v: saccade.attention_varlen(q, k, v, *[ends(q.device) * 11] * 2, 99, 99),
        lambda: [(11 * T, H, D)] * 3,
    ),
    "varlen, beyond tiles": (
        lambda q, k, v: saccade.attention_varlen(q, k, v, *[ends(q.device) * 22] * 2, 198, 198),
        lambda: [(22 * T, H, D)] * 3,
    ),
    "varlen, dropout": (
        lambda q, k, v: saccade.attention_varlen(q, k, v, *[ends(q.device)] * 2, 9, 9, 0.2),
        lambda: [(T, H, D)] * 3,
    ),
    "varlen qkvpacked": (lambda qkv: saccade.attention_varlen_qkvpacked(qkv, ends(qkv.device), 9), lambda: [(T, 3, H, D)]),
    "nm": dense(saccade.nm_sparse_attention),
    "dynamic": (
        lambda q, k, v, s: saccade.dynamic_mask_attention(q, k, v, s, keep=4, is_causal=True),
        lambda: [(B, H, T, D)] * 3 + [(B, H, T)],
    ),
}


@pytest.fixture
def known_calls(request, monkeypatch):
    """On a GPU with the memory of C++, so that calls are described to it."""
    if "cuda" not in request.node.name:
        yield
        return
    monkeypatch.setenv("SACCADE_NATIVE", "1")
    module = Build().wait()
    monkeypatch.setattr(native, "calls", module.Memory() if module is not None and module.has_driver() else None)
    prepare.forget()
    yield
    prepare.forget()


@pytest.mark.usefixtures("known_calls")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMS)
def test_a_call_is_not_kept_alive(name, device):
    call, shapes = FORMS[name]
    graphs, inputs = [], []
    for _ in range(3):
        leaves = tensors(device, *shapes())
        given = [Watched.apply(x, graphs) for x in leaves]
        out = call(*given)
        out.sum().backward()
        inputs += [weakref.ref(x) for x in (*leaves, *given, out)]
        del leaves, given, out
    gc.collect()
    assert not [x for x in graphs if x() is not None], "the graph of a call is alive"
    assert not [x for x in inputs if x() is not None], "a tensor of a call is alive"
