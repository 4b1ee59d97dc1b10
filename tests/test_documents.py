"""The Python code in our documents runs unchanged. Code that needs a GPU has an `if` for that in its block."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [p for folder in ("docs", "src", "benchmarks", "examples") for p in sorted((ROOT / folder).rglob("*.md"))]
DOCUMENTS += sorted(ROOT.glob("*.md"))
BLOCK = re.compile(r"^( *)```(?:python|py)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    return [(text[: m.start(2)].count("\n"), textwrap.dedent(m[2])) for m in BLOCK.finditer(text)]


FOUND = [(path.relative_to(ROOT), line, block) for path in DOCUMENTS for line, block in blocks(path)]


def test_the_readme_has_python():
    assert any(path.name == "README.md" and len(path.parts) == 1 for path, _, _ in FOUND)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("path", "line", "block"), FOUND, ids=[f"{path}:{line}" for path, line, _ in FOUND])
def test_python_runs_as_it_stands(path, line, block, tmp_path, monkeypatch):
    if "saccade.integrations.transformers" in block:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    # lines of the document in a traceback
    exec(compile("\n" * line + block, str(ROOT / path), "exec"), {"__name__": "__main__"})
