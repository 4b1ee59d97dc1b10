"""The example that times a training step of a ViT under `replace_sdpa`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "vit_step.py"
spec = importlib.util.spec_from_file_location("vit_step", PATH)
vit_step = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = vit_step  # dataclasses look up annotations there
spec.loader.exec_module(vit_step)

SMALL = [
    "--batch",
    "2",
    "--size",
    "32",
    "--patch",
    "8",
    "--width",
    "24",
    "--layers",
    "2",
    "--heads",
    "2",
    "--rounds",
    "1",
    "--device",
    "cpu",
    "--dtype",
    "float32",
]


def test_it_runs_and_reaches_every_layer(capsys, monkeypatch):
    sdpa = sys.modules["saccade.integrations.sdpa"]
    attention, calls = sdpa.attention, []
    monkeypatch.setattr(sdpa, "attention", lambda *given: calls.append(given[0].shape) or attention(*given))
    assert vit_step.main(SMALL) == 0
    assert set(calls) == {torch.Size([2, 2, 17, 12])}
    assert len(calls) == 2 * 3  # layers; once compared, twice stepped
    printed = capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    assert printed.startswith("Comparing one step of both, then timing 1 of each on cpu.")  # before anything takes time
    assert "2 images of 17 tokens, 2 layers" in printed
    assert not torch.nn.functional.scaled_dot_product_attention.__module__.startswith("saccade")


def test_no_time_is_printed_where_gradients_differ(capsys, monkeypatch):
    sdpa = sys.modules["saccade.integrations.sdpa"]
    attention = sdpa.attention
    monkeypatch.setattr(sdpa, "attention", lambda query, key, *rest: attention(query, key.detach(), *rest))
    assert vit_step.main(SMALL) == 1
    captured = capsys.readouterr()
    assert "differ from torch's by" in captured.err
    assert "images/s" not in captured.out


@pytest.mark.parametrize("words", [["--size", "30"], ["--heads", "5"], ["--batch", "0"]])
def test_says_what_is_wrong(words, capsys):
    with pytest.raises(SystemExit):
        vit_step.main([*SMALL, *words])
    assert f"{words[1]}" in capsys.readouterr().err.splitlines()[-1]
