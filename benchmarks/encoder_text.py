"""Real text for tables of whole encoders: sentences of Python's own documentation, which every Python has, and their tokens.

Sentences are those of the language reference (`pydoc_data.topics`) and of the docstrings of standard modules, each once, as long
as they come. No tokenizer of a model is needed: a token is a word, a piece of at most `_PIECE` letters of a longer word, or a
punctuation mark, and its id is a checksum. On these sentences that gives 0.98 of the tokens of BERT's own tokenizer
(`tests/benchmarks/test_models_table.py` compares the two), so lengths are those of real batches; what tokens mean does not matter
to a model of random weights.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

FIRST, LAST, RESERVED = 101, 102, 1000  # ids of BERT's [CLS] and [SEP]; ordinary tokens have ids from 1,000 on
_PIECE = 8
_MODULES = (
    "argparse", "ast", "asyncio/base_events", "asyncio/streams", "bdb", "calendar", "collections/__init__", "concurrent/futures/_base",
    "configparser", "contextlib", "csv", "dataclasses", "decimal", "_pydecimal", "difflib", "dis", "doctest", "email/message", "enum",
    "fileinput", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "http/client", "http/cookiejar", "imaplib", "inspect",
    "ipaddress", "locale", "logging/__init__", "logging/handlers", "mailbox", "mimetypes", "multiprocessing/pool", "numbers", "optparse",
    "pathlib", "pdb", "pickle", "pickletools", "platform", "plistlib", "poplib", "pprint", "_pyio", "random", "sched", "selectors",
    "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "trace", "traceback", "turtle", "typing", "unittest/case", "unittest/mock", "urllib/parse",
    "urllib/request", "uuid", "warnings", "weakref", "zipfile/__init__",
)  # fmt: skip


@functools.cache
def sentences() -> tuple[str, ...]:
    """Every sentence, once, in a fixed order: topics by name, then modules."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    for name in _MODULES:
        texts += _docstrings(Path(sysconfig.get_paths()["stdlib"], f"{name}.py"))
    return tuple(dict.fromkeys(sentence for text in texts for sentence in _split(text)))


def _docstrings(path: Path) -> list[str]:
    """The docstrings of a module, its classes and functions; none of a module that this Python does not have."""
    if not path.is_file():
        return []
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in nodes if isinstance(node, documented) if (text := ast.get_docstring(node))]


def _split(text: str) -> list[str]:
    """Sentences of the paragraphs whose lines are indented alike; others are grammar, lists or code."""
    found = []
    for paragraph in re.split(r"\n\s*\n", re.sub(r"[*`]", "", text)):
        lines = paragraph.splitlines()
        if len({len(line) - len(line.lstrip()) for line in lines}) == 1 and ">>>" not in paragraph:
            joined = " ".join(line.strip() for line in lines)
            found += [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", joined) if s[:1].isupper() and s.endswith((".", "?", "!"))]
    return found


def tokens(text: str) -> list[int]:
    """The ids of a text's tokens, without those at its ends."""
    words = re.findall(r"[^\W_]+|[^\w\s]|_", text.lower())
    pieces = [word[i : i + _PIECE] for word in words for i in range(0, len(word), _PIECE)]
    return [RESERVED + zlib.crc32(piece.encode()) % 29000 for piece in pieces]


def drawn(count: int, seed: int) -> list[str]:
    """`count` sentences in random order, with repeats only where there are fewer."""
    every = list(sentences())
    random.Random(seed).shuffle(every)
    return (every * (1 + count // len(every)))[:count]


@functools.cache
def _running() -> tuple[int, ...]:
    """The tokens of all sentences, one behind another."""
    return tuple(token for text in sentences() for token in tokens(text))


def passages(lengths: list[int]) -> list[Tensor]:
    """Running text of the reference, cut into pieces of these lengths."""
    running = _running()
    found, start = [], 0
    for length in lengths:
        if start + length > len(running):
            start = 0
        found.append(torch.tensor([FIRST, *running[start : start + length - 2], LAST]))
        start += length
    return found
