"""Measure a table: gate, measure, write, plot.

    python benchmarks/run.py short_full [--out benchmarks/results/h200] [--repeat-ms 40] [--no-gate] [--plot-only] [--rows NAME ...]
    python benchmarks/run.py --stale

The gate runs `saccade verify` first, so that no number is reported for wrong results.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from rows import in_checkout  # noqa: E402


def main() -> int:
    """Parse the command line and run; returns an exit code."""
    tables = sorted(p.stem for p in (HERE / "tables").glob("*.py") if not p.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=tables, nargs="?")
    parser.add_argument(
        "--stale", action="store_true", help="say which committed results are older than the code that they measure"
    )
    parser.add_argument("--out", type=Path, default=None, help=f"folder of the results (default: {results_folder()}/<gpu>)")
    parser.add_argument("--repeat-ms", type=int, default=40)
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="NAME", help="of some tables: only rows with one of these words in their names"
    )
    parser.add_argument("--no-gate", action="store_true", help="skip the check of correctness that comes first")
    parser.add_argument(
        "--plot-only", action="store_true", help="draw the plot again from the newest CSV, or from the one in --out"
    )
    options = parser.parse_args()
    if options.stale:
        from stale import report, verdicts

        if not in_checkout():
            parser.error("--stale compares commits, so it needs a checkout")
        report(verdicts())
        return 0
    if options.table is None:
        parser.error(f"the table is missing; one of {', '.join(tables)}")
    if options.rows and "rows" not in parameters_of(options.table):
        parser.error(f"--rows is {' '.join(options.rows)}; {options.table} is measured as a whole")
    if options.plot_only:
        from plot import newest

        table = newest(results_folder(), options.table)
        folder = options.out or (table.parent if table else results_folder() / gpu_folder())
    else:
        folder = options.out or results_folder() / gpu_folder()
        gate = [sys.executable, "-m", "saccade", "verify", "--op", operation_of(options.table)]
        if not options.no_gate and subprocess.run(gate, check=False).returncode:
            print("saccade verify failed: nothing is measured", file=sys.stderr)
            return 1
        measure(options.table, folder / f"{options.table}.csv", options.repeat_ms, options.rows)
    from plot import draw

    for path in draw(folder / f"{options.table}.csv"):
        print(path)
    return 0


def results_folder() -> Path:
    """`results` beside this file in a checkout; in the current folder where saccade is installed."""
    return (HERE if in_checkout() else Path.cwd()) / "results"


def operation_of(table: str) -> str:
    """The operation that a table measures, by its name."""
    from saccade.operations import OPERATIONS

    # the longest beginning that fits: "short_ragged" is not of `attention`, whose tables begin with "short"
    fitting = [
        (len(start), name) for name, operation in OPERATIONS.items() for start in operation.tables if table.startswith(start)
    ]
    return max(fitting)[1]


def parameters_of(table: str) -> list[str]:
    """The arguments that the table's `run` takes."""
    return list(inspect.signature(importlib.import_module(f"tables.{table}").run).parameters)


def measure(table: str, path: Path, repeat_ms: int, rows: list[str]) -> None:
    """Run one table, or the rows of these names, into its CSV."""
    from rows import Writer, machine

    chosen = {"rows": rows} if rows else {}
    importlib.import_module(f"tables.{table}").run(Writer(path, machine()), repeat_ms, **chosen)
    print(path)


def gpu_folder() -> str:
    """Short name of this GPU: "h200" for "NVIDIA H200"; "cpu" without one."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().replace("NVIDIA", "").strip().lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
