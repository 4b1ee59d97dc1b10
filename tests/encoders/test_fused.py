"""Compiled layers give what the layers give, at any number of tokens; weights moved side by side are saved, copied and moved as before."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import transformers
from encoders_made import MODELS, SIZES, made, padded
from torch import nn

import saccade
from saccade.encoders import joined, training
from saccade.encoders.attention import Borders
from saccade.encoders.fused import Fusion, join_products, parts_of
from saccade.encoders.views import Out, move_views_out, with_views
from saccade.errors import InvalidArgument
from saccade.integrations.packed_qkv import PACKED_QKV, packed_qkv


def packed(lengths):
    """(ids, positions and types `[3, tokens]`, borders)."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(x) for x in lengths])
    ids = torch.randint(4, 30, positions.shape)
    return torch.stack([ids, positions + 2, torch.zeros_like(ids)]), ends


def fused(name):
    """A served encoder whose layers are compiled without a backend, which takes the time that this file does not look at."""
    model, _ = made(name)
    one = saccade.optimize(model.float().eval(), fuse=True).served[0]
    one.fusion.backend = "aot_eager"
    return one


def computed(run, one, lengths):
    torch.manual_seed(len(lengths))
    numbers, ends = packed(lengths)
    arguments = {"input_ids": numbers[:1], "position_ids": numbers[1:2]}
    if "token_type_ids" in one.signature.parameters:
        arguments["token_type_ids"] = numbers[2:]
    return run(arguments, Borders(ends, max(lengths)))


@pytest.mark.sampled(8)  # each compiles for some ten seconds
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_at_any_number_of_tokens(name):
    one = fused(name)
    parameters = [x for x in one.model.parameters() if x.requires_grad]
    with training._aliased(one.model, parameters) as leaves:  # as captures find a model
        for lengths in [(5, 9, 7), (3, 1), (12, 12, 8)]:  # 32 tokens are the width of the model too
            outputs = [computed(run, one, lengths) for run in (one.run, one.run_fused)]
            torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
            weights = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
            wanted, found = (torch.autograd.grad(x, leaves, weights, allow_unused=True) for x in outputs)
            for x, y in zip(wanted, found, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert not one.fusion.failed
    assert all("forward" not in x.__dict__ for x in parts_of(one.model))


def test_a_layer_is_compiled_once_for_all_sizes():
    one = fused("electra")
    with torch.no_grad():
        computed(one.run_fused, one, (5, 9, 7))
        seconds = one.fusion.seconds
        for n in (3, 13, 15):
            computed(one.run_fused, one, (n, 1, n))
    assert one.fusion.seconds == seconds
    assert seconds > 0


def test_under_autocast_the_product_is_of_its_dtype():
    one = fused("bert")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)), rtol=2e-2, atol=2e-2)


def test_dropout_differs_and_follows_the_seed():
    model = transformers.BertModel(transformers.BertConfig(**SIZES, hidden_dropout_prob=0.5)).train()
    one = saccade.optimize(model, fuse=True).served[0]
    one.fusion.backend = "aot_eager"
    numbers, ends = packed((5, 9))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(one.run_fused({"input_ids": numbers[:1], "position_ids": numbers[1:2]}, Borders(ends, 9)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_failing_compiler_leaves_the_layers_as_they_are():
    one = fused("bert")
    one.fusion.backend = "no such backend"
    with torch.no_grad():
        number = one.fusion.ready(one.state, lambda: one._example(64))
        assert number == one.state.read()
        assert "no such backend" in one.fusion.failed
        torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)))
    assert one.fusion.describe().startswith("not fused: torch.compile failed")


def test_products_of_other_tensors_stay_apart():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 5), nn.Linear(4, 3, bias=False)

        def forward(self, x, y):
            return self.a(x), self.b(y), self.b(x), self.c(x)

    counts = []

    def backend(graph, inputs):
        counts.append((join_products(graph), sum(n.target is torch._C._nn.linear for n in graph.graph.nodes)))
        return graph.forward

    module, x, y = Two(), torch.randn(2, 4), torch.randn(2, 4)
    for a, b in zip(torch.compile(module, backend=backend)(x, y), module(x, y), strict=True):
        torch.testing.assert_close(a, b)
    assert counts == [(1, 2)]


# --- weights side by side


def moved(name="bert"):
    """(a served encoder with weights side by side, its twin as it was)"""
    one = fused(name)
    twin = made(name)[1].float().eval()
    before = one.state.read()
    with torch.no_grad():
        number = one.fusion.ready(one.state, lambda: one._example(64))
    assert number != before
    assert one.fusion.knows(number)
    return one, twin


