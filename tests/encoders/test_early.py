"""The forward of a `SentenceTransformer` whose graph is launched before its state is read: the same bits, and each change is seen. Graphs are those of
`graphs_made`."""

from __future__ import annotations

import pytest
import torch
from encoders_made import made, padded
from graphs_made import Graph, install, packed_attention

import saccade
from saccade.encoders import attention, state
from saccade.errors import InvalidArgument

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")


class Transformer(torch.nn.Module):
    """As that of sentence-transformers, without a tokenizer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features):
        given = {name: features[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in features}
        features["token_embeddings"] = self.model(**given, return_dict=True).last_hidden_state
        return features


@pytest.fixture(params=["xlm-roberta", "roberta"])
def served(request, by, monkeypatch):
    """(a model that has replayed its graph, what serves it, whether batches may be early)."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    install(monkeypatch)
    monkeypatch.setattr(attention, "attention_forward", packed_attention)
    parts = [Transformer(made(request.param)[0].eval()), Pooling(32, pooling_mode="mean"), Normalize()]
    model = sentence_transformers.SentenceTransformer(modules=parts, device="cpu").eval()
    one = saccade.optimize(model, fuse=False).served[0]
    with torch.no_grad():
        for _ in range(3):
            model(batch())
    return model, one, by == "c++"


def batch(lengths=(5, 9, 3), padding=1, **changes):
    ids, mask = padded(lengths, padding)
    return {"input_ids": ids, "attention_mask": mask, **changes}


def results(model, one, given, monkeypatch):
    """The features of a call as it is, those of one that reads the state first, and whether the former was early."""
    early, real = [], type(one)._pooled_early
    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(type(one), "_pooled_early", lambda self, x: early.append(real(self, x)) or early[-1])
        ours = model(dict(given))
        patched.setattr(type(one), "_pooled_early", lambda self, x: None)
        theirs = model(dict(given))
    return ours, theirs, bool(early) and early[-1] is not None


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert torch.equal(ours[name], x), name
        assert ours[name].dtype == x.dtype


BATCHES = {
    "as the first": lambda: batch(),
    "of other texts": lambda: batch((9, 4, 4)),
    "without padding": lambda: batch((7, 7)),
    "of types": lambda: batch(token_type_ids=torch.zeros(3, 9, dtype=torch.long)),
    "without a mask": lambda: {"input_ids": batch((6, 6))["input_ids"], "modality": "text"},
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_same_bits(served, monkeypatch, name):
    model, one, may_be_early = served
    given = BATCHES[name]()
    if "attention_mask" not in given:  # of the pooling, which is passed by
        with torch.no_grad():
            first, second = (one.pooled({"input_ids": given["input_ids"]}) for _ in range(2))
        assert all(map(torch.equal, first, second))
        return
    ours, theirs, was_early = results(model, one, given, monkeypatch)
    same(ours, theirs)
    assert was_early == may_be_early


LATE = {
    "ids of 32 bits": (lambda: batch(input_ids=batch()["input_ids"].int()), True),
    "a mask that hides a token": (
        lambda: batch(attention_mask=torch.tensor([[1, 0, 1] + [0] * 6, [1] * 9, [1] * 3 + [0] * 6])), False
    ),
    "a mask of one row": (lambda: batch(attention_mask=torch.ones(1, 9, dtype=torch.long)), False),
    "no real token": (lambda: {name: torch.full((2, 3), i) for i, name in ((1, "input_ids"), (0, "attention_mask"))}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_other_batches_are_left_to_the_usual_way(served, name):
    _, one, _ = served
    make, is_pooled = LATE[name]
    with torch.no_grad():
        assert one._pooled_early(make()) is None
        assert (one.pooled(make()) is not None) == is_pooled


def test_too_many_columns_are_refused(served):
    model, *_ = served
    with torch.no_grad(), pytest.raises(InvalidArgument, match="the positions of"):
        model(batch((50, 3)))


def test_a_gradient_needs_the_modules(served):
    assert served[1]._pooled_early(batch()) is None


# what is changed; whether a graph still computes it, and a replay of the last graph gives other numbers
CHANGES = {
    "weight in place": (lambda m: m.embeddings.word_embeddings.weight.data.mul_(2), True, True),
    "parameter": (
        lambda m: setattr(m.embeddings.LayerNorm, "weight", torch.nn.Parameter(m.embeddings.LayerNorm.weight * 2)), True, True,
    ),
    "data": (lambda m: setattr(m.embeddings.LayerNorm.weight, "data", m.embeddings.LayerNorm.weight.data * 2), True, True),
    "dropout": (lambda m: setattr(m.encoder.layer[0].output.dropout, "p", 0.5), True, False),
    "hook": (lambda m: m.encoder.layer[0].register_forward_hook(lambda *x: None), False, False),
    "config": (lambda m: setattr(m.config, "output_hidden_states", True), False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_the_next_call(served, monkeypatch, name):
    _, one, _ = served
    change, is_pooled, differs = CHANGES[name]
    with torch.no_grad():
        before = one.pooled(batch())
        change(one.model)
        after = one.pooled(batch())
        monkeypatch.setattr(type(one), "_pooled_early", lambda self, given: None)
        wanted = one.pooled(batch())
    assert (after is not None) == (wanted is not None) == is_pooled
    if is_pooled:
        assert all(map(torch.equal, after, wanted))
        assert torch.equal(before[0], after[0]) != differs


def _weight(embeddings, more):
    embeddings.word_embeddings.weight = torch.nn.Parameter(more)


def _memory(embeddings, more):
    embeddings.word_embeddings.weight.data = more


def _module(embeddings, more):
    embeddings.word_embeddings = torch.nn.Embedding.from_pretrained(more)


@pytest.mark.parametrize("enlarge", [_weight, _memory, _module])
def test_an_id_of_a_larger_table_is_not_looked_up_in_the_old_one(served, monkeypatch, enlarge):
    model, one, _ = served
    module, old = one.model.embeddings.word_embeddings, one.model.embeddings.word_embeddings.weight.detach()
    enlarge(one.model.embeddings, torch.cat((old, torch.ones(4, old.shape[1]))))
    given = batch()
    given["input_ids"][0, 0] = len(old) + 3
    ours, theirs, _ = results(model, one, given, monkeypatch)
    same(ours, theirs)
    assert module.weight.shape[1] == old.shape[1], "both live on, as in an optimizer"


def test_a_device_without_graphs_is_asked_for_none(served, monkeypatch):
    _, one, _ = served
    # as `model.cpu()` moves a parameter in place, while its old memory lives on
    one.state.tensors[0] = one.state.tensors[0].to("meta")
    monkeypatch.setattr(state, "autocast_of", lambda kind: None)  # a meta device has none
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: pytest.fail(f"a stream of {device}"))
    with torch.no_grad():
        assert one.pooled(batch()) is None


def test_results_are_not_overwritten(served):
    model, *_ = served
    with torch.no_grad():
        first = model(batch())
        kept = {name: x.clone() for name, x in first.items()}
        replays = Graph.replays
        model(batch((9, 2, 2)))
    assert Graph.replays == replays + 1
    same(first, kept)
