"""The example that trains a classifier with and without padding."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "finetune_classifier.py"
spec = importlib.util.spec_from_file_location("finetune_classifier", PATH)
finetune_classifier = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = finetune_classifier  # dataclasses look up annotations there
spec.loader.exec_module(finetune_classifier)

SMALL = ["--batch", "8", "--width", "32", "--layers", "1", "--device", "cpu", "--dtype", "float32"]


def test_both_ways_learn(capsys):
    assert finetune_classifier.main(["--steps", "25", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert finetune_classifier.TORCH in printed
    assert finetune_classifier.OURS in printed


def test_the_losses_fall_alike_without_dropout():
    from rich.console import Console

    torch.manual_seed(0)
    model = finetune_classifier.Classifier(32, 1, 0.0)
    other = finetune_classifier.Classifier(32, 1, 0.0)
    other.load_state_dict(model.state_dict())
    every = finetune_classifier.examples()
    batches = [finetune_classifier.batch_of(every[:16], "cpu")] * 25
    assert len({len(ids) for ids, _ in every[:16]}) > 5
    both = {finetune_classifier.TORCH: model, finetune_classifier.OURS: other}
    losses, times = finetune_classifier.train(both, batches, Console(quiet=True))
    theirs, ours = losses[finetune_classifier.TORCH], losses[finetune_classifier.OURS]
    assert ours[-1] < 0.85 * ours[0]
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert all(value > 0 for value in times.values())


def test_no_step_is_taken_where_outputs_differ(capsys, monkeypatch):
    packed = finetune_classifier.saccade.attention_varlen_qkvpacked
    monkeypatch.setattr(
        finetune_classifier.saccade, "attention_varlen_qkvpacked", lambda qkv, *rest: packed(qkv.roll(1, 0), *rest)
    )
    assert finetune_classifier.main(["--steps", "1", *SMALL]) == 1
    captured = capsys.readouterr()
    assert "differ from torch's by" in captured.err
    assert "ms a step" not in captured.out


@pytest.mark.parametrize("words", [["--width", "33"], ["--steps", "0"], ["--dropout", "1.0"]])
def test_says_what_is_wrong(words, capsys):
    with pytest.raises(SystemExit):
        finetune_classifier.main(words)
    assert " is ".join(words) in capsys.readouterr().err
