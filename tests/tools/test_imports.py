"""Importing a tool changes no environment variable: the tests that import it may run on a GPU, and kernels imported later would be interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import saccade

TOOLS = Path(__file__).parents[2] / "tools"
PROGRAM = """
import importlib, os, sys
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
    changed = sorted(set(before.items()) ^ set(os.environ.items()))
    assert not changed, (name, changed)
"""


def test_the_environment_stays():
    pytest.importorskip("triton")
    names = [path.relative_to(TOOLS.parent).with_suffix("").as_posix().replace("/", ".") for path in sorted(TOOLS.rglob("*.py"))]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]
    assert "tools.walk" in names
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(saccade.__file__).parents[1]), str(TOOLS.parent)])
    found = subprocess.run([sys.executable, "-c", PROGRAM, *names], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
