"""C++ and Python see the same state, on which a captured graph depends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from saccade import native
from saccade.encoders.state import State
from saccade.engine import prepare
from tests.encoders_made import made


def _weight(model):
    return model.encoder.layer[0].output.dense.weight


CHANGES = {
    "mode": lambda m: m.encoder.layer[1].train(),
    "gradient": lambda m: _weight(m).requires_grad_(False),
    "data": lambda m: setattr(_weight(m), "data", _weight(m).data.clone()),
    "parameter": lambda m: setattr(m.encoder.layer[0].output.dense, "weight", nn.Parameter(_weight(m).detach().clone())),
    "module": lambda m: setattr(m.encoder.layer[0].output, "dense", nn.Linear(_weight(m).shape[1], _weight(m).shape[0])),
    "dtype": lambda m: m.half(),
    "dropout": lambda m: setattr(m.embeddings.dropout, "p", 0.25),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_state(by, change):
    model = made("bert")[0].eval()
    state = State(model)
    first = state.read()
    assert state.read() == first
    CHANGES[change](model)
    second = state.read()
    assert second != first
    assert state.read() == second
    assert all(any(x is y for y in model.parameters()) for x in state.parameters)


def test_tied_parameters_that_come_apart_are_another_state(by):
    """In the same memory: their gradients were one sum and are two tensors."""
    model = made("bert")[0].eval()
    first, second = (layer.output.dense for layer in model.encoder.layer[:2])
    second.weight = first.weight
    state = State(model)
    tied = state.read()
    second.weight = nn.Parameter(first.weight.detach())
    assert second.weight.data_ptr() == first.weight.data_ptr()
    assert state.read() != tied
    second.weight = first.weight
    assert state.read() == tied


def test_autocast_and_determinism_are_other_states(by):
    model = made("bert")[0].eval()
    state = State(model)
    first = state.read()
    with torch.autocast("cpu", torch.bfloat16):
        assert state.read() != first
    torch.use_deterministic_algorithms(True)
    try:
        assert state.read() != first
    finally:
        torch.use_deterministic_algorithms(False)
    assert state.read() == first


def test_a_mode_that_returns_is_the_state_it_was(by):
    model = made("bert")[0].eval()
    state = State(model)
    first = state.read()
    model.train()
    other = state.read()
    model.eval()
    assert (state.read(), other != first) == (first, True)


def test_hooks_and_checkpointing_are_watched(by):
    model = made("bert")[0].train()
    state = State(model)
    state.read()
    assert state.watched == ""
    hook = model.encoder.layer[0].register_forward_hook(lambda *given: None)
    state.read()
    assert "hook" in state.watched
    hook.remove()
    model.gradient_checkpointing_enable()
    state.read()
    assert state.watched  # transformers may add a hook too
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()  # its hook came with the call above
    state.read()
    assert state.watched == ""


def test_hooks_that_transformers_leaves_after_hidden_states_are_asleep(by):
    """Calls run from graphs again, as such a hook does nothing in them."""
    model = made("bert")[0].eval()
    state = State(model)
    state.read()
    model(torch.tensor([[5, 6]]), output_hidden_states=True)
    assert any(x._forward_hooks for x in model.modules())
    state.read()
    assert state.watched == ""
    model.encoder.layer[0].register_forward_hook(lambda *given: None)
    state.read()
    assert "hook" in state.watched


def test_a_replay_may_start_before_the_state_is_read_while_its_memory_is_there(by):
    model = made("bert")[0].eval()
    state = State(model)
    assert not state.may_hold()
    state.read()
    assert state.may_hold() == (by == "c++")
    with torch.autocast("cpu", torch.bfloat16):
        assert not state.may_hold()
    kept = _weight(model).data
    _weight(model).data = kept.clone()
    assert state.may_hold() == (by == "c++")  # the memory that graphs read is there: `read` finds the change
    del kept
    assert not state.may_hold()
    state.read()
    assert state.may_hold() == (by == "c++")
    model.train()
    assert not state.may_hold()


def test_what_changes_rarely_is_counted(by):
    model = made("bert")[0].eval()
    state = State(model)
    state.read()
    before = state.changes
    state.read()
    assert (state.changes == before) == (by == "c++")
    model.encoder.layer[0].note = 1  # of no module's forward
    before = state.changes
    state.read()
    assert (state.changes == before) == (by == "c++")
    before, number = state.changes, state.read()
    model.config.output_hidden_states = True
    assert state.read() == number
    assert state.changes > before


def test_a_part_that_takes_the_place_of_another_attribute_is_seen(by):
    """As many attributes as before, and one of them is a forward."""
    model = made("bert")[0].eval()
    model.encoder.layer[1].note = 1
    state = State(model)
    state.read()
    del model.encoder.layer[1].note
    model.encoder.layer[1].forward = model.encoder.layer[1].forward
    state.read()
    assert "forward of its own" in state.watched


def test_a_model_on_a_gpu_has_its_state_read_by_c_once_that_is_compiled(monkeypatch):
    model = made("bert")[0].eval()
    started = []
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "start", started.append)
    state = State(model)
    state.read()
    assert not started  # on a CPU nothing is compiled
    monkeypatch.setattr(State, "_kind", property(lambda self: "cuda", lambda self, kind: None), raising=False)
    state.read()
    assert started == [prepare.forget]
