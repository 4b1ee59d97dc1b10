"""`saccade bench`: finds the benchmark tables, those of the checkout around or those that were installed, and starts the runner."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import torch

from saccade.errors import SaccadeError
from saccade.hardware import has_package


def run(table: str | None) -> int:
    """List the tables, or run one and return the exit code of the runner."""
    benchmarks = find_benchmarks(Path.cwd())
    names = tables_in(benchmarks)
    if table is None:
        show(benchmarks, names)
        return 0
    if table not in names:
        raise SaccadeError(f"there is no table {table!r} in {benchmarks / 'tables'}; there are: {', '.join(names) or 'none'}")
    if not torch.cuda.is_available() and not table.endswith("_cpu"):
        raise SaccadeError(
            f"{table} is measured on a CUDA GPU and torch sees none here; tables that end in _cpu run, and `saccade time` "
            "measures one problem on the CPU"
        )
    if not has_package("matplotlib"):
        raise SaccadeError("the plot of a table needs matplotlib, which is not installed: pip install 'saccade-attention[bench]'")
    return subprocess.run([sys.executable, str(benchmarks / "run.py"), table], check=False).returncode


def find_benchmarks(start: Path) -> Path:
    """The `benchmarks` folder of the checkout that contains `start`, or from which this package is installed; else the one that a wheel brings.

    Raises:
        SaccadeError: there is none.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (start, *start.parents, *package.parents):
        if (folder / "benchmarks" / "run.py").is_file() and (folder / "src" / "saccade").is_dir():
            return folder / "benchmarks"
    if (package / "benchmarks" / "run.py").is_file():
        return package / "benchmarks"
    raise SaccadeError(
        f"there is no benchmarks/run.py in {start}, above it or in {package}: this installation of saccade lacks it; install its wheel or "
        "run this inside a checkout, or run `saccade time`, which needs none and measures one problem beside torch"
    )


def show(benchmarks: Path, names: list[str]) -> None:
    """Print each table with the sentence that says what it measures."""
    from rich.console import Console
    from rich.table import Table

    listed = Table("table", "what it measures", title="`saccade bench TABLE` measures one", title_justify="left")
    for name in names:
        listed.add_row(name, about(benchmarks / "tables" / f"{name}.py"))
    Console().print(listed)


def about(table: Path) -> str:
    """The first sentence of the file; "Fig. 5" does not end it."""
    text = " ".join((ast.get_docstring(ast.parse(table.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<!Fig)\.(?: |$)", text)[0].replace("`", "")


def tables_in(benchmarks: Path) -> list[str]:
    """The names of the tables, one file each."""
    return sorted(path.stem for path in (benchmarks / "tables").glob("*.py") if not path.stem.startswith("_"))
