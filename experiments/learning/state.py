"""The folder in which `everything.py` keeps all that units make and what it notes about them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcomes import examples_name, is_whole
from pieces import Rows, read, write_rows
from units import Unit


@dataclass
class State:
    """`runs/` has a folder for each unit, `weights/` those that units begin with, `drawn/` the examples of `lra.py`, `results/` the merged
    CSVs. data: the corpus."""

    root: Path
    units: list[Unit]
    data: Path = Path("out/corpus")

    def __post_init__(self) -> None:
        self._whole: set[Unit] = set()  # a unit that is whole stays so, and its files need not be read again
        self._notes: dict[Unit, dict[str, Any]] = {}

    def folder(self, unit: Unit) -> Path:
        """The folder of one unit."""
        return self.root / unit.folder

    def log(self, unit: Unit) -> Path:
        """The file with the unit's output."""
        return self.folder(unit) / "log.txt"

    def rows(self, unit: Unit) -> Rows:
        """The rows of the unit's CSV."""
        return read(self.folder(unit) / f"{unit.program}.csv")

    def weights(self, unit: Unit) -> Path:
        """The weights with which others begin, if the unit is a base."""
        return self.root / "weights" / unit.program / f"{unit.name}.pt"

    def is_whole(self, unit: Unit) -> bool:
        """Whether there is nothing left to do."""
        if unit not in self._whole:
            if unit.program == "prepare":
                whole = (self.root / "drawn" / examples_name(unit, self.data)).is_file()
            else:
                whole = is_whole(unit, self.rows(unit))
            if whole:
                self._whole.add(unit)
        return unit in self._whole

    def about(self, unit: Unit) -> dict[str, Any]:
        """The notes of earlier commands: failures, cause, plain, seconds in all, slots of a GPU."""
        if unit not in self._notes:
            path = self.folder(unit) / "unit.json"
            self._notes[unit] = json.loads(path.read_text()) if path.is_file() else {}
        return self._notes[unit]

    def note(self, unit: Unit, **said: Any) -> None:
        """Add to `about`."""
        path = self.folder(unit) / "unit.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._notes[unit] = self.about(unit) | said
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self._notes[unit]))
        part.replace(path)

    def has_failed(self, unit: Unit) -> bool:
        """Whether it failed as often as it is tried without being asked again."""
        return self.about(unit).get("failures", 0) > 1

    def seconds(self, unit: Unit) -> float:
        """The seconds of a GPU that the unit took: the wall clock over the slots; 0 if they are not known."""
        return self.about(unit).get("seconds", 0.0) / self.about(unit).get("slots", 1)

    def take(self, unit: Unit, rows: Rows) -> None:
        """Write rows that were made elsewhere as those of a unit, unless it was begun here: with rows of its own or a checkpoint it goes on."""
        if self.rows(unit) or self._has_checkpoint(unit):
            return
        self._forget(unit)  # what was noted of failures, and of the slots by which `merge` judges times
        write_rows(self.folder(unit) / f"{unit.program}.csv", list(rows[0]), rows)

    def repair(self) -> None:
        """Bases whose weights are gone while a unit still begins with them are repeated, and weights that nobody needs are deleted."""
        needed = {unit.base for unit in self.units if unit.base and not self.is_whole(unit) and not self._has_checkpoint(unit)}
        gone = [unit for unit in needed if self.is_whole(unit) and not self.weights(unit).is_file()]
        for unit in gone:
            self._forget(unit)
        if gone:  # what these begin with is needed now
            self.repair()
            return
        for unit in filter(self.is_whole, self.units):
            if unit not in needed:
                self.weights(unit).unlink(missing_ok=True)

    def _has_checkpoint(self, unit: Unit) -> bool:
        return any((self.folder(unit) / "checkpoints").glob("*.pt"))

    def _forget(self, unit: Unit) -> None:
        self._whole.discard(unit)
        self._notes.pop(unit, None)
        shutil.rmtree(self.folder(unit), ignore_errors=True)

    def command(self, unit: Unit, minutes: float, plain: str | None) -> list[str]:
        """The arguments of the program's `main`."""
        said = [*unit.arguments, "--out", str(self.folder(unit))]
        if unit.program != "mqar":
            said += ["--data", str(self.data), "--resume"]
        if unit.program in ("prepare", "lra"):
            said += ["--cache", str(self.root / "drawn")]
        if unit.cut:
            said += ["--minutes", f"{minutes:.6g}", "--save", "120", "--weights", str(self.weights(unit).parent)]
        return [*said, "--plain", plain] if plain else said
