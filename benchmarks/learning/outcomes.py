"""What a unit left behind: whether its rows are whole, whether a dense run has learned its task, and what its log says of a failure."""

from __future__ import annotations

import re
from pathlib import Path

import lra
import lra_tasks
import needle
import train
from language import plan_of
from pieces import Rows
from units import Unit

# An accuracy below which dense attention has learned nothing; for mlm a perplexity above which it has not.
AT_CHANCE = {"needle": 0.5, "mqar": 0.5, "listops": 0.25, "image": 0.25, "retrieval": 0.6, "mlm": 300.0}
ON_CPU = ("--device", "cpu")  # a plan for a GPU is refused where there is none


def is_whole(unit: Unit, rows: Rows) -> bool:
    """Whether the rows of the unit's CSV are all that it makes."""
    if not rows:
        return False
    if unit.program == "clock":
        return True
    if unit.program == "needle":
        return len(rows) == 2 * plan_of(needle.parse([*unit.arguments, *ON_CPU]), needle.Plan).depths
    if unit.program == "mqar":
        options = train.parse([*unit.arguments, *ON_CPU])
        return train.is_whole(rows, train.plan_of(options), "mqar", options.variant[0])
    return any(row["step"] == row["steps"] for row in rows)


def examples_name(unit: Unit, corpus: Path) -> str:
    """Of the file that a unit of the program prepare draws."""
    options = lra.parse([*unit.arguments, *ON_CPU])
    (task,) = options.task
    sizes = plan_of(options, lra.Plan).sizes(task, options.quick)
    return lra_tasks.kept_name(task, sizes, None if options.quick else corpus)


def has_learned(unit: Unit, rows: Rows) -> bool:
    """Whether a whole dense unit is better than chance."""
    if unit.program == "mlm":
        return float(rows[-1]["perplexity"]) < AT_CHANCE["mlm"]
    if unit.program == "needle":
        found = [float(row["accuracy"]) for row in rows if row["length"] == row["context"]]
        return sum(found) / len(found) > AT_CHANCE["needle"]
    if unit.program == "mqar":
        last = max(int(row["step"]) for row in rows)
        return min(float(row["accuracy"]) for row in rows if int(row["step"]) == last) > AT_CHANCE["mqar"]
    return float(rows[-1]["accuracy"]) > AT_CHANCE[unit.group]


def cause_of(log: Path) -> str:
    """What `--plain` should leave out, by the end of a log."""
    text = log.read_text(errors="replace")[-20_000:] if log.is_file() else ""
    # a step that is captured calls compiled parts too, so what speaks of graphs comes first
    if re.search(r"captur(e|ing)|cudaErrorStreamCapture|CUDAGraph", text):
        return "graph"
    return "compile" if re.search(r"torch/_(dynamo|inductor)|InductorError|BackendCompilerFailed", text) else "all"


def last_line(log: Path) -> str:
    """Of a log, which is usually the error."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
    return lines[-1] if lines else "it printed nothing"
