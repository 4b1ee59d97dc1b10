"""C++ and Python see the same state, on which a captured graph depends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from saccade import native
from saccade.encoders.state import State
from saccade.native.build import Build
from tests.encoders_made import made


@pytest.fixture(params=["python", "c++"])
def by(request, monkeypatch):
    module = None
    if request.param == "c++":
        monkeypatch.setenv("SACCADE_NATIVE", "1")
        module = Build().wait()
        if module is None:
            pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(native, "module", module)
    return request.param


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
