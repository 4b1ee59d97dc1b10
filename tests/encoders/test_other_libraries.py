"""Weights that lie side by side under accelerate and peft: files, adapters and merged weights are as without us."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from encoders_made import made, padded

import saccade

BATCH = padded((5, 9, 1))
REAL = BATCH[1].bool()


@pytest.fixture
def both():
    """(a served encoder whose weights lie side by side, its model, the same model as it was)"""
    model, twin = (x.float().eval() for x in made("bert"))
    one = saccade.optimize(model, fuse=True).served[0]
    one.fusion.backend = "aot_eager"
    joined(one)
    return one, model, twin


def joined(one):
    """Compile again, which moves the weights side by side that are apart; returns how many groups lie so."""
    with torch.no_grad():
        one.fusion.ready(one.state, lambda: one._example(64))
    assert not one.fusion.failed
    return sum(x.holds() for x in one.fusion._joined)


def files(folder):
    return {str(x.relative_to(folder)): x.read_bytes() for x in Path(folder).rglob("*") if x.is_file()}


def same_outputs(ours, theirs):
    torch.testing.assert_close(ours(*BATCH)[0][REAL], theirs(*BATCH)[0][REAL], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["save_model", "save_state"])
def test_files_of_accelerate(both, tmp_path, method):
    accelerate = pytest.importorskip("accelerate")
    one, *models = both
    assert joined(one) == 4
    accelerator = accelerate.Accelerator(cpu=True)
    for name, model in zip(("ours", "theirs"), models, strict=True):
        if method == "save_model":
            accelerator.save_model(model, tmp_path / name)
        else:
            accelerator._models = [accelerator.prepare_model(model)]
            accelerator.save_state(str(tmp_path / name))
    ours, theirs = (files(tmp_path / name) for name in ("ours", "theirs"))
    assert any(name.endswith(".safetensors") for name in theirs)
    ours, theirs = ({name: x for name, x in found.items() if "random_states" not in name} for found in (ours, theirs))
    assert ours == theirs
    same_outputs(*models)
    assert one.last == "unpadded"


def test_adapters_are_put_on_and_merged(both, tmp_path):
    peft = pytest.importorskip("peft")
    one, *models = both
    adapted = []
    for model in models:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
        adapted.append(peft.get_peft_model(model, config).eval())
    same_outputs(*adapted)
    assert one.last == "unpadded"
    assert joined(one) == 6, "the two adapters of a layer read the same tensor too"
    found = [x(*BATCH)[0][REAL] for x in adapted]
    gradients = [
        torch.autograd.grad(x.square().sum(), [p for p in model.parameters() if p.requires_grad])
        for x, model in zip(found, adapted, strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    for name, model in zip(("ours", "theirs"), adapted, strict=True):
        model.save_pretrained(tmp_path / name)
    merged = [x.merge_and_unload() for x in adapted]
    assert merged[0] is one.model
    same_outputs(*merged)
    for name, model in zip(("ours", "theirs"), merged, strict=True):
        model.save_pretrained(tmp_path / name / "merged")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    joined(one)
    same_outputs(*merged)
