"""The errors of N:M pruning and of random features: closed forms against simulation, and simulation against attention itself."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "experiments" / "quality")]

import performer  # noqa: E402

from saccade.nm_sparse import analysis  # noqa: E402

GIVEN = performer.Setting(16, 40, 4.0, 0.25)
TRIALS = 20_000


@pytest.mark.parametrize("way", ["1:2", "2:4", "performer"])
@pytest.mark.parametrize("score", [-0.6, 0.0, 0.25])
def test_closed_forms_are_what_is_simulated(way, score):
    given = performer.Setting(16, 40, 4.0, score)
    mean, error = performer.simulate(way, given, TRIALS)
    assert error < 0.05 * mean
    assert performer.closed_form(way, given) == pytest.approx(mean, abs=4 * error)


@pytest.mark.parametrize("features", [16, 40])
def test_orthogonal_features_are_within_their_bound_and_better(features):
    given = performer.Setting(16, features, 4.0, -0.6)  # few rare draws: the simulation is near its mean
    mean, error = performer.simulate("performer orthogonal", given, TRIALS)
    bound = performer.closed_form("performer orthogonal", given)
    assert mean < bound + 3 * error
    assert bound < performer.closed_form("performer", given)
    assert mean + 3 * error < performer.closed_form("performer", given)


def test_the_projections_are_those_of_orthogonal_vectors():
    """Against a rotation by QR: the same second and fourth moments, and the same covariance of squares within a block."""
    generator = torch.Generator().manual_seed(0)
    dim, trials = 4, 40_000
    ours = performer._orthogonal((trials, 6), dim, generator)
    rotations = torch.linalg.qr(torch.randn(trials, dim, dim, dtype=torch.float64, generator=generator)).Q
    lengths = torch.randn(trials, dim, dim, dtype=torch.float64, generator=generator).norm(dim=-1)
    theirs = rotations[:, :, 0] * lengths
    for power in (2, 4):
        assert (ours**power).mean().item() == pytest.approx((theirs**power).mean().item(), rel=0.05)
    one, other = (torch.cov((x[:, :2] ** 2).T)[0, 1].item() for x in (ours, theirs))
    assert one == pytest.approx(other, abs=0.05)
    # the fifth feature begins another block: independent of the first
    across = torch.cov((ours[:, [0, 4]] ** 2).T)[0, 1].item()
    assert abs(across) < 0.05 < abs(one)


@pytest.mark.parametrize("pattern", ["1:2", "2:4"])
def test_pruning_is_that_of_the_operation(pattern):
    """A key of the given score among random ones is kept as often as the simulation says."""
    generator = torch.Generator().manual_seed(0)
    dim, trials, group = 16, 20_000, int(pattern[-1])
    query = torch.zeros(dim, dtype=torch.float64)
    query[0] = math.sqrt(GIVEN.norm)
    keys = torch.randn(trials, group, dim, dtype=torch.float64, generator=generator)
    keys[:, 0, 0] = GIVEN.score * math.sqrt(dim) / query[0]
    kept = analysis.kept_by_pattern(keys @ query / math.sqrt(dim), pattern)[:, 0]
    assert 1 - kept.double().mean().item() == pytest.approx(performer.closed_form(pattern, GIVEN), abs=0.015)


def test_features_estimate_the_kernel():
    """Written out for a query and a key, without the shortcut of one projection."""
    dim, features = 16, 400_000
    generator = torch.Generator().manual_seed(0)
    query, key = 0.5 * torch.randn(2, dim, dtype=torch.float64, generator=generator)
    drawn = torch.randn(features, dim, dtype=torch.float64, generator=generator)
    phi = [torch.exp(drawn @ x / dim**0.25 - x @ x / (2 * math.sqrt(dim))) for x in (query, key)]
    kernel = math.exp(query @ key / math.sqrt(dim))
    each = phi[0] * phi[1] / kernel
    assert each.mean().item() == pytest.approx(1, abs=0.02)
    exponent = ((query + key) @ (query + key)).item() / math.sqrt(dim)
    assert each.var().item() == pytest.approx(math.expm1(exponent), rel=0.1)


def test_the_paper_s_bound_with_standard_normal_vectors():
    given = performer.Setting(64, 266, 64.0, 0.0)
    assert given.exponent() == 16
    assert performer.printed(given) == pytest.approx((math.exp(16) - 1 - (1 - 1 / 266) * 2 / 66) / 266)
    assert performer.closed_form("1:2", given) == 0.5


def test_writes_and_draws(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(performer, "POINTS", 3)
    assert performer.main(["--trials", "50", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {f"performer_mse.{end}" for end in ("csv", "png", "dark.png")}
    with open(tmp_path / "performer_mse.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == len(performer.NORMS) * 3 * len(performer.LOOKS)
    # where the error cannot be met by drawing, nothing is claimed
    assert all(bool(r["simulated"]) == (":" in r["way"] or (float(r["norm"]) == 8 and float(r["score"]) < 0.3)) for r in rows)
    assert "2:4 has the smaller error from score" in capsys.readouterr().out
