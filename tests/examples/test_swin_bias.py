"""The example in which a bias of relative positions learns where to look."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "swin_bias.py"
spec = importlib.util.spec_from_file_location("swin_bias", PATH)
swin_bias = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = swin_bias  # dataclasses look up annotations there
spec.loader.exec_module(swin_bias)

SMALL = ["--windows", "8", "--rounds", "1", "--device", "cpu", "--dtype", "float32"]


def test_the_bias_finds_the_offset(capsys):
    assert swin_bias.main(["--steps", "40", "--shift", "-1", "2", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "the heads look at [(-1, 2), (-1, 2)]" in printed


def test_offsets_are_those_of_the_shift():
    layer = swin_bias.WindowAttention(1)
    with torch.no_grad():
        layer.table.fill_(-1e4)
        layer.table[(3 + swin_bias.SIDE - 1) * (2 * swin_bias.SIDE - 1) + (-2 + swin_bias.SIDE - 1)] = 1e4
    assert layer.looks_at() == [(3, -2)]
    x = torch.randn(2, swin_bias.TOKENS, swin_bias.DIM)
    wanted = swin_bias.shifted(x, 3, -2)
    inside = wanted.abs().sum(-1) > 0
    assert inside.sum() == 2 * 4 * 5
    torch.testing.assert_close(layer(x)[inside], wanted[inside])


def test_too_few_steps_are_told(capsys):
    assert swin_bias.main(["--steps", "1", *SMALL]) == 1
    assert "--steps is 1" in capsys.readouterr().err


def test_no_time_is_printed_where_the_gradient_of_the_bias_differs(capsys, monkeypatch):
    attention = swin_bias.saccade.attention

    def forgets_the_bias(query, key, value, bias):
        return attention(query, key, value, 0.5 * bias + 0.5 * bias.detach())

    monkeypatch.setattr(swin_bias.WindowAttention.forward, "__defaults__", (forgets_the_bias,))
    monkeypatch.setattr(swin_bias.saccade, "attention", forgets_the_bias)
    assert swin_bias.main(["--steps", "1", *SMALL]) == 1
    captured = capsys.readouterr()
    assert "gradient of the bias differs from torch's by 0.5" in captured.err
    assert "times torch" not in captured.out


@pytest.mark.parametrize("words", [["--shift", "7", "0"], ["--heads", "0"]])
def test_says_what_is_wrong(words, capsys):
    with pytest.raises(SystemExit):
        swin_bias.main(words)
    assert f"{words[0]} is {' '.join(words[1:])}" in capsys.readouterr().err
