"""If a long text is cut, its first words give the ids of the whole text."""

from __future__ import annotations

import re

import pytest
from tokenizers_made import MAKERS, byte_level, corpus, unigram, word_piece

from saccade.encoders.prefix import first_words, is_certain
from saccade.encoders.tokens import Rust

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers  # isort: skip

LIMIT = 24


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "added", [None, AddedToken("bc", lstrip=True), AddedToken("d", rstrip=True), AddedToken("ab", single_word=True)], ids=str
)
def test_the_first_words_give_the_ids_of_the_whole(make, added):
    found = make()
    if added is not None:
        found.add_tokens([added])
    assert is_certain(found)
    texts = [corpus(i) for i in range(10, 40)] + [re.sub(r"\s", "", corpus(50)), "a" * 5000, "a " * 3000, " " * 900 + "a", "é"]
    found.enable_truncation(LIMIT)
    whole = [x.ids for x in found.encode_batch(texts)]
    cut = [first_words(x, LIMIT) for x in texts]
    assert sum(len(x) < len(y) for x, y in zip(cut, texts, strict=True)) > 20
    assert [x.ids for x in Rust(found, LIMIT, True, False).encode(texts)] == whole


def test_what_is_not_certain():
    certain = word_piece()
    spaced = word_piece()
    spaced.add_tokens(["a b"])
    random_merges = byte_level()
    random_merges.model.dropout = 0.1
    merged = byte_level()
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(use_regex=False)
    replaced = word_piece()
    replaced.normalizer = normalizers.Replace("a", "b")
    assert is_certain(replaced)
    replaced.normalizer = normalizers.Replace(" ", "▁")
    bare = word_piece()
    bare.pre_tokenizer = None
    split = byte_level()
    split.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "merged_with_previous")
    assert is_certain(certain)
    for found in (spaced, random_merges, merged, replaced, bare, split, unigram(split=False)):
        assert not is_certain(found)


def test_words_that_vanish_are_read_to_the_end():
    """Fewer tokens than the limit from the first words: the whole text is read."""
    found = word_piece()
    found.enable_truncation(LIMIT)
    text = "\u200b " * 500 + "abc " * 100
    assert len(first_words(text, LIMIT)) < len(text)
    assert Rust(found, LIMIT, True, False).encode([text])[0].ids == found.encode(text).ids


@pytest.mark.parametrize(("words", "kept"), [(LIMIT - 1, LIMIT - 1), (LIMIT, LIMIT), (LIMIT + 1, LIMIT)])
def test_a_long_text_keeps_as_many_words_as_the_limit(words, kept):
    text = " ".join(["abcdefghijklm"] * words)
    assert first_words(text, LIMIT) == " ".join(["abcdefghijklm"] * kept)
