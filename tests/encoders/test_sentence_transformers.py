"""Models that sentence-transformers builds around an encoder give stock's results after `saccade.optimize`, in inference and training."""

from __future__ import annotations

import contextlib
import copy
import string
import weakref

import pytest
import torch
import transformers
from encoders_made import SIZES

import saccade

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["a cat sat", "dogs ran far away over the hills", "no", "it is a long way to the sea", "a cat", "the sea"]


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A WordPiece tokenizer of the letters, in a folder."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=40)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def saved(folder, class_name, config_name, changes=None):
    """A tiny model of transformers beside the tokenizer; its weights are so large that outputs of sentences differ."""
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**SIZES, initializer_range=0.3, **(changes or {}))
    getattr(transformers, class_name)(config).save_pretrained(folder)
    return str(folder)


def embedding_model(folder, pooling, *model):
    """A SentenceTransformer of such a model."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    transformer = Transformer(saved(folder, *model))
    pooled = Pooling(SIZES["hidden_size"], pooling_mode=pooling)
    return sentence_transformers.SentenceTransformer(modules=[transformer, pooled], device="cpu").eval()


BERT = ("BertModel", "BertConfig")
QWEN = ("Qwen3Model", "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8})
EMBEDDERS = {"bert": ("mean", *BERT), "bert-cls": ("cls", *BERT), "qwen3": ("lasttoken", *QWEN)}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_encode(tokenizer_folder, name, side):
    model = embedding_model(tokenizer_folder, *EMBEDDERS[name])
    model.tokenizer.padding_side = side
    stock = model.encode(TEXTS, batch_size=4)
    with saccade.optimize(model) as handle:
        ours = model.encode(TEXTS, batch_size=4, convert_to_tensor=True)
        # BERT's own pooler reads the first column, which is padding then
        assert handle.served[0].last.startswith("stock: a padded position" if side == "left" and name != "qwen3" else "unpadded")
    torch.testing.assert_close(ours, torch.as_tensor(stock), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.encode(TEXTS, batch_size=4), stock)
    assert (ours[0] - ours[1]).abs().max() > 0.01


@pytest.mark.parametrize("model", [("MPNetModel", "MPNetConfig"), ("DebertaV2Model", "DebertaV2Config")], ids=lambda x: x[0])
def test_encode_of_a_model_that_cannot_be_packed(tokenizer_folder, model):
    """Its batches are stock's on a CPU; the first one that is filled up gives the same embeddings."""
    embedder = embedding_model(tokenizer_folder, "mean", *model)
    stock = embedder.encode(TEXTS, batch_size=4)
    with saccade.optimize(embedder) as handle:
        assert embedder.encode(TEXTS, batch_size=4) == pytest.approx(stock, rel=1e-4, abs=1e-5)
        assert handle.served[0].last == "stock: CUDA graphs need a GPU"
        features = embedder.tokenize(TEXTS)
        assert not handle.served[0].unfit({name: features[name] for name in ("input_ids", "attention_mask")})
    assert embedder.encode(TEXTS, batch_size=4) == pytest.approx(stock, rel=1e-4, abs=1e-5)


