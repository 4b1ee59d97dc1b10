"""The CSVs of the units that are whole, put together into one for each program; and such CSVs taken apart again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from pathlib import Path

from language import Timed
from outcomes import MODULES, has_no_gap, is_whole, settings
from pieces import Rows, read, stem, write_rows
from state import State
from units import PROGRAMS, Unit

# The columns by which rows tell their unit, in the order of its name.
NAMED_BY = {
    "needle": ("method", "seed"), "mqar": ("length", "variant"), "lra": ("task", "variant", "seed"), "mlm": ("size", "method", "seed"),
    "language": ("size", "method", "seed"),
}  # fmt: skip


def merge(state: State) -> list[Path]:
    """Write `results/<program>.csv` of the state; the files that were written."""
    made = []
    for program in PROGRAMS:
        whole = [unit for unit in state.units if unit.program == program and state.is_whole(unit)]
        rows = [_timed(state, unit, row) for unit in whole for row in state.rows(unit)]
        if rows:
            made.append(state.root / "results" / f"{program}.csv")
            write_rows(made[-1], list(rows[0]), rows)
    return made


def spread(state: State, folder: Path) -> tuple[list[Unit], list[Unit]]:
    """The opposite of `merge`: write the rows of merged CSVs as those of their units, where these were not begun in the state. Returns the
    units that are whole in the folder, and those that have rows there but are left out: some are missing, or were made with other settings
    than the plan's."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; --known takes one of merged CSVs, such as benchmarks/results/h100")
    if not any((folder / f"{program}.csv").is_file() for program in PROGRAMS):
        raise ValueError(f"{folder} holds none of {', '.join(f'{program}.csv' for program in PROGRAMS)}")
    found: dict[Unit, Rows] = {}
    for program in PROGRAMS:
        found |= _by_unit(state, program, folder / f"{program}.csv")
    known = {unit: made for unit, rows in found.items() if (made := _whole_rows(state, unit, rows))}
    left = [unit for unit in found if unit not in known]
    known |= _clocked(state, known)
    for unit, rows in known.items():
        state.take(unit, rows)
    return list(known), left


def _timed(state: State, unit: Unit, row: dict[str, str]) -> dict[str, str]:
    """A row with the times of a run that had its GPU for itself, if there is one, and without those of a run that had not."""
    if "step_ms" in row and state.about(unit).get("slots", 1) > 1:
        row = row | {"step_ms": "nan"}
    if unit.program == "language":
        clocked = read(state.root / "runs" / "clock" / stem((row["size"], row["method"], 0)) / "clock.csv")
        row = row | {column: clocked[0][column] for column in ("step_ms", "peak_mib") if clocked}
    return row


def _by_unit(state: State, program: str, path: Path) -> dict[Unit, Rows]:
    """The rows of a merged CSV for each unit; none where the plan has none of the program."""
    units = {unit.name: unit for unit in state.units if unit.program == program}
    columns = [field.name for field in fields(MODULES[program].Row)]
    found: dict[Unit, Rows] = defaultdict(list)
    for line, row in enumerate(read(path) if units else [], 2):
        if list(row) != columns or None in row.values():
            raise ValueError(f"line {line} of {path} has not the columns {', '.join(columns)}")
        run = {column: row[column] for column in NAMED_BY[program]}
        name = stem(tuple(run.values()))
        if name not in units:
            said = ", ".join(f"{column} {value}" for column, value in run.items())
            raise ValueError(f"line {line} of {path} is of a run that is not in the plan: {said}")
        found[units[name]].append(row)
    return found


def _whole_rows(state: State, unit: Unit, rows: Rows) -> Rows:
    """Those with the settings of the plan, if the unit is whole with them; else none."""
    wanted = settings(unit, state.data)
    made = [row for row in rows if {column: row[column] for column in wanted} == wanted]
    return made if made and has_no_gap(unit, made) and is_whole(unit, made) else []


def _clocked(state: State, known: dict[Unit, Rows]) -> dict[Unit, Rows]:
    """The clock units whose times language models have: all runs of a size and method the same, which times of their own would not be."""
    runs: dict[str, Rows] = defaultdict(list)
    for unit, rows in known.items():
        if unit.program == "language":
            runs[stem((rows[0]["size"], rows[0]["method"], 0))] += rows
    found = {}
    for unit in (unit for unit in state.units if unit.program == "clock"):
        times = {(row["step_ms"], row["peak_mib"]) for row in runs[unit.name]}
        if len(times) == 1 and times.pop()[0] != "nan":
            found[unit] = [{field.name: runs[unit.name][0][field.name] for field in fields(Timed)}]
    return found
