"""The layout for the kernels hub: what is written, and that a copy under another name works alone and beside the installed package."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "saccade"


@pytest.mark.parametrize(
    ("place", "before", "after"),
    [
        ("api.py", "from saccade.a.b import c", "from .a.b import c"),
        ("api.py", "from saccade import a", "from . import a"),
        ("__init__.py", "from saccade.a import b\nfrom saccade import a", "from .a import b\nfrom . import a"),
        ("a/__init__.py", "from saccade.a.b import c", "from ..a.b import c"),
        ("a/b/c.py", "x = 1; from saccade.d import (\n    e,\n)", "x = 1; from ...d import (\n    e,\n)"),
        ("a/b.py", "def f():\n    from saccade import c  # lazy", "def f():\n    from .. import c  # lazy"),
        ("a/b.py", 's = "ä\x0c"; from saccade.c import d', 's = "ä\x0c"; from ..c import d'),
        ("a/b.py", '"""\nfrom saccade.c import d\n"""', '"""\nfrom saccade.c import d\n"""'),
        ("a/b.py", "from saccade_command import c\nimport saccades", "from saccade_command import c\nimport saccades"),
    ],
)
def test_imports_become_relative(hub_layout, place, before, after):
    assert hub_layout.relative_imports(before, Path(place), "saccade") == after


@pytest.mark.parametrize("line", ["import saccade", "import os, saccade.a as b", "from saccade.a \\\n    import b"])
def test_an_import_without_a_relative_form_is_refused(hub_layout, line):
    with pytest.raises(hub_layout.NotRelative, match=r"^a\.py:1: "):
        hub_layout.relative_imports(line, Path("a.py"), "saccade")


def test_every_file_but_the_command_line_is_there(variant):
    found, wanted = (
        {p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so", ".o")}
        for folder in (variant, SRC)
    )
    wanted = {p for p in wanted if p.parts[0] not in ("cli", "__main__.py")}
    assert found == wanted | {Path("metadata.json")}
    assert sum(p.suffix in (".cu", ".cuh", ".cpp") for p in wanted) > 50
    for place in wanted:
        if place.suffix != ".py":
            assert (variant / place).read_bytes() == (SRC / place).read_bytes(), place


def test_no_module_imports_the_package_by_its_name(variant):
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if n.split(".")[0] == "saccade"], path
            # nor by a string, which nothing would rewrite
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("importlib.import_module", "import_module", "__import__"), path
            # nor through torch, where the installed package has its ops
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.saccade"), path


def test_the_id_is_that_of_the_contents(hub_layout, variant):
    files = hub_layout.contents(SRC)
    written = json.loads((variant / "metadata.json").read_text())
    assert written == hub_layout.metadata_of(files)
    # ops of torch have it as their namespace
    assert re.fullmatch(r"[a-z_][a-z0-9_]*", written["id"])
    place = Path("launch/cuda/mma.cuh")
    changed = hub_layout.metadata_of({**files, place: files[place] + b"\n"})
    assert changed["id"] != written["id"]


def test_a_folder_that_holds_something_is_left_alone(hub_layout, tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    assert hub_layout.main([str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_copy_runs_alone(run, variant):
    assert "every module" in run("alone.py", variant)


def test_a_copy_runs_beside_the_installed_package(run, variant):
    pytest.importorskip("transformers")
    assert run("beside.py", variant).count("passed") == 6


def test_a_copy_runs_its_triton_kernels(run, variant):
    pytest.importorskip("triton")
    assert "short" in run("interpreted.py", variant, TRITON_INTERPRET="1")
