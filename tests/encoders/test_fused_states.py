"""Layers are compiled before the first graph of a state. Graphs are stood in for by runs on the host."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from images_made import made_tower, pixels

import saccade
from saccade.encoders import base
from saccade.encoders.fused import Fusion, parts_of
from saccade.encoders.images import Batched, Rows
from saccade.encoders.state import State

FORWARD, BACKWARD = (base._EXAMPLE, False), (base._TRAINING_EXAMPLE, True)


class Graph:
    """A graph of a size, which computes where a replay would."""

    def __init__(self, served, size):
        self.served, self.inputs = served, Rows(*size, torch.device("cpu"))

    def __call__(self, batch, stream, parameters=()):
        self.inputs.load(batch, stream)
        return list(self.served.outputs(self.inputs))


class Host:
    """A `Gpu` without one."""

    def __init__(self, served):
        self.served, self.turns, self.device, self.made = served, MagicMock(), None, {}

    def graph(self, state, size, trains):
        key = (state, size, trains)
        if key not in self.made:
            self.made[key] = Graph(self.served, size)
        return self.made[key]


@pytest.fixture
def told(monkeypatch):
    """(a served tower, the same as stock, what its example runs were: tokens, and whether they had a gradient)."""
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork([]))  # of a GPU, and of the host besides
    monkeypatch.setattr(base, "has_graphs", lambda device: True)
    model, theirs = made_tower("vit", hidden_dropout_prob=0.1)
    one = saccade.optimize(model, fuse=True).served[0]
    one.fusion.backend = "aot_eager"
    host, runs, example = Host(one), [], one._example
    monkeypatch.setattr(Batched, "_graphs_on", lambda self, device: host)

    def noted(form, tokens):
        assert torch.is_autocast_cache_enabled() is False
        runs.append((tokens, torch.is_grad_enabled()))
        outputs = example(form, tokens)
        assert {x.shape[0] for x in outputs} == {tokens // 128}
        return outputs

    monkeypatch.setattr(one, "_example", noted)
    return one, theirs, runs


def same(one, theirs, rows):
    got, want = (x(pixel_values=pixels(rows)) for x in (one.model, theirs))
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    assert one.last.startswith("captured"), one.last
    return got[0], want[0]


def test_forward_then_backward_are_compiled_once_for_a_state(told):
    one, theirs, runs = told
    with torch.no_grad():
        same(one, theirs, 2)
        same(one, theirs, 5)
    assert runs == [FORWARD]
    assert one.fusion._joined
    for _ in range(2):
        got, want = same(one, theirs, 2)
        grads = [
            torch.autograd.grad(x.square().sum(), m.parameters(), allow_unused=True)
            for x, m in ((got, one.model), (want, theirs))
        ]
        for x, y in zip(*grads, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    assert runs == [FORWARD, BACKWARD]


@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
def test_a_call_reads_the_state_once(told, monkeypatch, train):
    one, theirs, _ = told
    reads, read = [], State.read
    with torch.set_grad_enabled(train):
        same(one, theirs, 2)
        monkeypatch.setattr(State, "read", lambda state: reads.append(0) or read(state))
        same(one, theirs, 2)
    assert len(reads) == 1


def test_explain_says_what_the_compiler_did(told):
    one, theirs, _ = told
    torch.compiler.reset()
    assert one.describe().endswith("fused by torch.compile at its first capture")
    with torch.no_grad():
        same(one, theirs, 2)
    assert "which took" in one.describe()
    again = saccade.optimize(theirs, fuse=True).served[0]
    again.fusion.backend = "aot_eager"
    with torch.no_grad():
        again.fused_state(lambda tokens: again._example((("pixel_values", (3, 16, 16), torch.float32),), tokens))
    assert "whose kernels another model has made; " in again.describe()


def test_graphs_are_of_the_state_after_weights_have_moved(told):
    one, theirs, _ = told
    with torch.no_grad():
        same(one, theirs, 2)
    host = one._graphs_on(None)
    assert {state for state, _, _ in host.made} == {one.state.read()} == one.fusion._ready


def test_frozen_parameters_need_no_backward(told):
    one, theirs, runs = told
    one.model.requires_grad_(False)
    same(one, theirs, 2)
    assert runs == [FORWARD]


def test_a_run_for_backward_draws_no_numbers_and_leaves_no_gradient(told):
    one, _, runs = told
    one.model.train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    form = (("pixel_values", (3, 16, 16), torch.float32),)
    one.fusion.ready_to_train(one.state, one.state.read(), lambda: one._as_captured(lambda n: one._example(form, n), 256))
    assert runs == [(256, True)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(x.grad is None for x in one.model.parameters())


def test_outputs_without_a_gradient_and_parameters_that_no_output_reads():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    state, fusion = State(model), Fusion(model)
    runs = []

    def run():
        runs.append(0)
        return model[0](torch.ones(1, 2)), torch.ones(2)

    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            fork = torch.random.fork_rng
            patch.setattr(torch.random, "fork_rng", lambda devices, fork=fork: fork([]))
            fusion.ready_to_train(state, state.read(), run)
    assert not fusion.failed
    assert len(runs) == 1


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_compiler_that_fails_is_said_once_and_asked_no_more(told, caplog, monkeypatch, direction):
    one, theirs, runs = told
    noted = one._example

    def failing(form, tokens):
        found = noted(form, tokens)
        if runs[-1] == direction:
            raise RuntimeError("no compiler today")
        return found

    monkeypatch.setattr(one, "_example", failing)
    same(one, theirs, 2)
    asked = list(runs)
    assert asked[-1] == direction
    same(one, theirs, 3)
    assert runs == asked
    assert caplog.text.count("no compiler today") == 1


def test_a_watched_model_is_not_compiled(told):
    one, _, runs = told
    next(one.model.children()).register_forward_hook(lambda *given: None)
    one.fused_state(lambda tokens: one._example((), tokens))
    assert one.state.watched
    assert runs == []


def test_a_call_that_runs_as_stock_compiles_nothing(told):
    one, theirs, runs = told
    found, wanted = (x(pixel_values=pixels(2), output_hidden_states=True) for x in (one.model, theirs))
    torch.testing.assert_close(found.hidden_states[-1], wanted.hidden_states[-1])
    assert runs == []


def test_layers_are_those_of_the_innermost_lists():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    model = torch.nn.Module()
    model.groups = torch.nn.ModuleList([Outer(), Outer()])
    model.embeddings = torch.nn.Embedding(3, 2)
    assert parts_of(model) == [model.groups[0].inner[0], model.groups[1].inner[0], model.embeddings]
    model.embeddings = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1))
    assert model.embeddings not in parts_of(model)
