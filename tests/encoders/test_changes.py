"""A captured encoder sees each change of its model at the next call, and runs from its graph while nothing changes. Graphs are those of `graphs_made`."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from encoders_made import made
from encoders_made import padded as encoder_batch
from graphs_made import Graph, install, packed_attention
from images_made import made_tower, pixels
from padded_made import made_padded
from torch import nn

import saccade
from saccade.encoders import attention, gpu, graphs

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")


@pytest.fixture
def captures(by, monkeypatch):
    install(monkeypatch)


def tower():
    """(a tower that has replayed its graph twice, its twin, what serves it)."""
    ours, theirs = made_tower("vit")
    one = saccade.optimize(ours, fuse=False).served[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(3):
            torch.testing.assert_close(ours(pixels(3, seed))[0], theirs(pixels(3, seed))[0])
    assert one.last == "captured: 3 rows in a graph of 4"
    return ours, theirs, one


def same(ours, theirs, seed=7):
    with torch.no_grad():
        got, want = (m(pixel_values=pixels(3, seed)) for m in (ours, theirs))
    assert list(got) == list(want)
    for x, y in zip(got.values(), want.values(), strict=True):
        torch.testing.assert_close(x, y)


def _layer(model):
    return model.layers[1] if hasattr(model, "layers") else model.encoder.layer[1]


def _square(model):
    """A weight with as many rows as columns, deep in the model."""
    return next(m for m in _layer(model).modules() if isinstance(m, nn.Linear) and m.in_features == m.out_features)


def _replaced(model):
    _square(model).weight = nn.Parameter(_square(model).weight.detach() * 1.5)


def _part(model):
    old = _square(model)
    found = nn.Linear(old.in_features, old.out_features, dtype=old.weight.dtype)
    found.load_state_dict({name: 1.5 * x for name, x in old.state_dict().items()})
    parent = next(m for m in model.modules() if old in m.children())
    setattr(parent, next(name for name, x in parent.named_children() if x is old), found)


def _swapped(model):
    other = nn.Parameter(_square(model).weight.detach() * 1.5)
    torch.utils.swap_tensors(_square(model).weight, other)


NEW_GRAPH = {
    "parameter": _replaced,
    "data": lambda m: setattr(_square(m).weight, "data", _square(m).weight.data * 1.5),
    "transposed": lambda m: setattr(_square(m).weight, "data", _square(m).weight.data.t()),
    "part": _part,
    "swapped": _swapped,
    "dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("change", NEW_GRAPH)
def test_other_memory_is_captured_anew(captures, change):
    ours, theirs, one = tower()
    count = len(one.graphs)
    for model in (ours, theirs):
        NEW_GRAPH[change](model)
    same(ours, theirs)
    assert len(one.graphs) == count + 1
    same(ours, theirs, 8)
    assert len(one.graphs) == count + 1


def test_a_parameter_changed_in_place_is_read_by_the_same_graph(captures):
    ours, theirs, one = tower()
    count, replays = len(one.graphs), Graph.replays
    for model in (ours, theirs):
        with torch.no_grad():
            _square(model).weight.mul_(1.5)
    same(ours, theirs)
    assert (len(one.graphs), Graph.replays) == (count, replays + 1)


def test_a_capture_that_fails_lets_other_models_be_captured_anew(captures, monkeypatch):
    """torch's random numbers have another state then, which their graphs do not follow."""
    ours, theirs, one = tower()
    graph, other = next(iter(one.graphs.values())), saccade.optimize(made_tower("vit")[0], fuse=False).served[0]

    def raises(inputs):
        raise RuntimeError("no capture today")

    monkeypatch.setattr(other, "outputs", raises)
    monkeypatch.setattr(graphs, "_leave", lambda pool, device: None)
    with torch.no_grad():
        other.model(pixel_values=pixels(3, 1))
    assert "no capture today" in other.failed
    same(ours, theirs)
    assert (one.last, len(one.graphs)) == ("captured: 3 rows in a graph of 4", 1)
    assert next(iter(one.graphs.values())) is not graph
    graph = next(iter(one.graphs.values()))
    same(ours, theirs, 8)
    assert next(iter(one.graphs.values())) is graph


def test_a_hook_after_a_capture_is_called(captures):
    ours, theirs, one = tower()
    seen = []
    handle = _layer(ours).register_forward_hook(lambda *given: seen.append(1))
    same(ours, theirs)
    assert seen == [1]
    assert one.last.startswith("stock: a module inside of it has a hook")
    handle.remove()
    same(ours, theirs)
    assert one.last.startswith("captured")
    assert seen == [1]


def test_a_hook_of_all_modules_is_called(captures):
    ours, theirs, one = tower()
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *given: seen.append(module))
    try:
        same(ours, theirs)
    finally:
        handle.remove()
    assert _layer(ours) in seen
    same(ours, theirs)
    assert one.last.startswith("captured")


def test_a_config_that_asks_for_hidden_states_is_followed(captures):
    ours, theirs, one = tower()
    for model in (ours, theirs):
        model.config.output_hidden_states = True
    same_states = [m(pixels(3)).hidden_states for m in (ours, theirs)]
    torch.testing.assert_close(*same_states)
    assert one.last == "stock: the config asks for attentions or hidden states"


def test_another_config_is_followed(captures):
    ours, _, one = tower()
    ours.config = copy.deepcopy(ours.config)
    ours.config.return_dict = False
    with torch.no_grad():
        assert isinstance(ours(pixels(3)), tuple)
    assert one.last.startswith("captured")


def test_another_attention_is_stock(captures):
    ours, theirs, one = tower()
    ours.set_attn_implementation("sdpa")
    same(ours, theirs)
    assert one.last == "stock: its attention is 'sdpa' now"


