"""Real sentences for the demo: Python's language reference, which ships with every Python as `pydoc_data`, and questions about it."""

from __future__ import annotations

import re

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
_PER_TOPIC = 40


def sentences(limit: int) -> list[str]:
    """Up to `limit` different sentences of 40 to 240 characters, in the order of the topics above."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}  # a dict keeps order and drops repeats
    for topic in _TOPICS:
        for sentence in _split(topics.get(topic, ""))[:_PER_TOPIC]:
            found[sentence] = None
    return list(found)[:limit]


def _split(text: str) -> list[str]:
    sentences = []
    for paragraph in re.split(r"\n\s*\n", re.sub(r"[*`]", "", text)):
        lines = paragraph.splitlines()
        if len({len(line) - len(line.lstrip()) for line in lines}) != 1:
            continue  # a grammar rule, a list or code: not prose
        joined = " ".join(line.strip() for line in lines)
        sentences += [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", joined) if _is_prose(s)]
    return sentences


def _is_prose(sentence: str) -> bool:
    return 40 <= len(sentence) <= 240 and sentence[0].isupper() and sentence.endswith(".")