def groups_of(one):
    return [[x.data_ptr() for x in joined.parameters] for joined in one.fusion._joined]


def test_a_product_of_some_weights_is_of_these_alone():
    weights, x = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)], torch.randn(5, 4)
    memory = joined.Joined(weights)
    with joined.looking() as apart, torch.no_grad():
        for some in (weights, weights[:2], weights[1:]):
            torch.testing.assert_close(joined.product(x, some, []), x @ torch.cat(some).t())
    assert memory.holds()
    assert len(apart) == 2


def test_one_memory_and_a_storage_each():
    one, twin = moved()
    layers = SIZES["num_hidden_layers"]
    assert len(one.fusion._joined) == 2 * layers  # weights and biases
    for group in one.fusion._joined:
        q, k, v = group.parameters
        assert k.data_ptr() - q.data_ptr() == q.nbytes
        assert v.data_ptr() - k.data_ptr() == k.nbytes
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in (q, k, v))
    for (name, x), (other, y) in zip(one.model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(x, y)
    with joined.looking() as wanted, torch.no_grad():
        torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)), rtol=1e-5, atol=1e-5)
    assert wanted == []


def test_values_changed_in_place_are_seen():
    one, _ = moved()
    for change in (lambda x: x.mul_(1.5), lambda x: x.data.add_(0.1)):
        with torch.no_grad():
            change(one.model.encoder.layer[0].attention.self.key.weight)
            torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)), rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_transposed_where_it_lies_is_read_as_it_is():
    one, _ = moved()
    key = one.model.encoder.layer[0].attention.self.key
    key.weight.data = key.weight.data.t()
    with torch.no_grad():
        torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["to", "data", "assign", "parameter", "ema"])
def test_weights_that_moved_away_are_put_together_again(change):
    one, twin = moved()
    model = one.model
    key = model.encoder.layer[0].attention.self.key
    with torch.no_grad():
        if change == "to":
            model.to(torch.bfloat16).to(torch.float32)
        elif change == "data":
            key.weight.data = torch.randn_like(key.weight)
        elif change == "assign":
            model.load_state_dict({name: x * 2 for name, x in twin.state_dict().items()}, assign=True)
        elif change == "parameter":
            key.weight = nn.Parameter(torch.randn_like(key.weight))
        else:
            average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(twin), use_buffers=True)
            average.update_parameters(twin)
            for x, y in zip(model.parameters(), average.module.parameters(), strict=True):
                x.data = y.data.clone()
        torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)), rtol=1e-5, atol=1e-5)
        number = one.state.read()
        assert not one.fusion.knows(number)
        parameters = list(model.parameters())
        one.fusion.ready(one.state, lambda: one._example(64))
        assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
        with joined.looking() as wanted:
            torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)), rtol=1e-5, atol=1e-5)
        assert wanted == []


def test_copies_and_files_are_as_without(tmp_path):
    from safetensors.torch import save_model

    one, twin = moved()
    model, path = one.model, tmp_path / "weights"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # run as stock
        assert not set(itertools.chain(*groups_of(one))) & {x.data_ptr() for x in copied.parameters()}
        batch = padded((5, 9), 0, "right", width=9)
        torch.testing.assert_close(copied(*batch)[0], twin(*batch)[0], rtol=1e-5, atol=1e-5)
    sizes = []
    for x in (model, twin):
        buffer = io.BytesIO()
        torch.save(x.state_dict(), buffer)
        sizes.append(len(buffer.getvalue()))
    assert sizes[0] == sizes[1]
    written = []
    for i, x in enumerate((model, twin)):
        save_model(x, str(path) + str(i))
        x.save_pretrained(tmp_path / f"model{i}")
        written.append([(tmp_path / f"weights{i}").read_bytes(), (tmp_path / f"model{i}" / "model.safetensors").read_bytes()])
    assert written[0] == written[1]


def test_restore_gives_each_its_own_memory():
    model, twin = made("bert")
    model, twin = model.float(), twin.float()
    handle = saccade.optimize(model, fuse=True)
    one = handle.served[0]
    one.fusion.backend = "aot_eager"
    with torch.no_grad():
        one.fusion.ready(one.state, lambda: one._example(64))
    memories = [(x.address, x.address + x.memory.nbytes) for x in one.fusion._joined]
    handle.restore()
    assert memories
    for x, y in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(x, y)
        assert not any(first <= x.data_ptr() < last for first, last in memories)


