"""The ops of the dynamic mask: schemas, fakes, and a whole capture by torch.compile."""

from __future__ import annotations

import pytest
import torch
from contracts.dynamic_mask import IN_CPP
from contracts.exact import DEVICE

import saccade
from saccade.dynamic_mask.selection.intervals import intervals

pytestmark = pytest.mark.unpoisoned
OPS = torch.ops.saccade


def arguments(layout="bhtd", scores=True):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 20, 16, device=DEVICE) for h in (4, 2, 2))
    if layout == "bthd":
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    key_scores = torch.randn(2, 2, 20, device=DEVICE)
    start, stop = (x.contiguous() for x in intervals(key_scores, 5, 20, True, None, None))
    return query, key, value, key_scores if scores else None, start, stop, 5, True, 0.25


def test_opcheck_of_the_selection():
    torch.library.opcheck(OPS.dynamic_mask_intervals.default, (torch.randn(2, 2, 20), 5, 20, True, torch.tensor([20, 3]), None))
    torch.library.opcheck(OPS.dynamic_mask_intervals.default, (torch.randn(2, 2, 20), 5, 20, False, None, None))


@pytest.mark.parametrize("backend", ["gather", IN_CPP, "gather_torch"])
@pytest.mark.parametrize(("layout", "scores"), [("bhtd", True), ("bthd", True), ("bthd", False)])
def test_opcheck(layout, scores, backend):
    call = (*arguments(layout, scores), backend)
    torch.library.opcheck(OPS.dynamic_mask_forward.default, call)
    out, lse = OPS.dynamic_mask_forward(*call)
    torch.library.opcheck(OPS.dynamic_mask_backward.default, (torch.randn_like(out), torch.randn_like(lse), out, lse, *call))


def test_compiles_as_one_graph():
    torch._dynamo.reset()
    query, key, value, scores, *_ = arguments()
    leaves = [x.requires_grad_() for x in (query, key, value, scores)]

    def run(q, k, v, s):
        return saccade.dynamic_mask_attention(q, k, v, s, keep=5, enable_gqa=True, return_lse=True, backend="gather_torch")

    expected = run(*leaves)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    wanted = torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), leaves)
    for ours, theirs in zip(torch.autograd.grad(found[0].square().sum() + found[1].sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["causal", "documents", "lengths"])
@pytest.mark.parametrize("backend", ["auto", "gather_torch", "reference"])
def test_how_far_a_nan_in_a_value_may_reach(backend, kind):
    """Never beyond its batch row and key head, and nowhere from behind `lengths`; the page says so."""
    query, key, value = torch.randn(3, 2, 4, 64, 16).unbind(0)
    key, value, scores = key[:, :2], value[:, :2].clone(), torch.randn(2, 2, 64)
    value[0, 1, 40:] = float("nan")
    options = {
        "documents": {"document_ids": (torch.arange(64) >= 32).int().expand(2, 64)},
        "lengths": {"lengths": torch.tensor([40, 64])},
    }
    given = {"keep": 8, "enable_gqa": True, "backend": backend, "is_causal": kind != "lengths"} | options.get(kind, {})
    reached = saccade.dynamic_mask_attention(query, key, value, scores, **given).isnan().flatten(2).any(-1)
    assert reached.tolist() == [[False, False, kind != "lengths", kind != "lengths"], [False] * 4]
