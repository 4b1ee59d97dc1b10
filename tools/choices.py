"""Makes `src/saccade/exact/measured.csv`, by which `auto` chooses, from the committed tables: `python -m tools.choices`.

A backend takes the place of the present choice if it is faster by more than `NOISE` on one card, with ranges (p20 to p80) that do not
overlap, and on no card the reverse is true. The changes are printed.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from saccade.engine.problem import Problem
from saccade.exact.long.backend import LONG, SHORTEST, host_time, unmeasured_rule
from saccade.exact.measured import FILE, NOISE, TIMED, described, way_of
from saccade.exact.short.backend import SHORT
from saccade.exact.short.choice import takes_sm90
from saccade.nvrtc import toolchain

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TABLES = ("h200/short_sizes", "h200/short_long", "h200/short_auto")
# tables that were measured since the rules of `long` changed last, so that "auto" is `long` wherever these take it. Tables do not time `long` by
# its name up to 128 tokens.
KNOWN = ("h200/short_auto",)
# milliseconds from which host time hides behind a call, so that a row holds for eager and captured calls
DEVICE_TIME = {"fwd": 0.05, "fwd+bwd": 0.3}
COLUMNS = ("table", "way", "direction", "problem", "cuda", *TIMED, "order")


class Timing(NamedTuple):
    """Milliseconds of one backend in one row."""

    p50: float
    p20: float
    p80: float


class Row(NamedTuple):
    """One call in one table. times: by backend."""

    table: str
    way: str
    direction: str
    problem: str
    times: dict[str, Timing]


def rows(table: str) -> Iterator[Row]:
    """The rows of a table that compare a kernel of ours with torch's function."""
    found: dict[tuple[str, str, str], dict[str, Timing]] = {}
    with open(RESULTS / f"{table}.csv", newline="", encoding="utf-8") as handle:
        for r in csv.DictReader(handle):
            if r["backend"] in (*TIMED, "auto") and r["direction"] in DEVICE_TIME and r["ms_p50"]:
                times = found.setdefault((r["problem"], r["note"], r["direction"]), {})
                times[r["backend"]] = Timing(*(float(r[f"ms_{p}"]) for p in ("p50", "p20", "p80")))
    for (problem, note, direction), times in found.items():
        auto = times.pop("auto", None)
        if auto and table in KNOWN and auto_is_long(problem, direction):
            times["long"] = auto
        if len(times) > 1 and "sdpa" in times:
            way = "captured" if note == "kernel" else "eager"
            on_the_device = way == "eager" and min(t.p50 for t in times.values()) >= DEVICE_TIME[direction]
            yield Row(table, "any" if on_the_device else way, direction, problem, times)


def auto_is_long(text: str, direction: str) -> bool:
    """Whether `auto` takes `long` by the rules of its own."""
    problem = described(text, direction)
    shortest = min(problem.q_len, problem.kv_len)
    if shortest < SHORTEST or LONG.why_not(problem) or host_time(problem):
        return False
    return not unmeasured_rule(problem).against


def slower(times: dict[str, Timing], name: str, other: str) -> bool:
    """Whether `name` is slower than `other` by more than noise."""
    if name not in times or other not in times:
        return False
    return times[name].p50 > (1 + NOISE) * times[other].p50 and times[name].p20 > times[other].p80


def present(problem: Problem, timed: list[str]) -> str:
    """The backend that `auto` takes now, among those that were timed."""
    ours = [backend for backend in (LONG, SHORT) if backend.name in timed]
    return next((backend.name for backend in ours if backend.prefers(problem)), "sdpa")


def order(problem: Problem, cards: list[dict[str, Timing]]) -> list[str]:
    """The timed backends, the one to take first."""
    timed = timed_in(cards)
    taken = present(problem, timed)
    rest = sorted((n for n in timed if n != taken), key=lambda name: min(times[name].p50 for times in cards if name in times))
    beats = [n for n in rest if any(slower(t, taken, n) for t in cards) and not any(slower(t, n, taken) for t in cards)]
    return list(dict.fromkeys([*beats[:1], taken, *rest]))


def timed_in(cards: list[dict[str, Timing]]) -> list[str]:
    """The backends that some card timed."""
    return [name for name in TIMED if any(name in times for times in cards)]


def made() -> tuple[str, list[str]]:
    """The text of the file, and a line for each choice that changes."""
    same: dict[tuple[str, str, str], list[Row]] = {}
    for row in (row for table in TABLES for row in rows(table)):
        same.setdefault((row.problem, row.direction, "captured" if row.way == "captured" else "eager"), []).append(row)
    out, changes = io.StringIO(), []
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (text, direction, way), found in same.items():
        problem = described(text, direction)
        called = problem if way == "eager" else captured(problem)
        cards = [row.times for row in found]
        chosen, before = order(called, cards), present(called, timed_in(cards))
        if chosen[0] != before:
            timed = "; ".join(f"{r.table} " + ", ".join(f"{n} {t.p50:.4g}" for n, t in r.times.items()) for r in found)
            changes.append(f"{way} {direction} {text}: {before} -> {chosen[0]} ({timed})")
        for row in found:
            times = [f"{row.times[name].p50:.4g}" if name in row.times else "" for name in TIMED]
            cuda = "yes" if "short" in row.times and takes_sm90(problem) else ""
            writer.writerow([row.table, row.way, direction, text, cuda, *times, ">".join(n for n in chosen if n in row.times)])
    return out.getvalue(), changes


def captured(problem: Problem) -> Problem:
    """The same call in a graph."""
    found = replace(problem, host_counts=False, python_counts=False)
    assert way_of(found) == "captured"
    return found


def main() -> int:
    """Write the file, or compare it with the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is not what the tables give")
    check = parser.parse_args().check
    with toolchain.assumed():
        text, changes = made()
    print("\n".join([*changes, f"{len(changes)} choices change, {text.count(chr(10)) - 1} lines"]))
    if check:
        return int(text != FILE.read_text(encoding="utf-8"))
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
