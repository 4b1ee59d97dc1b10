"""The example that draws kept keys: its counts against the mask itself, and that it draws a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import saccade

PATH = Path(__file__).parents[2] / "examples" / "kept_keys.py"
spec = importlib.util.spec_from_file_location("kept_keys", PATH)
kept_keys = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kept_keys)


@pytest.mark.parametrize("name", list(kept_keys.SCORES))
def test_counts_are_those_of_the_mask(name):
    length, keep = 80, 12
    scores = kept_keys.SCORES[name](length, keep, torch.Generator().manual_seed(0))
    assert scores.shape == (length,)
    expiry = saccade.expiry(scores[None, None], keep)[0, 0]
    position = torch.arange(length)
    mask = (position <= position[:, None]) & (position[:, None] < expiry)  # [query, key]
    assert torch.equal(kept_keys.kept_at(expiry), mask.sum(1))
    assert torch.equal(kept_keys.lifetimes(expiry).long(), mask.sum(0))
    assert torch.equal(mask.sum(1), (position + 1).clamp(max=keep))


def test_heavy_hitters_live_to_the_end():
    scores = kept_keys.heavy_hitter_scores(80, 12, torch.Generator().manual_seed(0))
    best = scores.topk(6).indices
    assert (saccade.expiry(scores[None, None], 12)[0, 0][best] == 80).all()


def test_draws_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    assert kept_keys.main(["--length", "40", "--keep", "8", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "kept_keys_random.png").stat().st_size > 10_000


def test_says_what_is_wrong(capsys):
    assert kept_keys.main(["--keep", "0"]) == 2
    assert "--keep 0" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        kept_keys.main(["--out", str(tmp_path / "file")])
    assert "where no folder can be made" in capsys.readouterr().err
