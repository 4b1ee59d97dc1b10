"""Kernels for keys that ranks offer each other, against torch's operations: order of keys, faults, copied rows of any strides."""

from __future__ import annotations

import pytest
import torch

from saccade.distributed.candidates import entries_of
from saccade.dynamic_mask import offers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def scores_of(kind, shape, dtype, device):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    kinds = {
        "random": noise,
        "ties": (2 * noise).round(),
        "zeros": torch.where(noise > 0, 0.0, -0.0),
        "extreme": noise.sign() * torch.finfo(dtype).max,
    }
    return kinds[kind].to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "extreme"])
def test_order(kind, dtype, device):
    """One part and three of them, more keys than one program ranks, and a view with strides of its own."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes bfloat16 wrongly")
    for shape in ((1, 2, 3, 1), (1, 1, 2, 1500), (3, 2, 2, 37)):
        scores = scores_of(kind, shape, dtype, device)
        joined = scores.permute(1, 2, 0, 3).flatten(2)
        assert torch.equal(offers.rank(scores), entries_of(joined))
        spread = torch.full((*shape[:3], 2 * shape[3]), torch.nan, device=device, dtype=dtype)[..., ::2]
        assert torch.equal(offers.rank(spread.copy_(scores)), entries_of(joined))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("value", "faulty"), [(1.0, 0), (torch.inf, 1), (-torch.inf, 1), (torch.nan, 1), (6.0e4, 0)])
@pytest.mark.parametrize("at", [0, 1499])
def test_faults(at, value, faulty, device):
    scores = torch.zeros(1, 1, 2, 1500, device=device)
    scores[0, 0, 1, at] = value
    told = torch.tensor([7, 0], device=device)
    offers.rank(scores, told[1:])
    assert told.tolist() == [7, faulty]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("listed", [True, False])
def test_rows(listed, dtype, device):
    """Places in three parts, head dims that are no power of two, into a part of a larger tensor."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes bfloat16 wrongly")
    parts, batch, heads, n, count = 3, 2, 2, 10, 19
    key, value = (torch.randn(parts, batch, n, heads, d, device=device).to(dtype).transpose(2, 3) for d in (24, 40))
    scores = torch.randn(parts, batch, heads, n, device=device)
    places = torch.stack([torch.randperm(parts * n)[:count] for _ in range(batch * heads)]).view(batch, heads, count).to(device)
    room = [torch.full((batch, heads, count + 5, *x.shape[4:]), 7.0, device=device, dtype=x.dtype) for x in (key, value, scores)]
    offers.copy((key, value, scores), places if listed else None, tuple(x[:, :, 2 : 2 + count] for x in room))
    chosen = places if listed else torch.arange(count, device=device).expand(batch, heads, -1)
    for x, found in zip((key, value, scores), room, strict=True):
        rows = x.movedim(0, 2).flatten(2, 3)
        index = chosen if rows.dim() == 3 else chosen[..., None].expand(-1, -1, -1, rows.shape[3])
        assert torch.equal(found[:, :, 2 : 2 + count], rows.gather(2, index))
        assert (found[:, :, :2] == 7).all()
        assert (found[:, :, 2 + count :] == 7).all()


def test_who_is_served():
    rows, scores = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    assert offers.by_kernels(rows, rows, scores)
    assert not offers.by_kernels(rows.double(), rows, scores)
    assert not offers.by_kernels(rows.bfloat16(), rows, scores)  # on a CPU
    assert not offers.by_kernels(rows.mT.contiguous().mT, rows, scores)
    assert not offers.by_kernels(rows.to("meta"), rows.to("meta"), scores.to("meta"))
