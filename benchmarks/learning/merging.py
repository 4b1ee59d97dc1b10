"""The CSVs of the units that are whole, put together into one for each program."""

from __future__ import annotations

from pathlib import Path

from pieces import read, stem, write_rows
from state import State
from units import PROGRAMS, Unit


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


def _timed(state: State, unit: Unit, row: dict[str, str]) -> dict[str, str]:
    """A row with the times of a run that had its GPU for itself, if there is one, and without those of a run that had not."""
    if "step_ms" in row and state.about(unit).get("slots", 1) > 1:
        row = row | {"step_ms": "nan"}
    if unit.program == "language":
        clocked = read(state.root / "runs" / "clock" / stem((row["size"], row["method"], 0)) / "clock.csv")
        row = row | {column: clocked[0][column] for column in ("step_ms", "peak_mib") if clocked}
    return row
