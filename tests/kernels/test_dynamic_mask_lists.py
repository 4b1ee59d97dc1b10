"""The GPU's selection: expiry and lists, which must equal those of plain torch entry by entry."""

from __future__ import annotations

import pytest
import torch
from contracts.attention import DEVICE

from saccade.kernels.dynamic_mask import expiry_triton, lists
from saccade.selection import block_lists, causal_expiry, intervals

SCORES = {
    "random": lambda n: torch.randn(2, 3, n),
    "ties": lambda n: torch.randint(0, 5, (2, 3, n)).float(),
    "equal": lambda n: torch.zeros(2, 3, n),
    "signed zeros": lambda n: torch.where(torch.rand(2, 3, n) < 0.5, -0.0, 0.0),
    "rising": lambda n: torch.arange(n).float().expand(2, 3, n),
    "falling": lambda n: -torch.arange(n).float().expand(2, 3, n),
    "extremes": lambda n: torch.randn(2, 3, n).sign() * torch.finfo(torch.float32).max,
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("length", "keep", "chunk"), [(300, 20, 64), (257, 300, 64), (300, 1, 64), (300, 70, 128), (40, 7, 2048)]
)
@pytest.mark.parametrize("scores", SCORES)
def test_expiry_equals_torch(monkeypatch, scores, length, keep, chunk, padded):
    monkeypatch.setattr(expiry_triton, "CHUNK", chunk)
    values = SCORES[scores](length).to(DEVICE)
    lengths = torch.tensor([length, length // 3], device=DEVICE) if padded else None
    found = expiry_triton.causal_expiry(values, keep, lengths)
    assert found.dtype == torch.int32
    assert torch.equal(found, causal_expiry(values, keep, lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [64, 1000, 2048, 5000])
@pytest.mark.parametrize("scores", SCORES)
def test_expiry_equals_torch_at_full_size(scores, keep):
    values = SCORES[scores](20_000).to(DEVICE)
    assert torch.equal(expiry_triton.causal_expiry(values, keep), causal_expiry(values, keep))


def test_expiry_leaves_long_lists_to_torch():
    assert (
        expiry_triton.causal_expiry(torch.zeros(1, 1, expiry_triton.MAX_KEEP + 1, device=DEVICE), expiry_triton.MAX_KEEP + 1)
        is None
    )
    assert expiry_triton.causal_expiry(torch.zeros(2, 1, 0, device=DEVICE), 4).shape == (2, 1, 0)


@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize(
    ("length", "q_len", "causal"), [(150, 150, True), (150, 50, True), (150, 1, True), (150, 150, False), (50, 65, False)]
)
@pytest.mark.parametrize(("block", "stretch"), [(16, 32), (32, 2048), (4, 32)])
def test_lists_equal_torch(monkeypatch, length, q_len, causal, documents, block, stretch):
    monkeypatch.setattr(lists, "STRETCH", stretch)
    scores = torch.randn(2, 1, length, device=DEVICE)
    ids = torch.sort(torch.randint(0, 9, (2, length), device=DEVICE), dim=1)[0] if documents else None
    kept = intervals(scores, 12, q_len, causal, torch.tensor([length, length // 2], device=DEVICE), ids)
    start, stop = (x.contiguous() for x in kept)
    found = lists.build_lists(start, stop, q_len, block, 12 if causal else 24)
    keys, count, whole = block_lists(start, stop, q_len, block)
    assert torch.equal(found.counts.view(count.shape), count.int())
    assert torch.equal(found.wholes.view(count.shape), whole.int())
    listed = torch.arange(keys.shape[-1], device=DEVICE) < count[..., None]
    assert torch.equal(found.keys.view(*count.shape, -1)[..., : keys.shape[-1]][listed], keys.int()[listed])
