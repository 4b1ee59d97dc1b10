"""`saccade bench`: finds the benchmark tables of this package, in its checkout or its wheel, and starts the runner."""

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
    benchmarks = find_benchmarks()
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


def find_benchmarks() -> Path:
    """The `benchmarks` folder of the checkout in which this package lies, else the one that a wheel brings: never one of the working folder,
    which may be anybody's.

    Raises:
        SaccadeError: there is none.
    """
    package = Path(__file__).resolve().parent.parent
    checkout = [package.parent.parent] if package.parent.name == "src" else []
    for folder in (*checkout, package):
        if (folder / "benchmarks" / "run.py").is_file():
            return folder / "benchmarks"
    raise SaccadeError(
        f"there is no benchmarks/run.py in {' or '.join(map(str, (*checkout, package)))}: this installation of saccade lacks it; install its "
        "wheel, or a checkout with pip install -e, or run `saccade time`, which needs none and measures one problem beside torch"
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
