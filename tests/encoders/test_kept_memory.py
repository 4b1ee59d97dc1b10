"""Changes of a captured encoder that move no number: other parameter objects, parameters moved before backward, methods put on a part, precision."""

from __future__ import annotations

import pytest
import torch
from encoders_made import made, padded
from graphs_made import install, packed_attention
from torch import nn

import saccade
from saccade.encoders import attention
from saccade.encoders.state import State

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")


@pytest.fixture
def served(by, monkeypatch):
    """(an encoder whose training is captured, its twin, what serves it)."""
    install(monkeypatch)
    monkeypatch.setattr(attention, "attention_forward", packed_attention)
    ours, theirs = (m.eval() for m in made("bert"))
    one = saccade.optimize(ours, fuse=False).served[0]
    loss(ours).backward()
    assert one.last == "captured: 17 tokens in a graph of 64"
    ours.zero_grad()
    return ours, theirs, one


def loss(model):
    ids, mask = padded((5, 9, 3))
    return model(input_ids=ids, attention_mask=mask)[0][mask.bool()].square().sum()


def same_gradients(ours, theirs):
    for model in (ours, theirs):
        loss(model).backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), name
        if y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-9)


def test_parameters_of_the_same_memory_get_their_gradients(served):
    ours, theirs, one = served
    before = list(ours.parameters())
    ours.load_state_dict(ours.state_dict(), assign=True)
    assert all(x is not y for x, y in zip(before, ours.parameters(), strict=True))
    same_gradients(ours, theirs)
    assert one.last.startswith("captured: ")
    assert all(x.grad is None for x in before)


def test_weights_that_were_tied_and_share_their_memory_have_gradients_apart(served):
    ours, theirs, one = served
    for model in (ours, theirs):
        first, second = (x.output.dense for x in model.encoder.layer)
        second.weight = first.weight
    same_gradients(ours, theirs)
    for model in (ours, theirs):
        first, second = (x.output.dense for x in model.encoder.layer)
        second.weight = nn.Parameter(first.weight.data)
        model.zero_grad()
    same_gradients(ours, theirs)
    assert one.last.startswith("captured: ")


@pytest.mark.parametrize(
    "change", [nn.Module.float, lambda m: setattr(m.encoder.layer[0].output.dense.weight, "data", torch.eye(32, 48))]
)
def test_a_parameter_that_moves_before_backward_is_refused(served, change):
    ours, _, _ = served
    found = loss(ours)
    change(ours)
    with pytest.raises(RuntimeError, match="was moved to other memory between its forward and its backward"):
        found.backward()


def test_a_forward_that_is_put_on_a_part_is_called(served):
    ours, theirs, one = served
    calls = []

    def doubled(module):
        stock = module.forward

        def forward(*args, **kwargs):
            calls.append(module)
            return 2 * stock(*args, **kwargs)

        return forward

    parts = [m.encoder.layer[1].output.dense for m in (ours, theirs)]
    for part in parts:
        part.forward = doubled(part)
    same_gradients(ours, theirs)
    assert calls == parts
    assert one.last == "stock: a module inside of it has a forward of its own, which a replay would not call"
    for part in parts:
        del part.forward
    for model in (ours, theirs):
        model.zero_grad()
    same_gradients(ours, theirs)
    assert one.last.startswith("captured: ")


@pytest.mark.parametrize("name", ["cuda.matmul", "cudnn.conv", ""])
def test_the_precision_of_float32_is_another_state(by, name):
    backend = torch.backends
    for part in name.split(".") * bool(name):
        backend = getattr(backend, part)
    state = State(made("bert")[0].eval())
    first, before = state.read(), backend.fp32_precision
    # torch.testing, which other tests import, freezes these numbers
    with torch.backends.__allow_nonbracketed_mutation():
        backend.fp32_precision = "ieee" if before == "tf32" else "tf32"
        try:
            assert state.read() != first
        finally:
            backend.fp32_precision = before
    assert state.read() == first
