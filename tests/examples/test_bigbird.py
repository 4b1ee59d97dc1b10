"""The example that combines block patterns and N:M pruning."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "bigbird.py"
spec = importlib.util.spec_from_file_location("bigbird", PATH)
bigbird = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bigbird)


def test_blocks_have_a_window_global_rows_and_random_ones():
    blocks = bigbird.bigbird_blocks(20, 1, 2, 3, torch.Generator().manual_seed(0))[0, 0]
    assert blocks[:2].all()
    assert blocks[:, :2].all()
    place = torch.arange(20)
    near = ((place - place[:, None]).abs() <= 1) | (place < 2)
    assert blocks[near].all()
    assert ((blocks & ~near).sum(-1)[2:] == 3).all()


def test_more_random_blocks_than_are_left():
    assert bigbird.bigbird_blocks(4, 1, 1, 9, torch.Generator().manual_seed(0)).all()


def test_pruning_the_blocks_is_pruning_under_their_mask():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 200, 16) for _ in range(3))
    blocks = bigbird.bigbird_blocks(4, 0, 1, 1, torch.Generator().manual_seed(0))
    found = bigbird.compare(query, key, value, blocks, "2:4")
    assert found["scores left"] < 0.5
    assert found["error of blocks and 2:4"] > found["error of 2:4"] > 0
    everything = bigbird.compare(query, key, value, torch.ones_like(blocks), "2:4")
    assert everything["error of blocks"] < 1e-5
    assert everything["error of blocks and 2:4"] == pytest.approx(everything["error of 2:4"])


def test_it_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert bigbird.main(["--length", "200", "--out", str(tmp_path)]) == 0
    assert "scores left" in capsys.readouterr().out
    assert (tmp_path / "bigbird.png").stat().st_size > 3000


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        bigbird.main(["--out", str(tmp_path / "file")])
    assert "where no folder can be made" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["x", "2:", "2:4:8", ""])
def test_what_is_no_pattern(pattern, capsys):
    with pytest.raises(SystemExit):
        bigbird.main(["--pattern", pattern])
    assert f"--pattern is {pattern!r}; it must be N:M, as 2:4" in capsys.readouterr().err
