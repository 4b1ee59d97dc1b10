"""Texts that are joined for the tokenizer have the ids that each has alone."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from tokenizers_made import MAKERS, SPECIAL, byte_level, corpus, unigram, word_piece

from saccade.encoders.together import together
from saccade.encoders.tokens import Encoded, Rust

from tokenizers import AddedToken, normalizers, pre_tokenizers, processors  # isort: skip

LIMIT = 9


def special(found):
    """The tokenizer with its special tokens added, as files of tokenizers have them."""
    found.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in SPECIAL])
    return found


def copies(found, limit, certain=False):
    """A tokenizer that joins texts, and one that takes each alone."""
    plain = type(found).from_str(found.to_str())
    one = together(plain, limit)
    assert one is not None
    if limit is not None:
        found.enable_truncation(limit)
    return Rust(found, limit, certain, False, one), Rust(found, limit, certain, False)


def ids_of(rust, texts):
    return [x.tolist() for x in rust.arrays(rust.encoded(texts, rust.cut(texts)), False)[:2]]


@pytest.fixture(
    scope="module", params=[*MAKERS[:2], lambda: unigram(True), MAKERS[3]], ids=["words", "bytes", "unigram", "pieces"]
)
def pair(request):
    found = special(request.param())
    if isinstance(found.pre_tokenizer, pre_tokenizers.Metaspace):
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return {limit: copies(type(found).from_str(found.to_str()), limit) for limit in (None, LIMIT, 2)}


WORDS = st.text() | st.sampled_from(
    ["", "a", " ", "[SEP]", "[CLS] b", "x[", "]y", "[SEP", "\n", "  é ", "日本", "e\u0301", "\u200b", "##a", "▁"]
)


@hypothesis.given(st.lists(st.lists(WORDS, max_size=5).map("".join), min_size=1, max_size=40), st.sampled_from([None, LIMIT, 2]))
def test_joined_texts_have_the_ids_of_each(pair, texts, limit):
    joined, alone = pair[limit]
    assert ids_of(joined, texts) == ids_of(alone, texts)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 700])
def test_any_number_of_texts(pair, count):
    texts = [corpus(i, 1 + i % 13) for i in range(count)]
    joined, alone = pair[LIMIT]
    assert ids_of(joined, texts) == ids_of(alone, texts)


def test_only_groups_that_name_the_last_token_are_read_alone(pair):
    joined, alone = pair[LIMIT]
    texts = [*["ab c"] * 20, "c [SEP] d", *["é日 b"] * 19]
    asked = []

    def of(group):
        asked.append(group)
        return [x.ids for x in alone.encode([texts[i] for i in group])]

    ids, lengths = joined.together.read(joined.together.encode(texts), len(texts), of)
    assert [20 in group for group in asked] == [True]
    assert [ids.tolist(), lengths.tolist()] == ids_of(alone, texts)


@pytest.mark.parametrize("words", range(LIMIT + 2))
def test_first_words_of_any_number_of_tokens(words):
    """Behind words that vanish are others, which count unless the first words fill the limit."""
    joined, alone = copies(special(word_piece()), LIMIT, certain=True)
    texts = ["b", "a " * words + "\u200b " * 400 + "a b c"]
    assert len(joined.cut(texts)[1]) < len(texts[1])
    assert ids_of(joined, texts) == ids_of(alone, texts)


def test_long_texts_are_cut_as_alone():
    joined, alone = copies(special(word_piece()), LIMIT, certain=True)
    vanish = "\u200b " * 400 + "a b c"  # its first words give no token
    texts = ["a b", vanish, corpus(1), "é"]
    assert any(len(x) < len(y) for x, y in zip(joined.cut(texts), texts, strict=True))
    assert ids_of(joined, texts) == ids_of(alone, texts)


def test_encodings_are_dropped_as_they_are_read():
    joined, _ = copies(special(word_piece()), None)
    some = joined.encoded(["a b", "c"], ["a b", "c"])
    assert isinstance(some, Encoded)
    joined.arrays(some, False)
    assert set(some.encodings) == {None}


def other(change):
    found = special(word_piece())
    change(found)
    return found


NOT_JOINED = {
    "special tokens as text": lambda x: setattr(x, "encode_special_tokens", True),
    "no token at the end": lambda x: setattr(
        x, "post_processor", processors.TemplateProcessing("[CLS] $A", None, [("[CLS]", 1)])
    ),
    "a token that strips": lambda x: x.add_special_tokens([AddedToken("[SEP]", lstrip=True, normalized=False, special=True)]),
    "an added token around it": lambda x: x.add_tokens(["([SEP]"]),
    "the same token at both ends": lambda x: setattr(
        x, "post_processor", processors.TemplateProcessing("[SEP] $A [SEP]", None, [("[SEP]", 2)])
    ),
    "a mark at the start of the input": lambda x: setattr(x, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first")),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_is_not_joined(name):
    assert together(special(word_piece()), LIMIT) is not None
    assert together(other(NOT_JOINED[name]), LIMIT) is None


@pytest.mark.parametrize(("last", "other"), [("||", None), ("[e[", None), ("[SEP]", "é["), ("[SEP]", "é[S"), ("[SEP]", "]é")])
def test_a_token_that_may_begin_in_a_text_and_end_in_the_last_one(last, other):
    """The joined text would have as many last tokens as there are texts, some of them elsewhere."""
    found = special(word_piece())
    found.add_special_tokens([AddedToken(last, normalized=False, special=True)])
    ends = [(x, found.token_to_id(x)) for x in ("[CLS]", last)]
    found.post_processor = processors.TemplateProcessing(f"[CLS] $A {last}", None, ends)
    if other is not None:
        assert together(found, LIMIT) is not None
        found.add_tokens([AddedToken(other, normalized=False)])
    assert together(found, LIMIT) is None


def test_letters_at_an_end_would_continue_a_word():
    found = special(word_piece())
    found.add_special_tokens([AddedToken("e]", normalized=False, special=True)])
    found.post_processor = processors.TemplateProcessing("$A e]", None, [("e]", found.token_to_id("e]"))])
    found.add_tokens([AddedToken("foo", normalized=False, single_word=True)])
    assert found.encode("foo").tokens == ["foo", "e]"]
    assert found.encode("fooe]").tokens[0] != "foo"
    assert together(found, LIMIT) is None


def test_random_merges_are_not_joined():
    found = special(byte_level())
    assert together(found, LIMIT) is not None
    found.model.dropout = 0.1
    assert together(found, LIMIT) is None


def test_normalized_tokens_need_no_normalizer():
    found = byte_level()
    found.add_special_tokens([AddedToken(x, normalized=True, special=True) for x in SPECIAL])
    assert together(found, LIMIT) is None
    found.normalizer = None
    assert together(found, LIMIT) is not None
    found.normalizer = normalizers.NFC()
    assert together(found, LIMIT) is None


def test_types_are_read_alone():
    joined, _ = copies(special(word_piece()), LIMIT)
    assert not joined._replace(typed=True).encoded(["a"], ["a"]).joined
    assert not joined.encoded([("a", "b")], [("a", "b")]).joined
