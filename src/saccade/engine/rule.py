"""The rule that decides whether `auto` takes a backend: a sentence, and the measurements from which it was read. Imports nothing."""

from __future__ import annotations

from typing import NamedTuple

RESULTS = "benchmarks/results"


def thousands(number: int) -> str:
    """A number with its thousands apart; the name of a size that a trace holds as a symbol."""
    return f"{number:,}" if isinstance(number, int) else str(number)


class Row(NamedTuple):
    """Some rows of a table: those of `problems` (B * H) with these sizes, and with `features` in their description."""

    q_len: int
    kv_len: int
    head_dim: int
    problems: int
    features: str = ""

    def __str__(self) -> str:
        said = f"Tq={self.q_len} Tk={self.kv_len} D={self.head_dim} B*H={self.problems:,}"
        return f"{said} {self.features}" if self.features else said


class Line(NamedTuple):
    """The rows of a table that describe their problem in these words."""

    problem: str

    def __str__(self) -> str:
        return self.problem


class Source(NamedTuple):
    """A committed file, and the rows of it that were read; a page has no rows."""

    path: str
    rows: tuple[Row | Line, ...] = ()

    def __str__(self) -> str:
        return f"{self.path} at {'; '.join(map(str, self.rows))}" if self.rows else self.path


def table(name: str, *rows: Row, card: str = "h100") -> Source:
    """Rows of a table. card: the folder of the GPU that measured it."""
    return Source(f"{RESULTS}/{card}/{name}.csv", rows)


def square(length: int, head_dim: int, problems: int, features: str = "") -> Row:
    """A row with as many queries as keys."""
    return Row(length, length, head_dim, problems, features)


class Rule(NamedTuple):
    """Why `auto` takes a backend or, if `against`, why not. source: None if no committed file shows it."""

    said: str
    source: Source | None = None
    against: bool = True

    def __str__(self) -> str:
        return f"{self.said} ({self.source})" if self.source else self.said


def taken(source: Source | None, said: str = "measured faster than torch's function") -> Rule:
    """A rule by which a backend is taken."""
    return Rule(said, source, against=False)
