"""The example that embeds a corpus: a tiny random encoder from files, stock beside `saccade.optimize` on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import saccade

pytest.importorskip("transformers")
WORDS = [
    "the",
    "water",
    "is",
    "long",
    "people",
    "find",
    "time",
    "ways",
    "that",
    "nobody",
    "knows",
    "and",
    "more",
    "than",
    "these",
]
PATH = Path(__file__).parents[2] / "examples" / "serve_embeddings.py"
spec = importlib.util.spec_from_file_location("serve_embeddings", PATH)
serve_embeddings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve_embeddings)
CPU = ["--rounds", "1", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A BERT of random weights, and a tokenizer that knows the words above."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(place)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    # weights so large that it matters to which tokens a token attends
    BertModel(BertConfig(vocab_size=len(vocabulary), initializer_range=0.3, **sizes)).save_pretrained(place)
    return place


def test_embeds_sentences_of_the_reference(folder, capsys):
    assert serve_embeddings.main(["--model", str(folder), "--count", "20", "--batch", "8", *CPU]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.index("4 passes over 20 sentences: about")
        < printed.index("BertModel on cpu, float32: packed")
        < printed.index("20 sentences,")
    )
    assert serve_embeddings.STOCK in printed
    assert serve_embeddings.OURS in printed


def test_embeds_a_file(folder, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the water is long\n\n  people find time \nways that nobody knows\n", encoding="utf-8")
    assert serve_embeddings.main([str(corpus), "--model", str(folder), "--count", "2", *CPU]) == 0
    # [CLS] and [SEP] are tokens too
    assert "2 sentences, 11 tokens, 8%" in capsys.readouterr().out


def test_vectors_of_both_are_those_of_single_sentences(folder):
    tokenizer, model = serve_embeddings.loaded(folder, "cpu", "float32")
    texts = [" ".join(WORDS[i % 5 : i % 5 + 2 * i + 1]) for i in (3, 0, 6, 1, 5, 2, 4)]
    batches = serve_embeddings.batches_of(tokenizer, texts, 4, 12)
    assert [x["input_ids"].shape[1] for x in batches] == [9, 12]  # the shortest first, and the longest cut
    rows = [ids[mask.bool()] for x in batches for ids, mask in zip(x["input_ids"], x["attention_mask"], strict=True)]
    with torch.inference_mode():
        alone = [model(row[None]).last_hidden_state[0].mean(0) for row in rows]
    wanted = torch.nn.functional.normalize(torch.stack(alone), dim=-1)
    done = []
    torch.testing.assert_close(serve_embeddings.embed(model, batches, False, done.append), wanted, rtol=1e-4, atol=1e-5)
    with saccade.optimize(model):
        torch.testing.assert_close(serve_embeddings.embed(model, batches, True, done.append), wanted, rtol=1e-4, atol=1e-5)
    assert done == [4, 3] * 2
    # the vectors differ so much that a mix-up of sentences would be seen
    assert (wanted @ wanted.T - torch.eye(7)).max() < 0.99


def test_no_speed_is_printed_where_embeddings_differ(folder, capsys, monkeypatch):
    optimize = saccade.optimize

    def forgets_the_places(model):
        model.embeddings.position_embeddings.weight.data.zero_()
        return optimize(model)

    monkeypatch.setattr(saccade, "optimize", forgets_the_places)
    assert serve_embeddings.main(["--model", str(folder), "--count", "6", *CPU]) == 1
    captured = capsys.readouterr()
    assert "the least cosine with the embeddings of stock is" in captured.err
    assert "times stock" not in captured.out


def test_sentences_are_repeated_where_more_are_asked_for():
    found = serve_embeddings.sentences_of(serve_embeddings.options_of(["--count", "5000"]))
    assert len(found) == 5000
    assert 500 < len(set(found)) < 2500


@pytest.mark.parametrize("words", [["--batch", "0"], ["--max-tokens", "2"]])
def test_says_what_is_wrong(words, capsys):
    with pytest.raises(SystemExit):
        serve_embeddings.main(words)
    assert " ".join(words[:1]) + f" is {words[1]}" in capsys.readouterr().err


def test_says_which_file_is_missing(tmp_path, capsys):
    assert serve_embeddings.main([str(tmp_path / "absent.txt")]) == 1
    assert "absent.txt" in capsys.readouterr().err