def test_a_weight_changed_between_forward_and_backward_raises():
    one, _ = moved()
    found = computed(one.run_fused, one, (5, 9)).sum()
    with torch.no_grad():
        one.model.encoder.layer[0].attention.self.key.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_weights_that_are_parametrized_stay_where_they_are():
    one = fused("bert")
    layer = one.model.encoder.layer[0].attention.self
    nn.utils.parametrizations.weight_norm(layer.key)
    addresses = {x.data_ptr() for x in one.model.parameters()}
    with torch.no_grad():
        one.fusion.ready(one.state, lambda: one._example(64))
        assert {x.data_ptr() for x in layer.key.parametrizations.parameters()} <= addresses
        torch.testing.assert_close(computed(one.run_fused, one, (5, 9)), computed(one.run, one, (5, 9)), rtol=1e-5, atol=1e-5)


def test_tied_and_odd_weights_stay_where_they_are():
    a, b, odd = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 3)
    b.weight = a.weight
    view = nn.Linear(4, 4)
    view.weight.data = torch.randn(8, 4)[:4]
    model = nn.ModuleList([a, b, odd, view])
    wanted = [(a.weight.data_ptr(), b.weight.data_ptr()), (odd.weight.data_ptr(),), (view.weight.data_ptr(),), (1234,)]
    before = [x.data_ptr() for x in model.parameters()]
    assert joined.join(model, wanted) == []
    assert [x.data_ptr() for x in model.parameters()] == before