def test_predict_of_a_cross_encoder(tokenizer_folder):
    saved(tokenizer_folder, "BertForSequenceClassification", "BertConfig", {"num_labels": 1})
    model = sentence_transformers.CrossEncoder(str(tokenizer_folder), device="cpu")
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    stock = model.predict(pairs, batch_size=4)
    with saccade.optimize(model) as handle:
        ours = model.predict(pairs, batch_size=4)
        assert handle.served[0].last == "unpadded"
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(stock), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.predict(pairs, batch_size=4), stock)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_gradients_of_a_contrastive_loss(tokenizer_folder, name):
    """Two forwards come before one backward; without dropout, as the model is in eval mode."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    ours = embedding_model(tokenizer_folder, *EMBEDDERS[name])
    theirs = copy.deepcopy(ours)
    handle = saccade.optimize(ours)
    found = []
    for model in (ours, theirs):
        features = [model.tokenize(TEXTS[:3]), model.tokenize(TEXTS[3:])]
        loss = MultipleNegativesRankingLoss(model)(features, None)
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    assert handle.served[0].last == "unpadded"
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


def test_sparse_encoder(tokenizer_folder):
    saved(tokenizer_folder, "BertForMaskedLM", "BertConfig")
    model = sentence_transformers.SparseEncoder(str(tokenizer_folder), device="cpu")
    stock = model.encode(TEXTS, batch_size=4, convert_to_sparse_tensor=False)
    with saccade.optimize(model) as handle:
        ours = model.encode(TEXTS, batch_size=4, convert_to_sparse_tensor=False)
        assert handle.served[0].last == "unpadded"
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(stock), rtol=1e-4, atol=1e-5)


def test_multi_vector_encoder(tokenizer_folder):
    saved(tokenizer_folder, *BERT)
    model = sentence_transformers.MultiVectorEncoder(str(tokenizer_folder), device="cpu")
    for encode in (model.encode_query, model.encode_document):
        stock = encode(TEXTS, batch_size=4)
        with saccade.optimize(model) as handle:
            ours = encode(TEXTS, batch_size=4)
            assert handle.served[0].last == "unpadded"
        for x, y in zip(ours, stock, strict=True):
            torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_what_a_graph_pools_is_what_the_module_pools(mode):
    from sentence_transformers.sentence_transformer.modules import Pooling

    from saccade.encoders.pooling import POOLS

    lengths = torch.tensor([3, 7, 1, 5])
    rows, ends = torch.randn(20, 8), torch.nn.functional.pad(lengths.cumsum(0), (1, 4), value=16).int()
    ends[0] = 0
    padded = torch.nn.utils.rnn.pad_sequence(rows[:16].split(lengths.tolist()), batch_first=True)
    mask = (torch.arange(7) < lengths[:, None]).long()
    expected = Pooling(8, pooling_mode=mode)({"token_embeddings": padded, "attention_mask": mask})["sentence_embedding"]
    found = POOLS[mode](rows, ends)
    torch.testing.assert_close(found[:4], expected)
    assert torch.equal(found[4:], torch.full((4, 8), float("-inf") if mode == "max" else 0.0)), (
        "sequences behind the last one are empty"
    )


def test_the_pooling_takes_only_the_batch_of_its_encoder(tokenizer_folder):
    from saccade.encoders.pooling import keep

    model = embedding_model(tokenizer_folder, "mean", *BERT)
    module, before = model[1], set(model[1].__dict__)
    handle = saccade.optimize(model)
    padded, mask = torch.randn(2, 3, SIZES["hidden_size"]), torch.ones(2, 3, dtype=torch.long)
    keep(padded, mask, torch.full((2, 4), 7.0))
    given = {"token_embeddings": padded, "attention_mask": mask}
    assert torch.equal(module(dict(given))["sentence_embedding"], torch.full((2, 4), 7.0))
    for other in ({"token_embeddings": padded.clone()}, {"attention_mask": mask.clone()}, {"token_weights_sum": torch.ones(2)}):
        assert module(given | other)["sentence_embedding"].shape == (2, SIZES["hidden_size"])
    for changed in (mask, padded):
        changed.mul_(1)
        assert module(dict(given))["sentence_embedding"].shape == (2, SIZES["hidden_size"]), "it was changed in place"
        keep(padded, mask, torch.full((2, 4), 7.0))
    with torch.inference_mode():  # whose tensors count no changes
        inside = {"token_embeddings": padded.clone(), "attention_mask": mask.clone()}
        keep(*inside.values(), torch.full((2, 4), 7.0))
        assert torch.equal(module(inside)["sentence_embedding"], torch.full((2, 4), 7.0))
    left = weakref.ref(padded)
    copied = copy.deepcopy(model)
    assert copied[1](dict(given))["sentence_embedding"].shape == (2, SIZES["hidden_size"])
    handle.restore()
    assert set(module.__dict__) == before
    del given, padded, other, changed
    assert left() is None, "what was pooled keeps no batch alive"


def test_the_forward_of_a_sentence_transformer_puts_out_what_its_modules_do(tokenizer_folder, monkeypatch):
    """With a stand-in for the graph, whose part the tests on a GPU see."""
    model = embedding_model(tokenizer_folder, "mean", *BERT)
    model.append(torch.nn.Identity())
    batch = model.preprocess(TEXTS) if hasattr(model, "preprocess") else model.tokenize(TEXTS)
    batch = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
    with torch.no_grad():
        stock = model(dict(batch))
        handle = saccade.optimize(model)
        (served,) = handle.served
        found = stock["token_embeddings"] + 1, stock["sentence_embedding"] + 1
        monkeypatch.setattr(served, "pooled", lambda given: found)
        ours = model(dict(batch))
        assert ours.keys() == stock.keys()
        assert ours["sentence_embedding"] is found[1]
        assert ours["token_embeddings"] is found[0]
        for other in (dict(batch, token_weights_sum=torch.ones(len(TEXTS))), dict(batch, modality="image")):
            with contextlib.suppress(KeyError):
                assert model(other)["sentence_embedding"] is not found[1]
        for watched in (model[1], served.model):
            hook = watched.register_forward_hook(lambda *given: None)
            assert model(dict(batch))["sentence_embedding"] is not found[1]
            hook.remove()
        replaced, served.model.forward = served.model.forward, served.stock
        assert model(dict(batch))["sentence_embedding"] is not found[1], "somebody has replaced the encoder's forward"
        served.model.forward = replaced
        model[0].forward = model[0].forward
        assert model(dict(batch))["sentence_embedding"] is not found[1], "somebody has replaced the forward before it"
        del model[0].forward
        model[0].model = copy.deepcopy(served.model)
        assert model(dict(batch))["sentence_embedding"] is not found[1], "somebody has replaced the encoder"
        model[0].model = served.model
        assert model(dict(batch))["sentence_embedding"] is found[1]
    assert model(dict(batch))["sentence_embedding"] is not found[1], "a gradient is wanted"
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied
    handle.restore()
    assert "forward" not in model.__dict__


def test_a_batch_that_no_graph_computes_is_that_of_the_modules(tokenizer_folder):
    model = embedding_model(tokenizer_folder, "cls", *BERT)
    handle = saccade.optimize(model)
    assert handle.served[0].pooled({"input_ids": torch.ones(2, 3, dtype=torch.long)}) is None
