"""The tokenizers for which the first words of a long text give the tokens of the whole text, so that the rest need not be read.

A tokenizer that splits at every space makes the tokens of a word from that word alone. Words up to a space then give the first tokens of the whole
text, and truncation on the right keeps no more tokens than the limit.
"""

from __future__ import annotations

import json
from typing import Any

_LETTERS = 8  # characters for each token of the limit, beyond which a text is cut
# normalisers that change characters where they stand, by their type
_LOCAL = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip", "StripAccents",
}  # fmt: skip
# pre-tokenisers that split at every space, and those that may accompany them, by type
_SPLITS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_BESIDE = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "UnicodeScripts"}


def _state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return found


def _is_local(state: dict[str, Any]) -> bool:
    kind = state.get("type")
    if kind == "Sequence":
        return all(map(_is_local, state["normalizers"]))
    if kind == "Replace":
        pattern = state["pattern"]
        return pattern == {"Regex": " {2,}"} or (len(pattern.get("String", "")) == 1 and pattern["String"] != " ")
    return not state or kind in _LOCAL


def _splits(state: dict[str, Any]) -> bool:
    kind = state.get("type")
    if kind == "Sequence":
        parts = state["pretokenizers"]
        return all(_splits(x) or x["type"] in _BESIDE for x in parts) and any(map(_splits, parts))
    if kind == "Metaspace":
        return bool(state.get("split", True))
    return kind in _SPLITS or (kind == "ByteLevel" and bool(state.get("use_regex", True)))


def is_certain(rust: Any) -> bool:
    """Whether first words give first tokens for a Rust tokenizer, whose truncation is on the right."""
    spaced = [x for x in rust.get_added_tokens_decoder().values() if any(c.isspace() for c in x.content)]
    draws = bool(getattr(rust.model, "dropout", None))
    return not spaced and not draws and _is_local(_state(rust.normalizer)) and _splits(_state(rust.pre_tokenizer))


def first_words(text: str, limit: int) -> str:
    """The first `limit` words of a long text, or the whole text if it is not long or its words cannot be told apart."""
    if len(text) <= limit * _LETTERS:
        return text
    parts = text.split(" ", limit)
    if len(parts) <= limit:
        return text
    found = text[: len(text) - len(parts[-1]) - 1].rstrip(" ")
    return text if not found or found[-1].isspace() else found
