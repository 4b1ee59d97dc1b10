"""The plan of `everything.py`: every unit, a run of a program, with its arguments, what it waits for and its predicted seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import language
import language_model
import lra
import mlm
import model
import needle
import train
from pieces import stem

PROGRAMS = ("needle", "mqar", "lra", "mlm", "language")
LENGTHS = (1024, 2048, 4096, 8192)  # of mqar
SEEDS = (0, 1, 2)
# Predicted for an H100 on which a unit runs alone, not measured: milliseconds of a step.
STEP_MS = {
    "needle": 4.5, "mlm": 11.0, "listops": 8.0, "image": 3.5, "retrieval": 6.0, "tiny": 2.0, "3M": 5.0, "10M": 9.5, "30M": 19.0, "100M": 41.0,
    1024: 7.0, 2048: 7.5, 4096: 8.5, 8192: 10.0,
}  # fmt: skip
# Sizes of `--quick`.
QUICK = {
    "needle": ("--quick", "--steps", "20", "--mixed", "0"),
    "mqar": (
        "--symbols", "16", "--batch", "2", "--test", "2", "--seeds", "1", "--width", "32", "--steps", "20", "--every", "10",
        "--device", "cpu",
    ),
    "lra": ("--quick", "--steps", "4", "--every", "2", "--examples", "40", "--tested", "10"),
    "mlm": ("--quick", "--steps", "6", "--tune", "2", "--every", "3"),
    "language": ("--quick", "--steps", "6", "--every", "3"),
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """One run. program: one of PROGRAMS, or prepare, which draws the examples of a task of `lra.py`, or clock, which times steps of
    `language.py`. group: the units that a dense run can speak for. arguments: of the program's `main`, without folders. seconds: predicted,
    alone on a GPU. base: the unit whose weights it begins with. needs: the unit that draws its examples. cut: whether it can be cut and go
    on. alone: with nothing beside it on its GPU. probe: the dense run that says whether its group learns anything."""

    program: str
    name: str
    group: str
    arguments: tuple[str, ...]
    seconds: float
    steps: int = 0
    base: Unit | None = None
    needs: Unit | None = None
    cut: bool = False
    alone: bool = False
    probe: bool = False
    quick: bool = False

    @property
    def folder(self) -> Path:
        """In the state."""
        return Path("runs") / self.program / self.name


def units_of(quick: bool = False, programs: tuple[str, ...] = PROGRAMS) -> list[Unit]:
    """Every unit, in the order of the merged CSVs."""
    planned = {"needle": _needle, "mqar": _mqar, "lra": _lra, "mlm": _mlm, "language": _language}
    return [unit for program in programs for unit in planned[program](quick, QUICK[program] if quick else ())]


def seconds_of(what: str | int, steps: int) -> float:
    """Predicted, of so many steps alone on an H100."""
    return STEP_MS[what] * steps / 1000


def _seeds(quick: bool) -> tuple[int, ...]:
    return SEEDS[:1] if quick else SEEDS


def _needle(quick: bool, sizes: tuple[str, ...]) -> Iterator[Unit]:
    steps = 20 if quick else needle.Plan(device="cpu").steps
    for seed in _seeds(quick):
        for method in language_model.METHODS:
            yield Unit(
                "needle", f"{method}-{seed}", "needle", (*sizes, "--method", method, "--seed", str(seed)),
                seconds_of("needle", steps) + 3, steps, probe=(method, seed) == ("dense", 0), quick=quick,
            )  # fmt: skip


def _mqar(quick: bool, sizes: tuple[str, ...]) -> Iterator[Unit]:
    for length in (64,) if quick else LENGTHS:
        steps = 20 if quick else train.Plan.paper(length).steps
        for variant in (v for v in model.VARIANTS if v != "dynamic_frozen"):
            slower = 1.5 if variant == "dense" and length == 8192 else 1.0
            yield Unit(
                "mqar", f"{length}-{variant}", f"mqar {length}", ("--preset", "paper", "--length", str(length), "--variant", variant, *sizes),
                slower * seconds_of(1024 if quick else length, steps) + 3, steps, probe=variant == "dense", quick=quick,
            )  # fmt: skip


def _lra(quick: bool, sizes: tuple[str, ...]) -> Iterator[Unit]:
    plan = lra.Plan.quick() if quick else lra.Plan(device="cpu")
    for task in lra.TASKS:
        drawn = Unit("prepare", f"lra-{task}", task, (*sizes, "--task", task, "--prepare"), 0.0, quick=quick)
        yield drawn
        for seed in _seeds(quick):
            trained: Unit | None = None
            for variant in lra.VARIANTS:
                steps = plan.of(task, variant).steps
                unit = Unit(
                    "lra", stem((task, variant, seed)), task, (*sizes, "--task", task, "--method", variant, "--seed", str(seed)),
                    1.15 * seconds_of(task, steps) + 2, steps, trained if variant.endswith("_tuned") else None, drawn,
                    cut=True, probe=(variant, seed) == ("dense", 0), quick=quick,
                )  # fmt: skip
                if variant == "nystrom":  # before those that begin with its weights
                    trained = unit
                yield unit


def _mlm(quick: bool, sizes: tuple[str, ...]) -> Iterator[Unit]:
    plan = mlm.Plan.quick() if quick else mlm.Plan(device="cpu")
    for seed in _seeds(quick):
        made: dict[str | None, Unit] = {}
        for method in mlm.METHODS:  # each after the one whose weights it begins with
            steps = mlm.steps_of(plan, method)
            made[method] = Unit(
                "mlm", stem((plan.size, method, seed)), "mlm", (*sizes, "--method", method, "--seed", str(seed)),
                1.02 * seconds_of("mlm", steps) + 2, steps, made.get(mlm.base_of(method)), cut=True,
                probe=(method, seed) == ("dense", 0), quick=quick,
            )  # fmt: skip
            yield made[method]


def _language(quick: bool, sizes: tuple[str, ...]) -> Iterator[Unit]:
    steps = 6 if quick else language.Plan(device="cpu").steps
    for size in ("tiny",) if quick else [s for s in language_model.SIZES if s != "tiny"]:
        for seed in _seeds(quick):
            for method in language_model.METHODS:
                yield Unit(
                    "language", stem((size, method, seed)), f"language {size}",
                    (*sizes, "--size", size, "--method", method, "--seed", str(seed)), 1.1 * seconds_of(size, steps) + 2, steps,
                    cut=True, quick=quick,
                )  # fmt: skip
        for method in language_model.METHODS:
            yield Unit(
                "clock", stem((size, method, 0)), f"language {size}",
                (*sizes, "--size", size, "--method", method, "--seed", "0", "--clock", "2" if quick else "40"),
                seconds_of(size, 50) + 3, alone=True, quick=quick,
            )  # fmt: skip
