"""Compiled layers of towers give what the layers give, at any batch size; weights moved side by side go back."""

from __future__ import annotations

import itertools

import pytest
import torch
from graphs_made import install
from images_made import IMAGES, JOINT, made_joint, made_tower, pixels, texts

import saccade
from saccade.encoders import training
from saccade.encoders.fused import parts_of
from saccade.encoders.images import Rows, form_of

SIZES = [(2, 16), (5, 16), (1, 16), (3, 16)]


def fused(model):
    """A served tower whose layers are compiled without a backend."""
    one = saccade.optimize(model).served[-1]
    one.fusion.backend = "aot_eager"
    return one


@pytest.fixture
def captures(monkeypatch):
    """Captures by a dispatch mode, under which torch's compiler passes over a layer for good."""
    install(monkeypatch)
    yield
    torch.compiler.reset()


def inputs_of(batch):
    found = Rows(next(iter(batch.values())).shape[0], form_of(batch), torch.device("cpu"))
    found.load(batch)
    return found


def same_gradients(one, inputs):
    parameters = [x for x in one.model.parameters() if x.requires_grad]
    with training._aliased(one.model, parameters) as leaves:  # as captures find a model
        found = []
        for run in (one._run_stock, one.outputs):
            outputs = [x for x in run(inputs) if x.requires_grad]
            weights = [torch.linspace(-1, 1, x.numel()).view_as(x) for x in outputs]
            found.append((outputs, torch.autograd.grad(outputs, leaves, weights, allow_unused=True)))
    for wanted, got in zip(*found, strict=True):
        for x, y in zip(wanted, got, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)  # each compiles for some ten seconds
@pytest.mark.parametrize("name", IMAGES)
def test_outputs_and_gradients_at_any_number_of_images(name):
    model, _ = made_tower(name)
    one = fused(model)
    for rows, side in SIZES:
        same_gradients(one, inputs_of({"pixel_values": pixels(rows, rows, side)}))
    assert not one.fusion.failed
    assert all("forward" not in x.__dict__ for x in parts_of(model))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", JOINT)
def test_text_towers(name):
    model, _ = made_joint(name)
    one = saccade.optimize(model).served[0]
    one.fusion.backend = "aot_eager"
    for rows in (3, 1, 5):
        ids, mask = texts(rows)
        same_gradients(one, inputs_of({"input_ids": ids, "attention_mask": mask}))
    assert not one.fusion.failed


def test_layers_are_compiled_once_for_all_batches_of_several_images():
    model, _ = made_tower("clip")
    one = fused(model)
    with torch.no_grad():
        one.outputs(inputs_of({"pixel_values": pixels(2)}))
        seconds = one.fusion.seconds
        assert seconds > 0
        for rows in (3, 17, 5):  # 5 is the number of its tokens
            one.outputs(inputs_of({"pixel_values": pixels(rows)}))
        assert one.fusion.seconds == seconds


def test_weights_lie_side_by_side_until_it_is_restored():
    model, theirs = made_tower("vit")
    handle = saccade.optimize(model)
    one = handle.served[0]
    one.fusion.backend = "aot_eager"
    form = form_of({"pixel_values": pixels(1)})
    number = one.fusion.ready(one.state, lambda: one._example(form, 256))
    assert one.fusion.knows(number)
    layer = one.model.layers[0].attention
    products = [x for x in layer.modules() if isinstance(x, torch.nn.Linear)][:3]
    addresses = sorted(x.weight.data_ptr() for x in products)
    assert [y - x for x, y in itertools.pairwise(addresses)] == [products[0].weight.nbytes] * 2
    handle.restore()
    for x, y in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(x, y)
        assert x.untyped_storage().nbytes() == x.nbytes


def test_what_is_fused():
    assert saccade.optimize(made_tower("vit")[0], fuse=False).served[0].fusion is None
    assert [one.fusion is not None for one in saccade.optimize(made_joint("clip")[0]).served] == [True, True]


@pytest.mark.unpoisoned
def test_a_training_step_is_captured_with_compiled_layers(captures):
    """Each output has a backward of its own at the capture, and both run through the compiled layers."""
    ours, theirs = made_tower("vit")
    one = fused(ours)
    for seed in range(2):
        for model in (ours.train(), theirs.train()):
            model.zero_grad()
            out = model(pixel_values=pixels(3, seed))
            (out.last_hidden_state.square().mean() + out.pooler_output.square().mean()).backward()
        assert one.last == "captured: 3 rows in a graph of 4"
        for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (x.grad is None) == (y.grad is None), name
            if y.grad is not None:
                torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert not one.fusion.failed
