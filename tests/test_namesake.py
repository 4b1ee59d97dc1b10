"""The distribution is `saccade-attention`: `saccade` on the package index is another project, whose module has the name of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from saccade import namesake

ROOT = Path(__file__).parent.parent
STRANGER = "Metadata-Version: 2.1\nName: saccade\nVersion: 9.8\nSummary: Tracing\n"
OURS_BEFORE = STRANGER + "Project-URL: Source, https://github.com/saccade-attention/saccade\n"


def install(folder: Path, metadata: str) -> Path:
    """A folder of modules that holds a distribution called saccade."""
    (folder / "saccade-9.8.dist-info").mkdir(parents=True)
    (folder / "saccade-9.8.dist-info" / "METADATA").write_text(metadata)
    return folder


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("metadata", "told"), [(STRANGER, 1), (OURS_BEFORE, 0)], ids=["another project", "ours, until 0.2"])
def test_an_environment_with_both_is_told_once(tmp_path, metadata, told):
    done = python("import saccade", ROOT / "src", install(tmp_path, metadata))
    assert done.returncode == 0, done.stderr
    said = "this module is saccade of saccade-attention, but the distribution 'saccade' 9.8 is installed too, another project's"
    assert done.stderr.count(said) == told
    assert done.stderr.count("Warning") == told


def test_the_look_costs_the_import_nothing_that_is_felt():
    namesake.warn()
    began = time.process_time()  # other processes may take the core meanwhile
    namesake.warn()
    assert time.process_time() - began < 0.05


def test_the_command_says_that_it_met_the_other_module(tmp_path):
    (install(tmp_path, STRANGER) / "saccade").mkdir()
    (tmp_path / "saccade" / "__init__.py").write_text("")
    command = tmp_path / "command"
    command.mkdir()
    (command / "saccade_command").symlink_to(ROOT / "src" / "saccade_command")
    done = python("from saccade_command import main; main()", tmp_path, command)
    assert done.returncode == 1
    assert re.fullmatch(
        rf"saccade: the package in {tmp_path}/saccade is another project's.*saccade-attention.*\n", done.stderr
    ), done.stderr


@pytest.mark.parametrize("folder", ["src", "docs", "examples", "scripts", "README.md", "pyproject.toml"])
def test_nobody_is_sent_to_the_other_project(folder):
    place = ROOT / folder
    files = [place] if place.is_file() else [p for p in place.rglob("*") if p.suffix in (".py", ".md", ".sh", ".toml")]
    assert files
    for path in files:
        assert not re.search(
            r"(?<![\w/-])saccade\[\w|pip install (--?\S+ )*['\"]?saccade(?![\w/-])", path.read_text(encoding="utf-8")
        ), path
