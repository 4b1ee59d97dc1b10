"""The example that trains a language model with dynamic masks."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "train_language_model.py"
spec = importlib.util.spec_from_file_location("train_language_model", PATH)
train_language_model = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = train_language_model  # dataclasses look up annotations there
spec.loader.exec_module(train_language_model)

SMALL = ["--batch", "4", "--tokens", "40", "--keep", "8", "--width", "32", "--layers", "1", "--write", "60", "--device", "cpu"]


def test_it_learns_and_writes(capsys):
    assert train_language_model.main(["--steps", "25", "--prompt", "A class", *SMALL]) == 0
    printed = capsys.readouterr().out
    before, after = (float(number) for number in re.findall(r"(\d+\.\d+) (?:nats|on held-out)", printed))
    assert after < before - 1
    assert "\nA class" in printed


def test_the_cache_stays_bounded_and_is_exact():
    torch.manual_seed(0)
    model = train_language_model.LanguageModel(32, 2, 5)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.A.normal_()  # scores of their own, not the window of a new module
    ids = torch.randint(256, (2, 30))
    assert train_language_model.cache_difference(model, ids, 7) < 1e-4
    sizes = [train_language_model.write(model, b"x" * 9, count, "cpu")[1] for count in (1, 40)]
    assert sizes[0] == sizes[1]


def test_nothing_is_written_with_a_wrong_cache(capsys, monkeypatch):
    forward = train_language_model.LanguageModel.forward

    def forgets_the_place(self, ids, start=0, caches=None):
        return forward(self, ids, 0, caches)

    monkeypatch.setattr(train_language_model.LanguageModel, "forward", forgets_the_place)
    assert train_language_model.main(["--steps", "25", *SMALL]) == 1
    captured = capsys.readouterr()
    assert "differ from the whole history by" in captured.err
    assert "the cache of a layer" not in captured.out


@pytest.mark.parametrize("words", [["--width", "40"], ["--keep", "0"]])
def test_says_what_is_wrong(words, capsys):
    with pytest.raises(SystemExit):
        train_language_model.main(words)
    assert " is ".join(words) in capsys.readouterr().err
