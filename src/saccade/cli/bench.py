"""`saccade bench TABLE ...`: starts the runner of benchmark tables."""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile

import torch

from saccade.cli import tables
from saccade.errors import SaccadeError
from saccade.hardware import has_package


def tables_of(words: list[str]) -> list[str]:
    """The names of tables among the words of a command: those before its first option."""
    return list(takewhile(lambda word: not word.startswith("-"), words))


def run(words: list[str]) -> int:
    """Run tables with the runner's options and return its exit code."""
    for table in tables_of(words):
        tables.check(table)
        if not torch.cuda.is_available() and not table.endswith("_cpu"):
            raise SaccadeError(
                f"{table} is measured on a CUDA GPU and torch sees none here; tables that end in _cpu run, and `saccade time` "
                "measures one problem on the CPU"
            )
    if not has_package("matplotlib"):
        raise SaccadeError("the plot of a table needs matplotlib, which is not installed: pip install 'saccade-attention[bench]'")
    return subprocess.run([sys.executable, str(tables.find_benchmarks() / "run.py"), *words], check=False).returncode
