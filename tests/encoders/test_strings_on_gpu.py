"""From strings on a GPU: batches are replayed from graphs, results travel back in order."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from encoders_made import SIZES

import saccade

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
    """What a call under inference mode has made serves a backward."""
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
