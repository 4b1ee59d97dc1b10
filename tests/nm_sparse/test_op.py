"""The ops of N:M sparse attention: schemas, fakes, and a whole capture by torch.compile."""

from __future__ import annotations

import pytest
import torch
from contracts.exact import DEVICE

import saccade
from saccade.nm_sparse import op as ops_nm_sparse
from saccade.nm_sparse.bits import words_of

pytestmark = pytest.mark.unpoisoned
OPS = torch.ops.saccade


def arguments(features=(), layout="bhtd", keep=2, group=4):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 20, 16, device=DEVICE) for h in (4, 2, 2))
    if layout == "bthd":
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    mask = torch.rand(20, 20, device=DEVICE) < 0.7 if "mask" in features else None
    bias = torch.randn(1, 4, 20, 20, device=DEVICE) if "bias" in features else None
    blocks = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE) if "blocks" in features else None
    seed = torch.tensor([7], device=DEVICE) if "dropout" in features else None
    dropout_p = 0.2 if "dropout" in features else 0.0
    return query, key, value, mask, bias, blocks, seed, keep, group, dropout_p, "causal" in features, 0.25


@pytest.mark.parametrize(
    ("features", "layout", "pattern"),
    [((), "bthd", (2, 4)), (("mask", "dropout"), "bhtd", (1, 2)), (("bias", "blocks"), "bhtd", (2, 3)), (("causal",), "bhtd", (1, 2)),
     (("causal", "dense"), "bhtd", (2, 4))],
)  # fmt: skip
def test_opcheck(features, layout, pattern):
    call = arguments(features, layout, *pattern)
    dense = (pattern[1], 2 * pattern[1]) if "dense" in features else ()
    for stores in (False, True):
        torch.library.opcheck(OPS.nm_sparse_forward.default, (*call, stores, "masked", *dense))
    out, lse, kept = OPS.nm_sparse_forward(*call, True, "masked", *dense)
    assert kept.shape[3] == words_of(20, pattern[1])
    gradients = (torch.randn_like(out), torch.randn_like(lse), out, lse, kept)
    torch.library.opcheck(OPS.nm_sparse_backward.default, (*gradients, *call, "bias" in features, "masked", *dense))


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "pattern": "1:2"}, {"dropout_p": 0.3}, {"dense_first": 4, "dense_recent": 8}], ids=str
)
@pytest.mark.parametrize("backend", ["masked", "reference"])
def test_compiles_as_one_graph(options, backend):
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in arguments()[:3]]

    def run(q, k, v):
        return saccade.nm_sparse_attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **options)

    torch.manual_seed(3)
    expected = run(*leaves)
    torch.manual_seed(3)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    wanted = torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), leaves)
    gradients = torch.autograd.grad(found[0].square().sum() + found[1].sum(), leaves)
    for ours, theirs in zip((*found, *gradients), (*expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


def test_inference_stores_no_selection(monkeypatch):
    asked = []
    forward = ops_nm_sparse._forward
    monkeypatch.setattr(ops_nm_sparse, "_forward", lambda *call: asked.append(call[12]) or forward(*call))
    query, key, value, *_ = arguments()
    saccade.nm_sparse_attention(query, key, value, enable_gqa=True, backend="masked")
    saccade.nm_sparse_attention(query.requires_grad_(), key, value, enable_gqa=True, backend="masked")
    assert asked == [False, True]


def test_checkpointing_replays_the_selection_and_the_dropout():
    leaves = [x.requires_grad_() for x in arguments()[:3]]

    def run(q, k, v):
        return saccade.nm_sparse_attention(q, k, v, None, 0.3, enable_gqa=True, backend="masked")

    torch.manual_seed(5)
    wanted = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(out.square().sum(), leaves), wanted, strict=True):
        assert torch.equal(ours, theirs)
