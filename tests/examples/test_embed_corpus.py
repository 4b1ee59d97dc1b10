"""The example that embeds a corpus: a tiny random encoder from files, compared and timed on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
PATH = Path(__file__).parents[2] / "examples" / "embed_corpus.py"
spec = importlib.util.spec_from_file_location("embed_corpus", PATH)
embed_corpus = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = embed_corpus  # its dataclass looks up annotations there
spec.loader.exec_module(embed_corpus)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A BERT of random weights, and a tokenizer that knows the words of the example."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *embed_corpus.WORDS.split()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(place)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    # weights so large that it matters to which tokens a token attends
    BertModel(BertConfig(vocab_size=len(vocabulary), initializer_range=0.3, **sizes)).save_pretrained(place)
    return place


def test_embeds_made_sentences(folder, capsys):
    words = ["--model", str(folder), "--count", "20", "--batch", "8", "--rounds", "1", "--device", "cpu", "--dtype", "float32"]
    assert embed_corpus.main(words) == 0
    printed = capsys.readouterr().out
    assert "20 sentences" in printed
    for way in (embed_corpus.STOCK, *embed_corpus.OURS):
        assert way.name in printed


def test_embeds_a_file(folder, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the water is long\n\n  people find time \nways that nobody knows\n", encoding="utf-8")
    words = [
        str(corpus),
        "--model",
        str(folder),
        "--count",
        "2",
        "--rounds",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--unsorted",
    ]
    assert embed_corpus.main(words) == 0
    # [CLS] and [SEP] are tokens too
    assert "2 sentences, 11 tokens, 8%" in capsys.readouterr().out


def test_vectors_of_every_way_are_those_of_single_sentences(folder):
    tokenizer, model = embed_corpus.loaded(folder, "cpu", "float32")
    rows = embed_corpus.tokenised(tokenizer, embed_corpus.made_sentences(7, 3), 24)
    assert max(map(len, rows)) == 24 > min(map(len, rows))
    with torch.inference_mode():
        alone = [model(row[None]).last_hidden_state[0].mean(0) for row in rows]
    wanted = torch.nn.functional.normalize(torch.stack(alone), dim=-1)
    done = []
    for way in (embed_corpus.STOCK, *embed_corpus.OURS):
        found = embed_corpus.embed(model, [rows[:4], rows[4:]], way, done.append)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert model.config._attn_implementation == way.attention
    assert done == [4, 3] * 3
    # the vectors differ so much that a mix-up of sentences would be seen
    assert (wanted @ wanted.T - torch.eye(7)).max() < 0.99


def test_no_speed_is_printed_where_embeddings_differ(folder, capsys, monkeypatch):
    packed = embed_corpus.packed

    def forgets_the_places(rows, device):
        inputs = packed(rows, device)
        return {**inputs, "position_ids": inputs["position_ids"] * 0}

    monkeypatch.setattr(embed_corpus, "packed", forgets_the_places)
    words = ["--model", str(folder), "--count", "6", "--rounds", "1", "--device", "cpu", "--dtype", "float32"]
    assert embed_corpus.main(words) == 1
    captured = capsys.readouterr()
    assert "saccade, packed: the least cosine" in captured.err
    assert "sentences/s" not in captured.out


def test_sentences_follow_the_seed():
    made = embed_corpus.made_sentences(300, 1)
    assert made == embed_corpus.made_sentences(300, 1) != embed_corpus.made_sentences(300, 2)
    lengths = sorted(len(sentence.split()) for sentence in made)
    assert lengths[150] < 20 < 50 < lengths[-1] <= 200


@pytest.mark.parametrize("words", [["--batch", "0"], ["--max-tokens", "2"]])
def test_says_what_is_wrong(words, capsys):
    with pytest.raises(SystemExit):
        embed_corpus.main(words)
    assert " ".join(words[:1]) + f" is {words[1]}" in capsys.readouterr().err


def test_says_which_file_is_missing(tmp_path, capsys):
    assert embed_corpus.main([str(tmp_path / "absent.txt")]) == 1
    assert "absent.txt" in capsys.readouterr().err
