"""Real sentences for the demo: Python's language reference, which ships with every Python as `pydoc_data`, and questions about
it."""

from __future__ import annotations

import re
from collections.abc import Iterable

QUERIES = (
    "How do I make sure a file is closed even when an error happens?",
    "How do I write a small function without giving it a name?",
    "What happens if a key is not in the dictionary?",
    "How can an inner function change a variable of the outer one?",
    "How are two objects of my own class compared for being equal?",
    "How do I stop a loop early?",
)

_TOPICS = (
    "with", "context-managers", "lambda", "typesmapping", "naming", "nonlocal", "global", "customization", "comparisons", "break",
    "continue", "for", "while", "try", "raise", "exceptions", "import", "class", "function", "yield", "async", "booleans", "truth",
    "typesseq", "string-methods", "formatstrings", "numbers", "integers", "assignment", "del", "calls", "objects",
)  # fmt: skip
_PER_TOPIC, _LEAST_SENTENCES = 40, 10


def sentences(limit: int) -> list[str]:
    """Up to `limit` different sentences of 40 to 240 characters, in the order of the topics above."""
    return [sentence for found in sentences_of(_TOPICS, _PER_TOPIC).values() for sentence in found][:limit]


def sentences_of(names: Iterable[str], most: int) -> dict[str, list[str]]:
    """The first `most` sentences of each of these topics; a sentence that occurs in several topics belongs to the first."""
    from pydoc_data.topics import topics

    owner: dict[str, str] = {}
    for name in names:
        for sentence in _split(topics.get(name, ""))[:most]:
            owner.setdefault(sentence, name)
    return {name: [sentence for sentence, its in owner.items() if its == name] for name in names}


def documents(limit: int) -> list[list[str]]:
    """Whole topics of the reference, in alphabetical order, as lists of their sentences of any length from three words on,
    `limit` altogether."""
    from pydoc_data.topics import topics

    found: list[list[str]] = []
    left = limit
    for name in sorted(topics):
        every = [s for s in _every(topics[name]) if len(s.split()) >= 3 and s[0].isupper() and s.endswith((".", "?", "!"))]
        if len(every) >= _LEAST_SENTENCES and left:
            found.append(every[: min(left, _PER_TOPIC)])
            left -= len(found[-1])
    return found


def _split(text: str) -> list[str]:
    return [sentence for sentence in _every(text) if _is_prose(sentence)]


def _every(text: str) -> list[str]:
    """The sentences of all paragraphs of prose, of any length."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", re.sub(r"[*`]", "", text)):
        lines = paragraph.splitlines()
        if len({len(line) - len(line.lstrip()) for line in lines}) != 1:
            # a grammar rule, a list or code, but not prose
            continue
        joined = " ".join(line.strip() for line in lines)
        sentences += re.split(r"(?<=[.!?])\s+(?=[A-Z])", joined)
    return sentences


def _is_prose(sentence: str) -> bool:
    return 40 <= len(sentence) <= 240 and sentence[0].isupper() and sentence.endswith(".")
