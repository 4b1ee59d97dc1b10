"""`saccade bench TABLE`: starts the runner of a benchmark table."""

from __future__ import annotations

import subprocess
import sys

import torch

from saccade.cli.tables import check, find_benchmarks
from saccade.errors import SaccadeError
from saccade.hardware import has_package


def run(table: str) -> int:
    """Run a table and return the exit code of the runner."""
    check(table)
    if not torch.cuda.is_available() and not table.endswith("_cpu"):
        raise SaccadeError(
            f"{table} is measured on a CUDA GPU and torch sees none here; tables that end in _cpu run, and `saccade time` "
            "measures one problem on the CPU"
        )
    if not has_package("matplotlib"):
        raise SaccadeError("the plot of a table needs matplotlib, which is not installed: pip install 'saccade-attention[bench]'")
    return subprocess.run([sys.executable, str(find_benchmarks() / "run.py"), table], check=False).returncode