def test_gradients_of_frozen_parts():
    one = fused("bert")
    for layer in one.model.encoder.layer:
        layer.attention.self.key.weight.requires_grad_(False)
        layer.attention.self.query.bias.requires_grad_(False)
    wanted, found = [], []
    for into, run in ((wanted, one.run), (found, one.run_fused)):
        one.model.zero_grad()
        computed(run, one, (5, 9)).square().sum().backward()
        into += [x.grad for x in one.model.parameters()]
    for x, y in zip(wanted, found, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_bad_arguments_and_explain():
    model, _ = made("bert")
    with pytest.raises(InvalidArgument, match="fuse is 'yes'"):
        saccade.optimize(model, fuse="yes")
    with saccade.optimize(model) as handle:
        assert isinstance(handle.served[0].fusion, Fusion)
    with saccade.optimize(model, fuse=False) as handle:
        assert handle.served[0].fusion is None


def test_what_is_not_fused_is_said():
    config = transformers.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"])
    handle = saccade.optimize(transformers.DebertaV2Model(config), fuse=True)
    assert "DebertaV2Model: not fused: only packed encoders and towers of transformers are" in handle.explain()


def test_flops_are_those_of_the_products_apart():
    from torch.utils.flop_counter import FlopCounterMode

    x, weights = torch.randn(5, 8, requires_grad=True), [torch.randn(n, 8, requires_grad=True) for n in (8, 4, 4)]
    counts = []
    for run in (lambda: joined.product(x, weights, []), lambda: torch.cat([x @ w.t() for w in weights], 1)):
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_transposed_outputs_leave_the_graph_before():
    """The gradients of attention lie as query, key and value do before they are transposed, so no copy makes them contiguous."""

    class Heads(torch.nn.Module):
        def forward(self, x):
            y = x.relu().view(x.shape[0], 2, 3)
            return y.transpose(0, 1), x.sum(), y

    graph = torch.fx.symbolic_trace(Heads())
    x = torch.randn(4, 6)
    outs = move_views_out(graph)
    assert outs == [Out(0, dims=(0, 1)), Out(1), Out(2)]
    assert all(node.target != "transpose" for node in graph.graph.nodes)
    for got, want in zip(with_views(graph, outs)(x), Heads()(x), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


class Third(torch.nn.Module):
    """Query, key and value of heads, in an order, and what else leaves."""

    def __init__(self, *widths, order=(0, 1, 2), dims=(4, 4, 4)):
        super().__init__()
        self.products = torch.nn.ModuleList(torch.nn.Linear(8, n) for n in widths)
        self.order, self.dims = order, dims

    def forward(self, x):
        found = [
            product(x).view(*x.shape[:-1], -1, dim).transpose(1, 2) for product, dim in zip(self.products, self.dims, strict=True)
        ]
        return x.sum(), *[found[i] for i in self.order]


@pytest.mark.parametrize(
    ("module", "packed"),
    [
        (Third(8, 8, 8), True),
        (Third(8, 8, 8, order=(1, 0, 2)), False),
        (Third(8, 8, 8, order=(0, 1, 1)), False),
        (Third(8, 8, 8, dims=(4, 4, 2)), False),
        (Third(8, 4, 4), False),
        (Third(8, 8, dims=(4, 4), order=(0, 1)), False),
    ],
    ids=["three", "another order", "not all", "other heads", "grouped heads", "two"],
)  # fmt: skip
def test_parts_of_a_product_leave_as_one(module, packed):
    """One gradient comes back for the three, which nobody puts together."""
    counts = []

    def compile_(graph, inputs):
        join_products(graph)
        outs = move_views_out(graph)
        counts.append(len(next(node for node in graph.graph.nodes if node.op == "output").args[0]))
        return with_views(graph, outs)

    x, heads = torch.randn(1, 5, 8, requires_grad=True), len(module.order)
    found = torch.compile(module, dynamic=True, backend=compile_)(x)
    assert counts == [2 if packed else 1 + len(set(module.order))]
    for got, want in zip(found, module(x), strict=True):
        torch.testing.assert_close(got, want)
    weights = [torch.linspace(-1, 1, y.numel()).view_as(y) for y in found]
    leaves = (x, *module.parameters())
    got, want = (torch.autograd.grad(y, leaves, weights, allow_unused=True, materialize_grads=True) for y in (found, module(x)))
    torch.testing.assert_close(got, want)
    assert [hasattr(y, PACKED_QKV) for y in found] == [False, packed, *[False] * (heads - 1)]
    if packed:
        qkv = getattr(found[1], PACKED_QKV)
        for part, y in zip(qkv.unbind(1), found[1:], strict=True):
            assert part.data_ptr() == y.data_ptr()
            assert torch.equal(part, y[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("split", "shape"),
    [
        (lambda x: torch.split(x, 8, -1), (1, 5, 24)),
        (lambda x: torch.split(x, [8, 8, 8], dim=2), (1, 5, 24)),
        (lambda x: torch.split(x, [8, 8, 8], 1), (1, 24, 8)),
    ],
    ids=["of a size", "by name", "of tokens"],
)
def test_a_split_of_the_model_leaves_as_it_is(split, shape):
    class Own(nn.Module):
        def forward(self, x):
            return tuple(part.view(*part.shape[:2], 2, 4) for part in split(x.relu()))

    def compile_(graph, inputs):
        outs = move_views_out(graph)
        assert outs == [Out(0), Out(1), Out(2)]
        return with_views(graph, outs)

    x = torch.randn(shape)
    for got, want in zip(torch.compile(Own(), dynamic=True, backend=compile_)(x), Own()(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_backward_of_attention_writes_one_packed_gradient(name, monkeypatch):
    from saccade.integrations import transformers as integration

    given, attend = [], integration.attend_packed
    monkeypatch.setattr(integration, "attend_packed", lambda call, qkv: given.append(qkv) or attend(call, qkv))
    one = fused(name)
    computed(one.run_fused, one, (5, 9)).sum().backward()
    assert len(given) == SIZES["num_hidden_layers"]
    assert all(x.shape == (14, 3, 4, 8) for x in given)
    given.clear()
    with torch.no_grad():
        computed(one.run_fused, one, (5, 9))
    assert given == [None] * SIZES["num_hidden_layers"]


def test_a_query_of_another_key_is_no_part_of_a_product():
    qkv = torch.randn(5, 3, 2, 4, requires_grad=True)
    query, key, value = (x.transpose(0, 1)[None] for x in qkv.unbind(1))
    setattr(query, PACKED_QKV, qkv)
    assert packed_qkv(query, key, value) is qkv
    assert packed_qkv(query, value, key) is None
    assert packed_qkv(query, key, value.clone()) is None
    assert packed_qkv(key, key, value) is None
    with torch.no_grad():
        assert packed_qkv(query, key, value) is None
    key.register_hook(lambda gradient: 3 * gradient).remove()
    assert packed_qkv(query, key, value) is qkv
    key.register_hook(lambda gradient: 3 * gradient)
    assert packed_qkv(query, key, value) is None, "the hook would not be called"


def test_a_query_whose_gradient_is_kept_gets_one():
    qkv = torch.randn(5, 3, 2, 4, requires_grad=True)
    query, key, value = (x.transpose(0, 1)[None] for x in qkv.unbind(1))
    setattr(query, PACKED_QKV, qkv)
    query.retain_grad()
    assert packed_qkv(query, key, value) is None
