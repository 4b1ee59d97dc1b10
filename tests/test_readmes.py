"""Every family of kernels has a README whose table names the files that are there, and no others."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "saccade"
KINDS = (".py", ".cu", ".cuh", ".cpp", ".hpp")
READMES = sorted(SRC.rglob("README.md"))
LONGEST = 60  # lines of a README: it is read before the code, in one go
_ROW, _CODE, _BRACES = re.compile(r"^\|([^|]*)\|", re.MULTILINE), re.compile(r"`([^`]+)`"), re.compile(r"\{([^}]*)\}")
_REFERENCE = re.compile(r"([\w/]*/)?README\.md(?: (here|of this family))?")


def relative(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


FAMILIES = sorted(path.parent for path in SRC.glob("*/*/backend.py"))


def spelled(name: str) -> list[str]:
    """The names that `cuda/{forward,delta}.cu` stands for."""
    parts = _BRACES.split(name)
    return ["".join(each) for each in itertools.product(*(p.split(",") if i % 2 else [p] for i, p in enumerate(parts)))]


def named(text: str) -> list[str]:
    """The files in the first column of the tables of a README."""
    cells = [cell for row in _ROW.findall(text) for cell in _CODE.findall(row)]
    return [name for cell in cells for name in spelled(cell) if name.endswith(KINDS)]


def present(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.suffix in KINDS and path.name != "__init__.py")
    return {path.relative_to(folder).as_posix() for path in files}


def test_there_are_families():
    assert len(FAMILIES) >= 10
    assert spelled("cuda/{a,b}.{cu,cuh}") == ["cuda/a.cu", "cuda/a.cuh", "cuda/b.cu", "cuda/b.cuh"]
    assert named("| file | what |\n|---|---|\n| `a.py`, `cuda/{b,c}.cu` | as `d.py` |\n`e.py`") == [
        "a.py",
        "cuda/b.cu",
        "cuda/c.cu",
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=relative)
def test_every_family_has_a_readme(family):
    assert (family / "README.md").exists()


@pytest.mark.parametrize("readme", READMES, ids=relative)
def test_a_table_names_every_file_of_the_folder_once(readme):
    names = named(readme.read_text())
    assert sorted(names) == sorted(present(readme.parent))


@pytest.mark.parametrize("readme", READMES, ids=relative)
def test_a_readme_is_short(readme):
    assert len(readme.read_text().splitlines()) <= LONGEST


def places(source: Path, folder: str, where: str) -> list[Path]:
    """The folders one of which has the README that a source means: a named one, its own, or any from its own up to that below its wing."""
    if folder:
        return [ROOT / folder]
    if where == "here":
        return [source.parent]
    return [each for each in source.parents if where and each in SRC.glob("*/*")]


def test_a_source_that_refers_to_a_readme_has_one():
    sources = (path for path in SRC.rglob("*") if path.suffix in KINDS)
    found = [(path, *match) for path in sources for match in _REFERENCE.findall(path.read_text())]
    assert len(found) >= 7
    for path, folder, where in found:
        assert any((each / "README.md").exists() for each in places(path, folder, where)), f"{relative(path)}: which README.md?"
