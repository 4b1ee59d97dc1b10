"""The results of a soak: tallies, and failures with the lines that repeat them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from saccade.env import interpreting_triton
from tools.soak.draw import FAMILY
from tools.soak.judged import Outcome


class Batch(NamedTuple):
    """Cases of one family: a compiled kernel serves them all, so one process runs them. entry: the number of an entry of the covering list."""

    operation: str
    backend: str
    seeds: tuple[int, ...]
    family: int = FAMILY
    entry: int | None = None


@dataclass
class Tally:
    """Results of one backend of one operation. seconds: of all processes together."""

    cases: int = 0
    declined: int = 0
    failures: int = 0
    worst_ratio: float = 0.0
    seconds: float = 0.0


@dataclass
class Found:
    """All results: a tally for each operation and backend, and each failure with the line that repeats it. to_cover: entries of the covering lists
    that are to run; covered: of each that was tried, whether its backend took a case."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)  # (what is wrong, command line)
    lost: bool = False
    to_cover: int = 0
    covered: dict[tuple[str, str, int], bool] = field(default_factory=dict)

    def add(self, outcome: Outcome, device: torch.device, family: int = FAMILY, entry: int | None = None) -> None:
        """Count one case, of a family of so many or of an entry of the covering list."""
        if entry is not None:
            key = (outcome.operation, outcome.backend, entry)
            self.covered[key] = self.covered.get(key, False) or outcome.ran
        tally = self.tallies.setdefault((outcome.operation, outcome.backend), Tally())
        tally.seconds += outcome.seconds
        tally.cases += outcome.ran
        tally.declined += not outcome.ran
        tally.failures += not outcome.ok
        tally.worst_ratio = max(tally.worst_ratio, outcome.ratio)
        self.lost |= outcome.fatal
        if not outcome.ok:
            seeds = tuple(range(outcome.seed, outcome.seed + outcome.together))
            line = command_line(Batch(outcome.operation, outcome.backend, seeds, family, entry), device)
            self.failures.append((outcome.said, line))

    @property
    def ran(self) -> int:
        """Cases that were judged."""
        return sum(tally.cases for tally in self.tallies.values())

    @property
    def entries_ran(self) -> int:
        """Entries of the covering lists of which a case was judged."""
        return sum(self.covered.values())


def command_line(batch: Batch, device: torch.device) -> str:
    """The command that repeats the cases of a batch."""
    family = "" if batch.family == FAMILY else f"--family {batch.family} "
    entry = "" if batch.entry is None else f"--entry {batch.entry} "
    interpreted = "TRITON_INTERPRET=1 " if interpreting_triton() else ""
    return (
        f"{interpreted}python -m tools.soak --seed {batch.seeds[0]} --count {len(batch.seeds)} --op {batch.operation} --backend {batch.backend} "
        f"{entry}{family}--device {device}"
    )
