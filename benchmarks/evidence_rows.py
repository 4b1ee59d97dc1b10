"""Rows of the committed results, and what `evidence.py` computes of them: spans, times and gains."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
Rows = list[dict[str, str]]
Times = dict[tuple[str, str], float]


def rows(name: str) -> Rows:
    """The rows of a table, named from `results/` on."""
    with open(RESULTS / name, newline="") as handle:
        return list(csv.DictReader(handle))


def span(values: Iterable[float], digits: int = 2) -> str:
    """The least and the largest of some values; one value alone."""
    found = list(values)
    if len(found) == 1:
        return f"{found[0]:.{digits}f}"
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def times(table: Rows, direction: str, chosen: Callable[[str], bool] = lambda note: True) -> Times:
    """Milliseconds by problem and backend, of the rows with a direction and a note that is `chosen`."""
    picked = [r for r in table if r["direction"] == direction and r["ms_p50"] and chosen(r["note"])]
    return {(r["problem"], r["backend"]): float(r["ms_p50"]) for r in picked}


def gains(found: Times, ours: str, peers: Iterable[str]) -> dict[str, float]:
    """For each problem that has all of them, the least time of the peers over ours."""
    peers = tuple(peers)
    problems = [p for p, backend in found if backend == ours and all((p, peer) in found for peer in peers)]
    return {p: min(found[p, peer] for peer in peers) / found[p, ours] for p in problems}
