"""What a soak found: tallies, and failures with the lines that repeat them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from saccade.cli.soak.draw import FAMILY
from saccade.cli.soak.judged import Outcome
from saccade.env import interpreting_triton


class Batch(NamedTuple):
    """Cases of one family: a compiled kernel serves them all, so one process runs them."""

    operation: str
    backend: str
    seeds: tuple[int, ...]
    family: int = FAMILY


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
    """All results: a tally for each operation and backend, and each failure with the line that repeats it."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)  # (what is wrong, command line)
    lost: bool = False

    def add(self, outcome: Outcome, device: torch.device, family: int = FAMILY) -> None:
        """Count one case, of a family of so many."""
        tally = self.tallies.setdefault((outcome.operation, outcome.backend), Tally())
        tally.seconds += outcome.seconds
        tally.cases += outcome.ran
        tally.declined += not outcome.ran
        tally.failures += not outcome.ok
        tally.worst_ratio = max(tally.worst_ratio, outcome.ratio)
        self.lost |= outcome.fatal
        if not outcome.ok:
            seeds = tuple(range(outcome.seed, outcome.seed + outcome.together))
            line = command_line(Batch(outcome.operation, outcome.backend, seeds, family), device)
            self.failures.append((outcome.said, line))

    @property
    def ran(self) -> int:
        """Cases that were judged."""
        return sum(tally.cases for tally in self.tallies.values())


def command_line(batch: Batch, device: torch.device) -> str:
    """What repeats the cases of a batch."""
    family = "" if batch.family == FAMILY else f"--family {batch.family} "
    interpreted = "TRITON_INTERPRET=1 " if interpreting_triton() else ""
    return (
        f"{interpreted}saccade soak --seed {batch.seeds[0]} --count {len(batch.seeds)} --op {batch.operation} --backend {batch.backend} "
        f"{family}--device {device}"
    )
