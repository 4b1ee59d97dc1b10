"""The meaning of N:M pruning: which keys are kept, against a ranking written as a loop, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

import saccade
from saccade.nm_sparse import reference as nm_sparse
from saccade.nm_sparse.reference import select
from saccade.nm_sparse.testing.cases import NM_SPARSE
from saccade.nm_sparse.testing.check import check_nm_sparse
from saccade.nm_sparse.testing.inputs import block_mask_of, make_nm_sparse
from saccade.testing.judge import report

INF, NAN = math.inf, math.nan


def looped(scores, keep, group):
    """The rule in words: sort the visible keys of each group by (-score, index), take the first N."""
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for row, out in zip(scores.reshape(-1, scores.shape[-1]), kept.view(-1, scores.shape[-1]), strict=True):
        for first in range(0, len(row), group):
            visible = [j for j in range(first, min(first + group, len(row))) if row[j] > -INF]
            out[sorted(visible, key=lambda j, row=row: (-row[j].item(), j))[:keep]] = True
    return kept


@pytest.mark.parametrize("pattern", [(1, 2), (2, 4), (3, 4), (2, 3), (4, 8), (5, 12), (15, 16)], ids=str)
@pytest.mark.parametrize("length", [1, 3, 4, 15, 48])
def test_select_is_the_rule(pattern, length):
    scores = torch.randn(2, 3, 5, length).mul(1.2).round()  # ties everywhere
    scores = scores.masked_fill(torch.rand(scores.shape) < 0.3, -INF)
    assert torch.equal(select(scores, *pattern), looped(scores, *pattern))


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 0, 0]),  # ties to the lower index
        ([0.0, 1.0, 1.0, 1.0], [0, 1, 1, 0]),
        ([-5.0, 1.0, -3.0, 0.5], [0, 1, 0, 1]),  # by value, not magnitude
        ([-0.0, 0.0, -1.0, 0.0], [1, 1, 0, 0]),  # the zeros are equal
        # an invisible key never displaces a visible one, nor is it kept
        ([-INF, -9.0, -INF, -INF], [0, 1, 0, 0]),
        ([-INF, -9.0, -INF, -8.0], [0, 1, 0, 1]),
        ([-INF] * 4, [0, 0, 0, 0]),
        ([3.0, 1.0, 2.0], [1, 0, 1]),  # a short last group
        ([3.0], [1]),
        ([1.0, NAN, 5.0, 4.0], [0, 1, 1, 0]),  # NaN is not lost
        ([9.0, 8.0, 7.0, 6.0, 0.0, 1.0], [1, 1, 0, 0, 1, 1]),
    ],
)
def test_select_by_hand(scores, kept):
    assert select(torch.tensor(scores), 2, 4).int().tolist() == kept


def test_groups_are_aligned_at_key_0_whatever_the_causal_edge():
    scores = torch.zeros(6, 6).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -INF)
    scores[:, 2] += 1
    found = select(scores, 1, 4).int().tolist()
    assert found == [
        [1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 1, 0], [0, 0, 1, 0, 1, 0],
    ]  # fmt: skip


def test_attends_by_hand():
    # one query, one group: scores 1, 3, 2, 3 -> keys 1 and 3, equal weights
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 3.0, 2.0, 3.0]).view(1, 1, 4, 1)
    value = torch.tensor([100.0, 1.0, 100.0, 2.0]).view(1, 1, 4, 1)
    out, lse = saccade.nm_sparse_attention(query, key, value, scale=1.0, return_lse=True, backend="reference")
    assert out.item() == pytest.approx(1.5)
    assert lse.item() == pytest.approx(3 + math.log(2))


def test_everything_visible_is_kept_where_little_is():
    # causal, 2:4: query 0 and 1 see at most N keys, so their rows are dense attention
    q, k, v = (torch.randn(1, 1, 8, 4, dtype=torch.float64) for _ in range(3))
    sparse = saccade.nm_sparse_attention(q, k, v, is_causal=True, backend="reference")
    dense = saccade.attention(q, k, v, is_causal=True, backend="reference")
    torch.testing.assert_close(sparse[:, :, :2], dense[:, :, :2])
    assert (sparse[:, :, 2:] - dense[:, :, 2:]).abs().amax() > 1e-3


def test_a_block_mask_is_a_mask_of_its_tiles():
    case = next(c for c in NM_SPARSE if c.name == "blocks")
    x, blocks = make_nm_sparse(case, torch.float64, "cpu"), block_mask_of(case, "cpu")
    mask = nm_sparse.whole_tiles(blocks, case.q_len, case.kv_len, 64)
    assert mask[0, 0, 63, 63] == blocks[0, 0, 0, 0]
    assert mask[0, 0, 63, 64] == blocks[0, 0, 0, 1]
    assert mask[0, 1, 128, 199] == blocks[0, 1, 2, 3]
    by_tiles = saccade.nm_sparse_attention(x.query, x.key, x.value, block_mask=blocks, backend="reference")
    by_mask = saccade.nm_sparse_attention(x.query, x.key, x.value, mask, backend="reference")
    assert torch.equal(by_tiles, by_mask)
    assert (by_tiles[:, 0, 128:] == 0).all()  # these queries see no tile


def test_gradcheck():
    q, k, v = (torch.randn(1, h, t, 3, dtype=torch.float64, requires_grad=True) for h, t in ((2, 5), (1, 7), (1, 7)))
    bias = torch.randn(1, 2, 5, 7, dtype=torch.float64, requires_grad=True)

    def run(*x):
        torch.manual_seed(0)
        return saccade.nm_sparse_attention(*x, 0.2, False, None, True, return_lse=True, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


def test_pruned_keys_get_exactly_no_gradient():
    q, k, v = (torch.randn(1, 1, t, 8, dtype=torch.float64, requires_grad=True) for t in (1, 8, 8))
    out = saccade.nm_sparse_attention(q, k, v, backend="reference")
    _, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
    kept = select(q @ k.mT, 2, 4)[0, 0, 0]
    assert kept.sum() == 4
    assert (dk[0, 0, ~kept] == 0).all()
    assert (dv[0, 0, ~kept] == 0).all()
    assert (dv[0, 0, kept] != 0).any(-1).all()


def test_no_keys_and_no_queries():
    q, none = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 0, 4)
    out, lse = saccade.nm_sparse_attention(q, none, none, return_lse=True, backend="reference")
    assert (out == 0).all()
    assert (lse == -INF).all()
    assert saccade.nm_sparse_attention(none, q, q, backend="reference").shape == (1, 1, 0, 4)


class TestReference:
    backend = "reference"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("case", NM_SPARSE, ids=str)
    def test_budget(self, case, dtype):
        results = check_nm_sparse(case, dtype, "cpu", self.backend)
        assert {"selection", "out", "lse", "dq", "dk", "dv"} <= {r.name for r in results}
        assert all(r.ok for r in results), report(case, results)
