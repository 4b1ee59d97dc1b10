"""The benchmark tables of this package, in its checkout or its wheel: their names and what they measure.

Nothing here, nor what it imports, may import torch: `saccade bench` lists them without it (see `app.without_torch`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from saccade.errors import SaccadeError


def check(table: str) -> None:
    """Raise SaccadeError unless there is such a table."""
    benchmarks = find_benchmarks()
    names = tables_in(benchmarks)
    if table not in names:
        raise SaccadeError(f"there is no table {table!r} in {benchmarks / 'tables'}; there are: {', '.join(names) or 'none'}")


def find_benchmarks() -> Path:
    """The `benchmarks` folder of the checkout in which this package lies, else the one in the wheel: never one in the working folder, which may
    belong to anybody.

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


def show() -> None:
    """Print each table with the sentence that says what it measures."""
    from rich.console import Console
    from rich.table import Table

    listed = Table("table", "what it measures", title="`saccade bench TABLE` measures one", title_justify="left")
    benchmarks = find_benchmarks()
    for name in tables_in(benchmarks):
        listed.add_row(name, about(benchmarks / "tables" / f"{name}.py"))
    Console().print(listed)


def about(table: Path) -> str:
    """The first sentence of the file; "Fig. 5" and "Eq. 5" do not end it."""
    text = " ".join((ast.get_docstring(ast.parse(table.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<!Fig)(?<!Eq)\.(?: |$)", text)[0].replace("`", "")


def tables_in(benchmarks: Path) -> list[str]:
    """The names of the tables, one file each."""
    return sorted(path.stem for path in (benchmarks / "tables").glob("*.py") if not path.stem.startswith("_"))
