"""Calls under `torch.set_default_device` of another device than the tensors have: each tensor that a call makes says where."""

from __future__ import annotations

import pytest
import torch

import saccade

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def tensors(*shapes):
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]


def dense():
    return tensors(*[(2, 2, 24, 16)] * 3)


def packed():
    return [*tensors(*[(24, 2, 16)] * 3), torch.tensor([0, 5, 5, 14, 24], dtype=torch.int32, device=DEVICE)]


def scored():
    return tensors(*[(2, 2, 24, 16)] * 3, (2, 2, 24))


CALLS = {
    "attention": (dense, lambda q, k, v: saccade.attention(q, k, v, is_causal=True)),
    "reference": (dense, lambda q, k, v: saccade.attention(q, k, v, is_causal=True, dropout_p=0.2, backend="reference")),
    "varlen": (packed, lambda q, k, v, ends: saccade.attention_varlen(q, k, v, ends, ends, 10, 10, is_causal=True)),
    "varlen dropout": (packed, lambda q, k, v, ends: saccade.attention_varlen(q, k, v, ends, ends, 10, 10, dropout_p=0.2)),
    "dynamic": (scored, lambda *given: saccade.dynamic_mask_attention(*given, keep=5)),
    "dynamic, any": (scored, lambda *given: saccade.dynamic_mask_attention(*given, keep=5, is_causal=False)),
    "dynamic reference": (scored, lambda *given: saccade.dynamic_mask_attention(*given, keep=5, backend="reference")),
    "pruned": (dense, lambda q, k, v: saccade.nm_sparse_attention(q, k, v, dropout_p=0.2)),
}
if not HAS_GPU:
    CALLS["lse causal"] = (dense, lambda q, k, v: saccade.attention(q, k, v, is_causal=True, return_lse=True)[0])
    CALLS["lse mask"] = (dense, lambda q, k, v: saccade.attention(q, k, v, q[:1, :1, :, :1] > 0, return_lse=True)[0])


def results(given, call):
    torch.manual_seed(3)
    out = call(*given)
    leaves = [x for x in given if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_same(name, device):
    make, call = CALLS[name]
    given = make()
    expected = results(given, call)
    with torch.device(device):
        found = results(given, call)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_cache(device):
    def decode():
        cache = saccade.DynamicMaskCache(keep=5)
        outs = [cache.attend(*(x[:, :, i * 8 : i * 8 + 8] for x in given)) for i in range(2)]
        cache.take_rows([1, 0])
        outs.append(cache.attend(*(x[:, :, 16:] for x in given), commit=False))
        cache.commit(3)
        cache.reset([0])
        return [*outs, cache.seen]

    given = [x.detach() for x in scored()]
    expected = decode()
    with torch.device(device):
        found = decode()
    torch.testing.assert_close(found, expected)
