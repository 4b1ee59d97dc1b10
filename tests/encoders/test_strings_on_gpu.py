"""From strings on a GPU: batches are replayed from graphs, results travel back in order."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from encoders_made import SIZES, padded

import saccade
from saccade.encoders import packing

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]

WORDS = ["sea", "a", "hills", "dogs", "way", "of", "it", "cat"]
RANDOM = random.Random(0)
TEXTS = ["", "a", *(" ".join(RANDOM.choices(WORDS, k=RANDOM.randrange(1, 30))) for _ in range(1500))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (found / "vocab.txt").write_text("\n".join(pieces))
    transformers.BertTokenizerFast(str(found / "vocab.txt"), model_max_length=40).save_pretrained(found)
    return found


def saved(folder, name, **changes):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, initializer_range=0.3, **changes)
    getattr(transformers, name)(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "weightedmean", ("cls", "mean")], ids=str)
def test_encode(folder, pooling, dtype):
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    transformer = Transformer(saved(folder, "BertModel"))
    pooled = Pooling(SIZES["hidden_size"], pooling_mode=pooling)
    model = sentence_transformers.SentenceTransformer(modules=[transformer, pooled], device="cuda").to(dtype).eval()
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for options in (
        {},
        {"batch_size": 16},
        {"convert_to_tensor": True},
        {"convert_to_numpy": False},
        {"normalize_embeddings": True},
    ):
        stock = model.encode(TEXTS, **options)
        with saccade.optimize(model) as handle:
            for _ in range(3):  # the first call captures
                ours = model.encode(TEXTS, **options)
            assert " batches" in handle.explain()
            assert handle.served[0].last.startswith("captured")
        assert type(ours) is type(stock)
        if isinstance(stock, list):
            assert ours[0].device == stock[0].device
            ours, stock = torch.stack(ours), torch.stack(stock)
        ours, stock = torch.as_tensor(ours), torch.as_tensor(stock)
        assert (ours.dtype, ours.device) == (stock.dtype, stock.device)
        torch.testing.assert_close(ours, stock, **tolerance)


def test_training_after_encode(folder):
    """A backward can use what a call under inference mode has made."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    modules = [Transformer(saved(folder, "BertModel")), Pooling(SIZES["hidden_size"])]
    model = sentence_transformers.SentenceTransformer(modules=modules, device="cuda")
    with saccade.optimize(model):
        model.encode(TEXTS[:50])
        features = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in model.preprocess(TEXTS[2:8]).items()}
        model(features)["sentence_embedding"].square().sum().backward()
        assert all(x.grad is not None for x in model[0].model.encoder.parameters())


@pytest.mark.parametrize("options", [{}, {"batch_size": 16}, {"convert_to_tensor": True}], ids=str)
def test_predict(folder, options):
    saved(folder, "BertForSequenceClassification", num_labels=1)
    model = sentence_transformers.CrossEncoder(str(folder), device="cuda")
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    stock = model.predict(pairs, **options)
    with saccade.optimize(model) as handle:
        for _ in range(3):
            ours = model.predict(pairs, **options)
        assert " batches" in handle.explain()
        assert handle.served[0].last.startswith("captured")
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(stock), rtol=1e-3, atol=1e-3)


def _model(folder, mode):
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    pooled = Pooling(SIZES["hidden_size"], pooling_mode=mode)
    modules = [Transformer(saved(folder, "BertModel")), pooled]
    return sentence_transformers.SentenceTransformer(modules=modules, device="cuda").eval()


LENGTHS = [(5, 9, 1, 7), (3,), (30, 12, 36), (4,) * 70, (1, 2, 3, 4, 5) * 40]


def _features(lengths):
    ids, mask = padded(lengths, 0)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_the_forward_of_the_model(folder, mode, dtype, by, monkeypatch):
    """C++ alone packs a large batch of the host in pieces."""
    monkeypatch.setattr(packing, "packed_on_host", lambda: 256)
    assert [len(packing.pieces_of(_features(x))) for x in LENGTHS] == ([1, 1, 1, 2, 4] if by == "c++" else [1] * 5)
    model = _model(folder, mode).to(dtype)
    with torch.inference_mode():
        there = [{name: x.cuda() for name, x in _features(lengths).items()} for lengths in LENGTHS]
        stock = [model(dict(batch)) for batch in there]
        handle = saccade.optimize(model)
        for _ in range(2):
            for lengths, on_gpu, want in zip(LENGTHS, there, stock, strict=True):
                for given in (_features(lengths), on_gpu):
                    got = model(dict(given))
                    assert handle.served[0].last.startswith("captured")
                    assert got.keys() == want.keys()
                    real = on_gpu["attention_mask"].bool()
                    limit = 2e-5 if dtype == torch.float32 else 3e-2
                    for ours, theirs in (
                        (got["sentence_embedding"], want["sentence_embedding"]),
                        (got["token_embeddings"][real], want["token_embeddings"][real]),
                    ):
                        assert ours.dtype == theirs.dtype
                        assert (ours - theirs).float().norm() <= limit * theirs.float().norm()


def test_what_is_returned_stays(folder):
    model = _model(folder, "mean")
    saccade.optimize(model)
    with torch.inference_mode():
        first = model(_features((5, 9)))["sentence_embedding"]
        before = first.clone()
        model(_features((8, 6)))
        assert torch.equal(first, before), "the next replay overwrites nothing that left"
