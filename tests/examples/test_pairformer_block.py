"""The example of a block of a structure model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "pairformer_block.py"
spec = importlib.util.spec_from_file_location("pairformer_block", PATH)
pairformer_block = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = pairformer_block
spec.loader.exec_module(pairformer_block)

SMALL = ["--tokens", "12", "--width", "16", "--dim", "8", "--rounds", "1", "--device", "cpu", "--dtype", "float32"]


def test_it_compares_and_times(capsys):
    assert pairformer_block.main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "ms, step" in printed
    assert "loss and gradients differ by at most" in printed


def test_no_time_is_printed_where_blocks_differ(capsys, monkeypatch):
    def worse(block, z, mask, found=pairformer_block.loss_of):
        return found(block, z, mask) * (1.01 if isinstance(block.starting, pairformer_block.TriangleAttention) else 1)

    monkeypatch.setattr(pairformer_block, "loss_of", worse)
    assert pairformer_block.main(SMALL) == 1
    captured = capsys.readouterr()
    assert "the blocks differ by 0.01" in captured.err
    assert "ms, forward" not in captured.out


def test_padding_does_not_reach_real_pairs():
    torch.manual_seed(0)
    made = pairformer_block.blocks(16, 8, 2)
    real = torch.arange(10) < 7
    mask = real[:, None] & real
    z = torch.randn(10, 10, 16)
    dirty = z.masked_fill(~mask[..., None], 3.0)
    for block in made.values():
        torch.testing.assert_close(block(dirty, mask)[mask], block(z, mask)[mask])


@pytest.mark.parametrize("words", [["--tokens", "0"], ["--heads", "0"]])
def test_says_what_is_wrong(words, capsys):
    with pytest.raises(SystemExit):
        pairformer_block.main(words)
    assert f"{words[0]} is 0; it must be at least 1" in capsys.readouterr().err
