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
