"""The part of a table that is measured: cases and implementations by their names, up to a limit of time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Case = TypeVar("Case")
Call = TypeVar("Call")


@dataclass
class Part:
    """All of a table, unless something is given. rows: words, of which each chosen case has one in its name. backends: implementations, ours and peers. until: of
    `time.monotonic`."""

    rows: Sequence[str] = ()
    backends: Sequence[str] = ()
    until: float = math.inf
    began: float = field(default_factory=time.monotonic)
    left: list[str] = field(default_factory=list)  # names of the chosen cases that were not measured

    def cases(self, every: Iterable[Case]) -> Iterator[Case]:
        """The chosen ones, each with a line of progress; those that the limit leaves are noted."""
        waiting = chosen(every, self.rows)
        for number, (name, case) in enumerate(waiting.items()):
            if self.is_late:
                self.left.extend(list(waiting)[number:])
                return
            print(f"[{number + 1}/{len(waiting)}, {time.monotonic() - self.began:.0f} s] {name}", flush=True)
            yield case

    def calls(self, calls: dict[str, Call]) -> dict[str, Call]:
        """Those of the chosen implementations."""
        return {name: call for name, call in calls.items() if self.has(name)}

    def has(self, backend: str) -> bool:
        """Whether an implementation is measured."""
        return not self.backends or backend in self.backends

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until

    @property
    def is_whole(self) -> bool:
        """Whether all of the table is asked for, and nothing was left."""
        return not (self.rows or self.backends or self.left)


def chosen(every: Iterable[Case], rows: Sequence[str]) -> dict[str, Case]:
    """Name -> case: those with one of these words in their names, or all without words. A whole name chooses its own case alone."""
    cases = {str(case): case for case in every}
    words = [word for word in rows if word not in cases]
    return {name: case for name, case in cases.items() if not rows or name in rows or any(word in name for word in words)}
