"""Prose that has to be read twice: `python -m tools.prose [FILE ...]`, part of `make lint`.

It reads comments, docstrings and pages, and reports sentences that begin with Of, What, Who, Where or Which, and phrases that have a plainer form.
Headings, tables, code and logs are left out; questions are allowed. In the pages of `SHORT` it also reports sentences of more than 25 words.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HEAD = re.compile(r"(?:^|(?<=[.!?:] )|(?<=[.!?:]\n))(?:[*-] |\d+\. )?\**(Of|What|Who|Where|Which)\b[^.?!]*(?:[.!:]|$)")
# a phrase -> its plainer form
PLAINER = {"makes again": "replays", "make again": "replay", "gives way": "falls back", "give way": "fall back"}
# pages whose sentences are counted -> the section that is read, or the whole
SHORT = {"DESIGN.md": "", "CONTRIBUTING.md": "", "docs/decisions/*.md": "", "CHANGELOG.md": "Unreleased"}
MOST_WORDS = 25
_LINK, _CODE = re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), re.compile(r"`[^`]*`")
_SENTENCE_END, _HEADING = re.compile(r"[.?!][*\"')]*\s+"), re.compile(r"## (.+)")
_WORD = re.compile(r"[^\s*]*\w[^\s*]*")
_PHRASE = re.compile(rf"\b({'|'.join(PLAINER)})\b", re.IGNORECASE)


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of a file."""
    for line, text in prose_of(path):
        for match in _HEAD.finditer(text):
            yield (
                line + text[: match.start()].count("\n"),
                f"a sentence begins with {match[1]}: {' '.join(match[0].split())[:70]}",
            )
        for match in _PHRASE.finditer(text):
            yield line + text[: match.start()].count("\n"), f"say {PLAINER[match[1].lower()]!r} for {match[1]!r}"
    if path.resolve().is_relative_to(ROOT):
        name = path.resolve().relative_to(ROOT)
        for section in [section for pattern, section in SHORT.items() if name.match(pattern)]:
            yield from long_sentences(path.read_text(encoding="utf-8"), section)


def long_sentences(text: str, section: str = "") -> Iterator[tuple[int, str]]:
    """(line, how long the sentence is) for each of more than `MOST_WORDS` words, in one section of a page or in all of it.

    A piece of code is one word; an address is none.
    """
    for line, paragraph in _of_markdown(text):
        if section and _section_at(text, line) != section:
            continue
        plain = _LINK.sub(r"\1", _CODE.sub("code", paragraph))
        start = 0
        for end in [*(found.end() for found in _SENTENCE_END.finditer(plain)), len(plain)]:
            sentence = plain[start:end]
            if (words := len(_WORD.findall(sentence))) > MOST_WORDS:
                yield line + plain[:start].count("\n"), f"a sentence of {words} words: {' '.join(sentence.split())[:70]}"
            start = end


def _section_at(text: str, line: int) -> str:
    """The heading of the second level above a line."""
    above = [found[1] for found in map(_HEADING.match, text.splitlines()[:line]) if found]
    return above[-1] if above else ""


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of each comment, docstring or paragraph."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _of_python(text)
    elif path.suffix == ".md":
        yield from _of_markdown(text)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if (place := line.find("//")) >= 0:
                yield number, line[place:].lstrip("/ ")


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            found := ast.get_docstring(node)
        ):
            assert isinstance(node.body[0], ast.Expr), "a docstring is an expression"
            for offset, paragraph in _paragraphs(found):
                yield node.body[0].lineno + offset, paragraph


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    for offset, paragraph in _paragraphs(text):
        yield 1 + offset, paragraph


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a list's item or a paragraph, without code, tables and headings."""
    code, first, kept = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""]):
        stripped = line.strip()
        fence = stripped.startswith("```")
        starts = re.match(r"[*-] |\d+\. ", stripped) is not None
        skipped = fence or code or stripped.startswith(("|", "#", "<", ">>>")) or line.startswith("        ")
        if kept and (skipped or starts or not stripped):
            yield first, "\n".join(kept)
            kept = []
        if not skipped and stripped:
            first = first if kept else number
            kept.append(stripped)
        code = code != fence


def files() -> list[Path]:
    """Every tracked file with prose, but for logs."""
    kinds = ("*.py", "*.md", "*.cu", "*.cuh", "*.cpp", "*.hpp")
    found = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in found if "/notes/log/" not in name]


def main(given: list[str]) -> int:
    """Print what is found; 1 if there is anything."""
    found = [(path, *one) for path in (map(Path, given) if given else files()) for one in findings(path)]
    for path, line, said in found:
        print(f"{path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path}:{line}: {said}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
