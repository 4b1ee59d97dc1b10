"""Measure tables: gate, measure, write, plot.

    python benchmarks/run.py short_full windows [--rows WORD ...] [--backends NAME ...] [--stale-rows] [--limit SECONDS] [--out benchmarks/results/h200]
    python benchmarks/run.py short_full --plot-only
    python benchmarks/run.py --stale

The gate runs `saccade verify` first, so that no number is reported for wrong results. Rows of the CSV that a run does not measure stay as they are. A
run of a part draws no plot.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import in_checkout, machine  # noqa: E402
from parts import Part, chosen  # noqa: E402
from rows import Writer, rows_of  # noqa: E402

Error = Callable[[str], NoReturn]


def main(words: list[str] | None = None) -> int:
    """Parse the command line and run; returns an exit code."""
    began = time.monotonic()
    parser = _parser()
    options = parser.parse_args(words)
    if options.stale:
        from stale import report, verdicts

        if not in_checkout():
            parser.error("--stale compares commits, so it needs a checkout")
        report(verdicts())
        return 0
    _check(options, parser.error)
    if options.plot_only:
        for path in [_newest(table, options.out) for table in options.tables]:
            if not path.is_file():
                parser.error(f"--plot-only draws what was measured, and there is no {path}")
            draw(path)
        return 0
    folder = options.out or results_folder() / gpu_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        parser.error(f"results go into {folder}, where no folder can be made ({reason.strerror}); give another by --out")
    until = began + options.limit if options.limit is not None else float("inf")
    words = {table: words_of(table, folder / f"{table}.csv", options, parser.error) for table in options.tables}
    parts = {table: Part(rows, options.backends, until, began) for table, rows in words.items() if rows is not None}
    return measure(*parts.popitem(), folder, options) if len(parts) == 1 else measure_apart(parts, folder, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="measured in this order")
    parser.add_argument(
        "--stale", action="store_true", help="say which committed results are older than the code that they measure"
    )
    parser.add_argument("--out", type=Path, default=None, help=f"folder of the results (default: {results_folder()}/<gpu>)")
    parser.add_argument("--repeat-ms", type=int, default=40)
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="only cases with one of these words in their names")
    parser.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="only these implementations, ours and peers")
    parser.add_argument(
        "--stale-rows", action="store_true", help="only cases with a row that is older than the code, or without rows"
    )
    parser.add_argument(
        "--limit", type=float, default=None, metavar="SECONDS", help="no further case begins after this; those left are named"
    )
    parser.add_argument(
        "--commit", type=_hash, default=None, metavar="HASH", help="what rows name as their commit, where the history is missing"
    )
    parser.add_argument("--no-gate", action="store_true", help="skip the check of correctness that comes first")
    parser.add_argument(
        "--plot-only", action="store_true", help="draw the plot again from the newest CSV, or from the one in --out"
    )
    return parser


def _hash(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{7,40}", text):
        raise argparse.ArgumentTypeError(f"it is {text!r}; a commit is 7 to 40 hexadecimal digits, 0 to 9 and a to f")
    return text


def _check(options: argparse.Namespace, error: Error) -> None:
    """End with an error before anything is measured, if some word names nothing."""
    known = sorted(p.stem for p in (HERE / "tables").glob("*.py") if not p.stem.startswith("_"))
    if not options.tables:
        error(f"the table is missing; one of {', '.join(known)}")
    if wrong := [table for table in options.tables if table not in known]:
        error(f"there is no table {', '.join(wrong)}; there are {', '.join(known)}")
    modules = {table: module_of(table) for table in options.tables}
    for asked, hook, why in (
        (options.rows, "every_case", "--rows chooses cases, and these tables are measured as a whole"),
        (options.stale_rows, "every_case", "--stale-rows chooses cases, and these tables are measured as a whole"),
        (options.backends, "NAMES", "--backends chooses implementations, and these tables measure all of theirs together"),
    ):
        if asked and (others := [table for table, module in modules.items() if not hasattr(module, hook)]):
            error(f"{why}: {', '.join(others)}")
    if options.rows:
        names = [str(case) for module in modules.values() for case in module.every_case()]
        if unknown := [word for word in options.rows if not any(word in name for name in names)]:
            error(f"--rows is {', '.join(unknown)}; the rows are {'; '.join(names)}")
    names = [name for module in modules.values() for name in getattr(module, "NAMES", ())]
    if unknown := [name for name in options.backends if name not in names]:
        error(f"--backends is {', '.join(unknown)}; known are {', '.join(dict.fromkeys(names))}")


def words_of(table: str, path: Path, options: argparse.Namespace, error: Error) -> list[str] | None:
    """The words that choose the cases of a table: none for all of them. None: there is nothing to measure."""
    module = module_of(table)
    if options.backends and not set(options.backends) & set(module.NAMES):
        return None
    if not (options.rows or options.stale_rows):
        return []
    names = list(chosen(module.every_case(), options.rows))
    if not options.stale_rows:
        return names or None
    try:
        names = stale_among(names, path, module, options.backends)
    except ValueError as reason:
        error(f"--stale-rows compares commits, and of {path} nothing can be said: {reason}")
    if not names:
        print(f"nothing of {table} is stale")
    return names or None


def stale_among(names: list[str], path: Path, module: ModuleType, backends: list[str]) -> list[str]:
    """The cases with a row that is older than the code, or with none, of these implementations.

    Raises:
        ValueError: nothing can be said about the rows.
    """
    from stale import older_rows

    def cases(rows: list[Any]) -> set[str]:
        return {case_of(row, module) for row in rows if not backends or row["backend"] in backends}

    if not path.exists():
        return names
    older, there = cases(older_rows(path)), cases([vars(row) for row in rows_of(path)])
    return [name for name in names if name in older or name not in there]


def case_of(row: Mapping[str, str], module: ModuleType) -> str:
    """The name of the case that a row is of; that is its problem, unless the table says otherwise."""
    return module.case_of(row) if hasattr(module, "case_of") else row["problem"]


def measure_apart(parts: dict[str, Part], folder: Path, options: argparse.Namespace) -> int:
    """Measure each table in a process of its own; the first exit code that is not 0. A table may set the number of threads, or what torch multiplies in, and
    leave compilers running, which others would be timed with."""
    passed: set[str] = set()
    codes = []
    for table, part in parts.items():
        words = [table, "--out", str(folder), "--repeat-ms", str(options.repeat_ms)]
        words += ["--rows", *part.rows] if part.rows else []
        words += ["--backends", *(x for x in part.backends if x in module_of(table).NAMES)] if part.backends else []
        words += ["--limit", f"{max(0.0, part.until - time.monotonic()):.1f}"] if options.limit is not None else []
        words += ["--commit", options.commit] if options.commit else []
        operation = operation_of(table)
        words += ["--no-gate"] if options.no_gate or operation in passed else []
        late = part.is_late
        codes.append(start(words))
        if not (codes[-1] or late):
            passed.add(operation)
    return next(filter(None, codes), 0)


def start(words: list[str]) -> int:
    """Run this file with these words; its exit code."""
    return subprocess.run([sys.executable, str(Path(__file__)), *words], check=False).returncode


def measure(table: str, part: Part, folder: Path, options: argparse.Namespace) -> int:
    """Measure a part of a table, and draw the table if that is all of it; an exit code."""
    module, path = module_of(table), folder / f"{table}.csv"
    if part.is_late:
        part.left.extend(chosen(module.every_case(), part.rows) if hasattr(module, "every_case") else [table])
    else:
        gate = [sys.executable, "-m", "saccade", "verify", "--op", operation_of(table)]
        if not options.no_gate and subprocess.run(gate, check=False).returncode:
            print(f"saccade verify failed: nothing of {table} is measured", file=sys.stderr)
            return 1
        wait_for_native()
        writer = Writer(path, {**machine(), **({"commit": options.commit} if options.commit else {})}, part)
        module.run(writer, options.repeat_ms)
        if writer.rows:
            print(path)
            if part.is_whole:
                writer.drop_others()
                draw(path)
    if part.left:
        print(f"left: {table} {'as a whole' if part.left == [table] else f'--rows {shlex.join(part.left)}'}", flush=True)
    return 0


def wait_for_native(seconds: float = 240) -> None:
    """On a GPU, wait until C++ replays calls, or so long, and report it. A machine's first table would else time Python's launches."""
    import torch

    from saccade import native
    from saccade.engine.prepare import wait_for_known_calls

    if torch.cuda.is_available():
        there = wait_for_known_calls("cuda", seconds)
        print(f"calls that C++ replays: {native.status()}" if there else "without the C++ path", flush=True)


def draw(path: Path) -> None:
    """Draw the plots of a table and name them."""
    from plot import draw as plots_of

    for file in plots_of(path):
        print(file)


def _newest(table: str, folder: Path | None) -> Path:
    from plot import newest

    found = newest(results_folder(), table) if folder is None else folder / f"{table}.csv"
    return found or results_folder() / gpu_folder() / f"{table}.csv"


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


def module_of(table: str) -> ModuleType:
    """The table's file."""
    return importlib.import_module(f"tables.{table}")


def gpu_folder() -> str:
    """Short name of this GPU: "h200" for "NVIDIA H200"; "cpu" without one."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().replace("NVIDIA", "").strip().lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
