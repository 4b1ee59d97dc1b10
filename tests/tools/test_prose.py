"""The check of prose finds what it names, and leaves code, tables and questions alone."""

from __future__ import annotations

import pytest

from tools import prose


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", '"""What is kept."""\nx = 1  # Where it lies.\n', [1, 2]),
        ("a.py", '"""It is kept. What is\nnot kept is lost."""\nname = "What is kept."\n', [1]),
        ("a.py", '"""What is kept?"""\n', []),
        ("a.md", "# What is kept\n\n| What | is |\n\n```\nWhat is kept.\n```\n\n* Of all rows one is kept.\n", [9]),
        ("a.md", "A call gives way to torch.\n", [1]),
        ("a.cu", "int x;  // Which row it is.\n", [1]),
    ],
)
def test_findings(tmp_path, name, text, lines):
    path = tmp_path / name
    path.write_text(text)
    assert sorted({line for line, _ in prose.findings(path)}) == lines


def test_the_command_says_where(tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_text("Who calls it waits.\n")
    assert prose.main([str(path)]) == 1
    assert f"{path}:1: a sentence begins with Who" in capsys.readouterr().out
    path.write_text("A caller waits.\n")
    assert prose.main([str(path)]) == 0


LONG = "A word " + "and " * 23 + "another."  # 26 words


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"Short. {LONG} Short.\n", [1]),
        (f"* Short.\n  {LONG}\n", [2]),
        (f"{LONG[:-9]}.\n", []),  # 25 words
        ("A word " + "and " * 22 + "`some code of words`, at a [link](https://host/a%20b).\n", [1]),
        ("A word " + "and " * 22 + "`some code of words`.\n", []),
        (f"```\n{LONG}\n```\n\n| {LONG} |\n\n# {LONG}\n", []),
    ],
)
def test_long_sentences(text, lines):
    assert [line for line, _ in prose.long_sentences(text)] == lines


def test_long_sentences_of_one_section():
    text = f"# A\n\n## Unreleased\n\n- {LONG}\n\n## 0.1\n\n- {LONG}\n"
    assert [line for line, _ in prose.long_sentences(text, "Unreleased")] == [5]


def test_every_page_whose_sentences_are_counted_exists():
    for pattern, section in prose.SHORT.items():
        pages = list(prose.ROOT.glob(pattern))
        assert pages, pattern
        assert not section or all(f"\n## {section}\n" in page.read_text(encoding="utf-8") for page in pages)


def test_a_page_of_the_list_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    for name, found in (("DESIGN.md", 1), ("README.md", 0)):
        (tmp_path / name).write_text(LONG)
        assert len(list(prose.findings(tmp_path / name))) == found
