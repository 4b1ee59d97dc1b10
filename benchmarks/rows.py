"""One measurement, one CSV row."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from parts import Part


@dataclass
class Row:
    """`backend` is ours or a peer, `direction` fwd, bwd or fwd+bwd, `note` "kernel" on a kernel-only row."""

    table: str
    problem: str
    backend: str
    direction: str
    dtype: str
    ms_p50: float | str
    ms_p20: float | str
    ms_p80: float | str
    roof_ms: float | str = ""
    tflops: float | str = ""
    error_ratio: float | str = ""
    note: str = ""
    gpu: str = ""
    torch: str = ""
    triton: str = ""
    driver: str = ""
    commit: str = ""
    date: str = ""


Key = tuple[str, str, str, str, str]
# a number that stands alone, as a measured one does: not those of "T5", "ViT-B/16" and "2:4"
_NUMBER = re.compile(r"(?<![\w:./-])(?:x|n\^)?(?:\d[\d.,]*(?:e[+-]?\d+)?|nan|inf)%?(?![\w:/])")
# what a run found without a number
_FOUND = ("auto takes ", "timm's attention ", "does not fit ")


def kind_of(note: str) -> str:
    """The parts of a note that were known before the row was measured. A density is chosen, other numbers are found."""
    parts = re.split(r"[;,] ", note)
    return ", ".join(x for x in parts if x.startswith("density ") or not (_NUMBER.search(x) or x.startswith(_FOUND)))


def key_of(row: Row) -> Key:
    """In these, any two rows of a table differ."""
    return row.problem, row.backend, row.direction, row.dtype, kind_of(row.note)


@dataclass
class Writer:
    """Puts rows into a CSV as they are measured, in the places of older rows with the same key, so that an interrupted run keeps its rows and all others."""

    path: Path
    common: dict[str, str]
    part: Part = field(default_factory=Part)
    rows: list[Row] = field(default_factory=list)  # that were measured

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines: dict[Key, str] = {}
        self._measured: set[Key] = set()
        for row in rows_of(self.path):
            if key_of(row) in self._lines:
                raise SystemExit(f"{self.path} has two rows of {key_of(row)}; delete one")
            self._lines[key_of(row)] = _line(asdict(row).values())

    def add(self, row: Row) -> Row:
        """Complete a row with the machine's columns and write it."""
        for name, value in self.common.items():
            setattr(row, name, value)
        key = key_of(row)
        if key in self._measured:
            raise ValueError(f"two rows of this run are of {key}; their notes must tell them apart")
        self._measured.add(key)
        self.rows.append(row)
        self._lines[key] = _line(f"{v:.4g}" if isinstance(v, float) else v for v in asdict(row).values())
        self._write()
        return row

    def drop_others(self) -> None:
        """Drop the rows of problems of which this run measured none, and those of a problem's implementation that it measured in other rows: their note
        or direction is gone. An implementation that this machine lacks keeps its rows."""
        problems, measured = {key[0] for key in self._measured}, {key[:2] for key in self._measured}
        self._lines = {
            key: line
            for key, line in self._lines.items()
            if key in self._measured or (key[0] in problems and key[:2] not in measured)
        }
        self._write()

    def _write(self) -> None:
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_text(_line(f.name for f in fields(Row)) + "".join(self._lines.values()), newline="")
        os.replace(beside, self.path)


def rows_of(path: Path) -> list[Row]:
    """The rows of a CSV, with the text of each column; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Row(**{f.name: row.get(f.name) or "" for f in fields(Row)}) for row in csv.DictReader(file)]


def numbers_of(problem: str) -> dict[str, int]:
    """The sizes that the description of a problem gives."""
    return {name: int(value) for name, value in re.findall(r"\b(\w+)=(\d+)\b", problem)}


def _line(values: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()
