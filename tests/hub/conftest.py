"""The layout for the kernels hub, written once, and a way to run the scripts of this folder, each in a process of its own: what they
load would stay in this one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("hub_layout", HERE.parents[1] / "scripts" / "hub_layout.py")
LAYOUT = importlib.util.module_from_spec(spec)
spec.loader.exec_module(LAYOUT)


@pytest.fixture(scope="session")
def hub_layout() -> ModuleType:
    return LAYOUT


@pytest.fixture(scope="session")
def variant(tmp_path_factory) -> Path:
    return LAYOUT.write(tmp_path_factory.mktemp("hub") / "out")


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """Standard output of a script of this folder, which must succeed, with the modules of this process."""

    def ran(script: str, *words: str | Path, **environment: str) -> str:
        path = os.pathsep.join(p for p in (str(HERE), *sys.path) if p)
        done = subprocess.run(
            [sys.executable, str(HERE / script), *map(str, words)], env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return ran
