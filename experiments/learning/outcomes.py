"""The outcome of a unit: whether its rows are whole, whether a dense run has learned its task, and what its log says of a failure."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import language
import lra
import lra_tasks
import mlm
import needle
import train
from corpus import name_in
from pieces import Rows
from units import Unit

# An accuracy below which dense attention has learned nothing; for mlm a perplexity above which it has not. In ListOps of 2,048 tokens the outermost
# operator alone tells 0.278 (`lra_tasks.guessed`), and what is not clearly above that says nothing of attention.
AT_CHANCE = {"needle": 0.5, "mqar": 0.5, "listops": 0.3, "image": 0.25, "retrieval": 0.6, "mlm": 300.0}
ON_CPU = ("--device", "cpu")  # a plan for a GPU is refused where there is none
MODULES: dict[str, Any] = {"needle": needle, "mqar": train, "lra": lra, "mlm": mlm, "language": language}


def planned(unit: Unit) -> tuple[argparse.Namespace, Any]:
    """(options, plan) with which the program of a unit makes it."""
    module = MODULES[unit.program]
    options = module.parse([*unit.arguments, *ON_CPU])
    if unit.program == "mqar":
        return options, train.plan_of(options)
    plan = language.plan_of(options, module.Plan)
    return options, plan.of(options.task[0], options.method[0]) if unit.program == "lra" else plan


def is_whole(unit: Unit, rows: Rows) -> bool:
    """Whether the rows of the unit's CSV are all that it makes."""
    if not rows:
        return False
    if unit.program == "clock":
        return True
    if unit.program == "needle":
        return len(rows) == 2 * planned(unit)[1].depths
    if unit.program == "mqar":
        options, plan = planned(unit)
        return train.is_whole(rows, plan, "mqar", options.variant[0])
    return any(row["step"] == row["steps"] for row in rows)


def settings(unit: Unit, data: Path) -> dict[str, str]:
    """The settings that each row of the unit must state. data: the corpus; if it does not exist, rows may be of any corpus."""
    options, plan = planned(unit)
    corpus = "reference" if unit.quick else name_in(data)
    if unit.program == "needle":
        made = needle.made_with(plan, corpus)
    elif unit.program == "mqar":
        made = {"task": "mqar"} | {name: getattr(plan, name) for name in ("keep", "items", "backend", "dtype")}
    elif unit.program == "lra":
        made = lra.made_with(plan, options.task[0], options.method[0], options.quick)
    elif unit.program == "mlm":
        made = mlm.made_with(plan, options.method[0], corpus)
    else:
        made = language.made_with(plan, corpus)
    return {column: str(value) for column, value in made.items() if value is not None}


def has_no_gap(unit: Unit, rows: Rows) -> bool:
    """Whether no evaluation is missing before the last row, and none is there twice."""
    _, plan = planned(unit)
    if unit.program == "needle":
        tests = {(row["length"], row["depth"]) for row in rows}
        return len(tests) == len(rows)
    # of a run that is not trained there is one row, of step 0
    end = plan.steps if unit.program == "mqar" else int(rows[0]["steps"])
    seeds = plan.seeds if unit.program == "mqar" else 1
    steps = [step for step in sorted({*range(plan.every, end, plan.every), end}) for _ in range(seeds)]
    return [row["step"] for row in rows] == [str(step) for step in steps[: len(rows)]]


def examples_name(unit: Unit, corpus: Path) -> str:
    """The name of the file that a unit of the program prepare draws."""
    options = lra.parse([*unit.arguments, *ON_CPU])
    (task,) = options.task
    sizes = language.plan_of(options, lra.Plan).sizes(task, options.quick)
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
    """The part that `--plain` should leave out, by the end of a log."""
    text = log.read_text(errors="replace")[-20_000:] if log.is_file() else ""
    # a step that is captured calls compiled parts too, so what speaks of graphs comes first
    if re.search(r"captur(e|ing)|cudaErrorStreamCapture|CUDAGraph", text):
        return "graph"
    return "compile" if re.search(r"torch/_(dynamo|inductor)|InductorError|BackendCompilerFailed", text) else "all"


def last_line(log: Path) -> str:
    """The last line of a log, which is usually the error."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
    return lines[-1] if lines else "it printed nothing"
