"""The example that draws pruned attention: its numbers, and that it draws pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import saccade

PATH = Path(__file__).parents[2] / "examples" / "pruned_attention.py"
spec = importlib.util.spec_from_file_location("pruned_attention", PATH)
pruned_attention = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pruned_attention)


@pytest.fixture
def scores():
    return pruned_attention.example_scores(24, 1.0, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pattern", ["1:2", "2:4"])
def test_maps_are_the_weights_of_the_operation(scores, pattern):
    # identity values give the weights; a query of 1 and scores as a bias give the scores
    zero, value = torch.zeros(1, 1, 24, 24), torch.eye(24)[None, None]
    weights = saccade.nm_sparse_attention(zero, zero, value, scores, pattern=pattern, backend="reference")
    torch.testing.assert_close(pruned_attention.pruned_weights(scores, pattern), weights[0, 0])


def test_measured_quality(scores):
    found = pruned_attention.measured(scores, 1.0)
    assert found["1:2"][0][0] == 0.5
    assert found["2:4"][0][1] > found["1:2"][0][1] > 0.5
    assert found["top-K"][-1] == (1.0, pytest.approx(1.0))
    best = dict(found["top-K"])[0.5]
    assert best > found["2:4"][0][1]


def test_draws_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    assert pruned_attention.main(["--length", "24", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"quality.png", "maps.png"}
    assert all(p.stat().st_size > 10_000 for p in tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        pruned_attention.main(["--out", str(tmp_path / "file")])
    assert "where no folder can be made" in capsys.readouterr().err


@pytest.mark.parametrize("sigma", ["nan", "inf", "0", "-1"])
def test_what_is_no_sigma(sigma, capsys):
    with pytest.raises(SystemExit):
        pruned_attention.main([f"--sigma={sigma}"])
    assert f"--sigma is {float(sigma)}; it must be positive, and a finite number" in capsys.readouterr().err