def test_dropout_and_its_mode_are_followed(captures):
    ours, _, one = tower()
    count = len(one.graphs)
    dropouts = [m for m in _layer(ours).modules() if isinstance(m, nn.Dropout)]
    with torch.no_grad():
        first = ours(pixels(3))[0]
        for m in dropouts:
            m.p = 1.0
        assert torch.equal(ours(pixels(3))[0], first)
        dropouts[-1].train()
        assert not torch.allclose(ours(pixels(3))[0], first)
    assert len(one.graphs) == count + 2


def test_results_are_copies_and_shorter_batches_leave_nothing(captures):
    ours, theirs, one = tower()
    with torch.inference_mode():
        kept = [ours(pixels(rows, rows))[0] for rows in (4, 1, 3, 2, 4)]
        for rows, x in zip((4, 1, 3, 2, 4), kept, strict=True):
            torch.testing.assert_close(x, theirs(pixels(rows, rows))[0])
    assert one.last == "captured: 4 rows in a graph of 4"


def test_calls_of_other_signatures_are_told_apart(captures):
    ours, theirs, one = tower()
    with torch.no_grad():
        assert isinstance(ours(pixel_values=pixels(3), return_dict=False), tuple)
        same(ours, theirs)
        assert one.last.startswith("captured")
        ours(pixel_values=pixels(3), interpolate_pos_encoding=True)
        assert one.last == "stock: interpolate_pos_encoding is given"
        assert "hidden_states" in ours(pixel_values=pixels(3), output_hidden_states=True)
    with_gradient = pixels(3).requires_grad_()
    ours(pixel_values=with_gradient)[0].sum().backward()
    assert with_gradient.grad is not None


def test_a_padded_text_model_sees_changes_too(captures):
    ours, theirs = made_padded("mpnet")
    one = saccade.optimize(ours).served[0]
    ids = torch.randint(5, 30, (3, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0])
        assert one.last == "captured: 3 rows in a graph of 4"
        for model in (ours, theirs):
            _replaced(model)
        torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0])
        assert one.last == "captured: 3 rows in a graph of 4"


@pytest.mark.parametrize("lengths", [(5, 0, 3), (5, 9)], ids=["empty row", "left"])
def test_padding_on_the_left_and_empty_rows_are_not_widened(captures, lengths):
    ours, _ = made_padded("mpnet")
    one = saccade.optimize(ours).served[0]
    mask = torch.tensor([[0] * (10 - n) + [1] * n for n in lengths])
    with torch.no_grad():
        for _ in range(3):
            ours(input_ids=torch.randint(5, 30, mask.shape).where(mask.bool(), torch.tensor(1)), attention_mask=mask)
            assert "a row starts with a masked token" in one.last


@pytest.fixture
def packed(captures, monkeypatch):
    """(a packed encoder that has replayed its graph, its twin, what serves it, a batch)."""
    monkeypatch.setattr(attention, "attention_forward", packed_attention)
    ours, theirs = (m.eval() for m in made("bert"))
    one = saccade.optimize(ours, fuse=False).served[0]
    ids, mask = encoder_batch((5, 9, 3), 0)
    batch = {"input_ids": ids, "attention_mask": mask}
    for _ in range(3):
        same_tokens(ours, theirs, batch)
    assert one.last == "captured: 17 tokens in a graph of 64"
    return ours, theirs, one, batch


def same_tokens(ours, theirs, batch):
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        got, want = ours(**batch), theirs(**batch)
    assert list(got) == list(want)
    torch.testing.assert_close(got[0][real], want[0][real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["parameter", "data", "part"])
def test_a_packed_encoder_is_captured_anew(packed, change):
    ours, theirs, one, batch = packed
    count = len(one.graphs)
    for model in (ours, theirs):
        NEW_GRAPH[change](model)
    for _ in range(2):
        same_tokens(ours, theirs, batch)
    assert len(one.graphs) == count + 1


def test_graphs_of_weights_that_were_replaced_do_not_add_up(packed, monkeypatch):
    ours, theirs, one, batch = packed
    monkeypatch.setattr(gpu, "_MOST_GRAPHS", 3)
    for _ in range(5):
        for model in (ours, theirs):
            NEW_GRAPH["parameter"](model)
        same_tokens(ours, theirs, batch)
        assert len(one.graphs) <= 3


def test_a_packed_encoder_follows_hooks_config_and_pooler(packed):
    ours, theirs, one, batch = packed
    seen = []
    handle = _layer(ours).register_forward_hook(lambda *given: seen.append(1))
    same_tokens(ours, theirs, batch)
    assert (seen, one.last) == ([1], "stock: a module inside of it has a hook, which a replay would not call")
    handle.remove()
    same_tokens(ours, theirs, batch)
    assert one.last.startswith("captured")
    ours.config.return_dict = False
    with torch.no_grad():
        assert isinstance(ours(**batch), tuple)
    ours.config.return_dict = True
    ours.pooler = None
    with torch.no_grad():
        assert list(ours(**batch)) == ["last_hidden_state"]
    ours.set_attn_implementation("sdpa")
    with torch.no_grad():
        ours(**batch)
    assert one.last == "stock: its attention is 'sdpa' now"


def test_a_limit_of_the_config_that_has_risen_is_no_error(packed):
    ours, _, one, batch = packed
    with torch.no_grad():
        ours.config.max_position_embeddings = 8
        with pytest.raises(saccade.InvalidArgument, match="end at 8"):
            ours(**batch)
        ours(**{name: x[:, :8] for name, x in batch.items()})
        ours.config.max_position_embeddings = 40
        ours(**batch)
    assert one.last.startswith("captured")
