"""`saccade bench`: finds the benchmark tables, which are part of a checkout but not of the wheel, and starts the runner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from saccade.errors import SaccadeError


def run(table: str | None) -> int:
    """List the tables, or run one and return the exit code of the runner."""
    benchmarks = find_benchmarks(Path.cwd())
    names = tables_in(benchmarks)
    if table is None:
        print("tables: " + (", ".join(names) or "none yet"))
        return 0
    if table not in names:
        raise SaccadeError(f"there is no table {table!r} in {benchmarks / 'tables'}; there are: {', '.join(names) or 'none'}")
    if not torch.cuda.is_available() and not table.endswith("_cpu"):
        raise SaccadeError(
            f"{table} is measured on a CUDA GPU and torch sees none here; tables that end in _cpu run, and `saccade time` "
            "measures one problem on the CPU"
        )
    return subprocess.run([sys.executable, str(benchmarks / "run.py"), table], cwd=benchmarks.parent, check=False).returncode


def find_benchmarks(start: Path) -> Path:
    """The `benchmarks` folder of the checkout that contains `start`, or from which this package is installed."""
    for folder in (start, *start.parents, *Path(__file__).resolve().parents):
        if (folder / "benchmarks" / "run.py").is_file() and (folder / "src" / "saccade").is_dir():
            return folder / "benchmarks"
    raise SaccadeError(
        f"there is no benchmarks/run.py in {start} or above it: the tables are in a checkout of saccade, not in the installed package; "
        "run this inside one, or `saccade time`, which needs none and measures one problem beside torch"
    )


def tables_in(benchmarks: Path) -> list[str]:
    """The names of the tables, one file each."""
    return sorted(path.stem for path in (benchmarks / "tables").glob("*.py") if not path.stem.startswith("_"))
