"""Tokenizers of four kinds, trained on made up texts."""

from __future__ import annotations

import random

import pytest

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

ALPHABET = "abcdeé日本ß.,!-'’1234🙂́ﬁＡ\u200b\u00a0\n\t▁#"


def corpus(seed, words=400):
    r = random.Random(seed)
    made = ["".join(r.choices(ALPHABET, k=r.randrange(1, 9))) for _ in range(words)]
    return "".join(x + r.choice([" ", " ", " ", "  ", " \n", "\n\n", ". ", " [SEP] "]) for x in made)


def trained(model, trainer, normalizer, pre_tokenizer):
    found = Tokenizer(model)
    found.normalizer, found.pre_tokenizer = normalizer, pre_tokenizer
    found.train_from_iterator([corpus(i) for i in range(3)], trainer)
    found.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    return found


SPECIAL = ["[UNK]", "[CLS]", "[SEP]"]


def word_piece():
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())


def byte_level():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet)
    return trained(models.BPE(), trainer, normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False))


def unigram(split=True):
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False)
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Lowercase()])
    return trained(models.Unigram(), trainer, normalizer, pre_tokenizers.Metaspace(split=split))


def sentence_piece_of_words():
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False)
    parts = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return trained(models.Unigram(), trainer, normalizers.Strip(), parts)


MAKERS = [word_piece, byte_level, unigram, sentence_piece_of_words]
