"""Quality and speed-up of pruning: the measure against values by hand, the closed forms against Monte Carlo and the paper's
numbers."""

from __future__ import annotations

import math

import pytest
import torch

import saccade
from saccade.nm_sparse import analysis


def normal_scores(sigma, rows=400, keys=1024):
    generator = torch.Generator().manual_seed(0)
    return sigma * torch.randn(rows, keys, dtype=torch.float64, generator=generator)


def ratio_of_sums(scores, kept, p):
    """The closed forms are ratios of expectations: `E[kept x^p] / E[x^p]`, over all rows at once."""
    return analysis.quality(scores.reshape(1, -1), kept.reshape(1, -1), p).item()


def test_quality_by_hand():
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    kept = torch.tensor([[False, False, True, True], [True, True, False, False]])
    assert analysis.quality(weights.log(), kept).item() == pytest.approx((0.7 + 0.5) / 2)
    assert analysis.quality(weights.log(), kept, 2.0).item() == pytest.approx((25 / 30 + 0.5) / 2)
    # a factor on the weights changes nothing, and a row without a visible key is skipped
    blind = torch.cat((weights.log() + 3, torch.full((1, 4), -math.inf)))
    assert analysis.quality(blind, torch.cat((kept, kept[:1]))).item() == pytest.approx(0.6)


def test_quality_of_everything_is_one():
    scores = normal_scores(1.0, 8, 64).unflatten(0, (2, 4))
    torch.testing.assert_close(
        analysis.quality(scores, torch.ones_like(scores, dtype=torch.bool)), torch.ones(2, dtype=torch.float64)
    )


@pytest.mark.parametrize("p_sigma", [0.5, 1.0, 2.0])
def test_one_of_two_against_monte_carlo(p_sigma):
    scores = normal_scores(p_sigma)
    half = ratio_of_sums(scores, analysis.kept_by_pattern(scores, "1:2"), 1.0)
    assert half == pytest.approx(analysis.one_of_two_quality(p_sigma), abs=0.01)
    quarter = ratio_of_sums(scores, analysis.kept_by_pattern(scores, "2:4"), 1.0)
    assert half < quarter < 1
    # p enters as p * sigma
    again = 0.5 * scores
    assert ratio_of_sums(again, analysis.kept_by_pattern(again, "1:2"), 2.0) == pytest.approx(half)


@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 0.9])
def test_top_k_and_fixed_against_monte_carlo(density):
    scores = normal_scores(1.0)
    found = ratio_of_sums(scores, analysis.kept_by_top_k(scores, density), 1.0)
    assert found == pytest.approx(analysis.top_k_quality(1.0, density), abs=0.01)
    found = ratio_of_sums(scores, analysis.kept_by_truncation(scores, density), 1.0)
    assert found == pytest.approx(analysis.fixed_quality(density), abs=0.01)


def test_densities_are_what_is_kept():
    scores = normal_scores(1.0, 10, 200)
    for kept in (analysis.kept_by_top_k(scores, 0.25), analysis.kept_by_truncation(scores, 0.25)):
        assert (kept.sum(-1) == 50).all()
    assert (analysis.kept_by_pattern(scores, "2:8").sum(-1) == 50).all()
    assert (scores.masked_fill(~analysis.kept_by_top_k(scores, 0.25), math.inf).amin(-1) >= scores.sort(-1).values[:, 150]).all()


def test_top_k_keeps_at_least_one():
    assert (analysis.kept_by_top_k(normal_scores(1.0, 4, 20), 0.0).sum(-1) == 1).all()


def test_nan_is_visible_and_ranks_first():
    """As in `nm_sparse_attention`, so that it shows in what is measured."""
    scores = torch.tensor([[1.0, math.nan, 3.0, -math.inf], [math.nan, -math.inf, -math.inf, -math.inf]])
    first = torch.tensor([[False, True, False, False], [True, False, False, False]])
    assert torch.equal(analysis.kept_by_pattern(scores, "1:4"), first)
    assert torch.equal(analysis.kept_by_top_k(scores, 0.25), first)
    visible = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert torch.equal(analysis.kept_by_pattern(scores, "3:4"), visible)
    assert torch.equal(analysis.kept_by_top_k(scores, 1.0), visible)
    assert torch.equal(analysis.kept_by_truncation(scores, 1.0), visible)
    for row in scores.split(1):
        assert analysis.quality(row, row > 0).isnan()


def test_the_paper_s_qualities():
    assert [round(analysis.one_of_two_quality(x), 4) for x in (1, 2, 4)] == [0.7602, 0.9214, 0.9977]
    assert analysis.one_of_two_quality(7) == pytest.approx(0.9999996, abs=1e-7)
    scores = normal_scores(1.0)
    assert ratio_of_sums(scores, analysis.kept_by_pattern(scores, "2:4"), 1.0) == pytest.approx(0.797, abs=0.005)


def test_the_paper_s_speedups():
    assert analysis.nm_speedup(64, 128) == pytest.approx(1.495, abs=1e-3)
    assert analysis.nm_speedup(128, 128) == pytest.approx(1.366, abs=1e-3)
    assert analysis.top_k_speedup(0.045) > 1 > analysis.top_k_speedup(0.0452)
    assert analysis.top_k_density_as_fast() == pytest.approx(0.02, abs=5e-4)
    assert analysis.fixed_density_as_fast() == pytest.approx(0.632, abs=1e-3)


def test_top_k_that_is_as_fast_is_of_less_quality_up_to_seven():
    for p_sigma, wins in ((0.5, True), (3.0, True), (6.9, True), (7.1, False)):
        assert (analysis.one_of_two_quality(p_sigma) > analysis.top_k_quality(p_sigma, 0.02)) is wins


def test_equally_fast_is_equally_fast():
    for dim, tile in ((64, 128), (128, 128), (32, 64)):
        ours = analysis.nm_speedup(dim, tile)
        assert analysis.top_k_speedup(analysis.top_k_density_as_fast(dim, tile), dim, tile) == pytest.approx(ours)
        assert analysis.fixed_speedup(analysis.fixed_density_as_fast(dim, tile), dim, tile) == pytest.approx(ours)


def test_speedups_are_limits_of_traffic():
    n = 10**7
    assert analysis.dense_traffic(n) / analysis.nm_traffic(n) == pytest.approx(analysis.nm_speedup(), rel=1e-4)
    assert analysis.fixed_speedup(1.0) == pytest.approx(1.0)


def test_performer_crosses_where_the_paper_says():
    assert analysis.performer_speedup(671) < 1 < analysis.performer_speedup(673)
    ours = [analysis.dense_traffic(n) / analysis.nm_traffic(n) for n in (1000, 1004)]
    assert analysis.performer_speedup(1000) < ours[0]
    assert analysis.performer_speedup(1004) > ours[1]


def test_bad_arguments():
    scores = torch.zeros(2, 4)
    with pytest.raises(saccade.InvalidArgument, match=r"density is 1\.5; it must be in 0\.\.1"):
        analysis.kept_by_top_k(scores, 1.5)
    with pytest.raises(saccade.InvalidArgument, match=r"kept is torch\.bool of shape \[2, 3\]"):
        analysis.quality(scores, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(saccade.InvalidArgument, match="p is 0; it must be positive"):
        analysis.quality(scores, torch.ones(2, 4, dtype=torch.bool), 0)
    with pytest.raises(saccade.InvalidArgument, match="pattern is '2-4'"):
        analysis.kept_by_pattern(scores, "2-4")
