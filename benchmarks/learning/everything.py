"""Makes every run of `train.py --preset paper`, `language.py`, `needle.py`, `mlm.py` and `lra.py`, side by side over several GPUs and in pieces.

    python benchmarks/learning/everything.py --list                                             # the plan, with predicted minutes
    python benchmarks/learning/everything.py --data out/corpus --gpus 2 --slots 3 --minutes 9 --pack out/state.tgz
    python benchmarks/learning/everything.py --unpack out/state.tgz --data out/corpus ...       # go on, on another machine too
    python benchmarks/learning/everything.py --quick                                            # everything at tiny size, a CPU

A unit is one run: a program, a size or task, a method and a seed (MQAR trains its seeds side by side). Each has a folder of its own in --state
with its CSV, its log and its checkpoint. A command makes the units that are not whole, the dense ones of the first seed first: where one of them has not
learned its task, it says so, and the other units of the task go last. Then come those that begin with weights that are there, then the longest.
At the end of --minutes units that write checkpoints do so, the others are cut and begin anew; after a kill, too, the same command goes on.
A unit that fails is made once more without compiled parts or CUDA graphs, whichever its log speaks of, and not a third time unless --again is
given; after three such failures for one reason all units are made without it.

With several processes on a GPU the time of a step means nothing, so the merged CSVs have none (nan) but that of `language.py --clock`, whose units
run alone on their GPU. `results/` has the merged CSVs, of whole runs alone.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import language
import language_model
import lra
import lra_tasks
import mlm
import model
import needle
import train
from captured import add_plain
from pieces import Rows, read, stem
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PROGRAMS = ("needle", "mqar", "lra", "mlm", "language")
TABLES = {"needle": "needle.csv", "mqar": "mqar.csv", "lra": "lra.csv", "mlm": "mlm.csv", "language": "language.csv"}
MARGIN = 20  # seconds that a checkpoint may take
LENGTHS = (1024, 2048, 4096, 8192)
SEEDS = (0, 1, 2)
# Predicted for an H100 on which a unit runs alone, not measured: milliseconds of a step.
STEP_MS = {
    "needle": 4.5, "mlm": 11.0, "listops": 8.0, "image": 3.5, "retrieval": 6.0, "tiny": 2.0, "3M": 5.0, "10M": 9.5, "30M": 19.0, "100M": 41.0,
    1024: 7.0, 2048: 7.5, 4096: 8.5, 8192: 10.0,
}  # fmt: skip
# A loss or an accuracy that says that dense attention has learned nothing: above it for perplexity, below it for accuracy
AT_CHANCE = {"needle": 0.5, "mqar": 0.5, "listops": 0.25, "image": 0.25, "retrieval": 0.6, "mlm": 300.0}


@dataclass(frozen=True)
class Unit:
    """One run. program: one of PROGRAMS, or prepare or clock. group: those that a dense run can speak for. arguments: of the program's `main`,
    without folders. seconds: predicted, alone on a GPU. steps: of the run. base: the unit whose weights it begins with. needs: a unit that makes what
    it reads. cut: whether it can be cut and go on. alone: with nothing beside it on its GPU."""

    program: str
    name: str
    group: str
    arguments: tuple[str, ...]
    seconds: float
    key: tuple[str, ...] = ()
    steps: int = 0
    base: str = ""
    needs: str = ""
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
    made = {"needle": _needles, "mqar": _mqar, "lra": _lra, "mlm": _mlm, "language": _language}
    return [unit for program in programs for unit in made[program](quick)]


def _needles(quick: bool) -> Iterator[Unit]:
    plan = needle.Plan.quick() if quick else needle.Plan(device="cpu")
    sizes = ("--quick", "--steps", "20", "--mixed", "0") if quick else ()
    steps = 20 if quick else plan.steps
    for seed in (0,) if quick else SEEDS:
        for method in language_model.METHODS:
            yield Unit(
                "needle", f"{method}-{seed}", "needle", (*sizes, "--method", method, "--seed", str(seed)), seconds_of("needle", steps) + 3,
                (method, str(seed)), steps, probe=(method, seed) == ("dense", 0), quick=quick,
            )  # fmt: skip


def _mqar(quick: bool) -> Iterator[Unit]:
    for length in (64,) if quick else LENGTHS:
        plan = train.Plan.paper(length)
        steps = 20 if quick else plan.steps
        small = (
            "--symbols", "16", "--batch", "2", "--test", "2", "--seeds", "1", "--width", "32", "--steps", "20", "--every", "10", "--device", "cpu",
        ) if quick else ()  # fmt: skip
        for variant in (v for v in model.VARIANTS if v != "dynamic_frozen"):
            slower = 1.5 if variant == "dense" and length == 8192 else 1.0
            yield Unit(
                "mqar", f"{length}-{variant}", f"mqar {length}", ("--preset", "paper", "--length", str(length), "--variant", variant, *small),
                slower * seconds_of(1024 if quick else length, steps) + 3, (str(length), variant), steps, probe=variant == "dense", quick=quick,
            )  # fmt: skip


def _lra(quick: bool) -> Iterator[Unit]:
    plan = lra.Plan.quick() if quick else lra.Plan(device="cpu")
    sizes = ("--quick", "--steps", "4", "--every", "2", "--examples", "40", "--tested", "10") if quick else ()
    for task in lra.TASKS:
        ready = f"lra-{task}"
        yield Unit("prepare", ready, task, (*sizes, "--task", task), 0.0, (task,), quick=quick)
        for seed in (0,) if quick else SEEDS:
            for variant in lra.VARIANTS:
                tuned = variant.endswith("_tuned")
                steps = plan.of(variant).steps
                key = (task, variant, str(seed))
                yield Unit(
                    "lra", stem((task, variant, seed)), task, (*sizes, "--task", task, "--method", variant, "--seed", str(seed)),
                    1.15 * seconds_of(task, steps) + 2, key, steps, stem((task, "nystrom", seed)) if tuned else "", ready,
                    cut=True, probe=(variant, seed) == ("dense", 0), quick=quick,
                )  # fmt: skip


def _mlm(quick: bool) -> Iterator[Unit]:
    plan = mlm.Plan.quick() if quick else mlm.Plan(device="cpu")
    sizes = ("--quick", "--steps", "6", "--tune", "2", "--every", "3") if quick else ()
    for seed in (0,) if quick else SEEDS:
        for method in mlm.METHODS:
            steps = mlm.steps_of(plan, method)
            begins = method.endswith(("_tuned", "_pruned"))
            yield Unit(
                "mlm", stem((plan.size, method, seed)), "mlm", (*sizes, "--method", method, "--seed", str(seed)),
                1.02 * seconds_of("mlm", steps) + 2, (plan.size, method, str(seed)), steps, stem((plan.size, "dense", seed)) if begins else "",
                cut=True, probe=(method, seed) == ("dense", 0), quick=quick,
            )  # fmt: skip


def _language(quick: bool) -> Iterator[Unit]:
    steps = 6 if quick else language.Plan(device="cpu").steps
    sizes = ("--quick", "--steps", "6", "--every", "3") if quick else ()
    for size in ("tiny",) if quick else [s for s in language_model.SIZES if s != "tiny"]:
        for seed in (0,) if quick else SEEDS:
            for method in language_model.METHODS:
                yield Unit(
                    "language", stem((size, method, seed)), f"language {size}",
                    (*sizes, "--size", size, "--method", method, "--seed", str(seed)), 1.1 * seconds_of(size, steps) + 2,
                    (size, method, str(seed)), steps, cut=True, quick=quick,
                )  # fmt: skip
        for method in language_model.METHODS:
            yield Unit(
                "clock", stem((size, method, 0)), f"language {size}",
                (*sizes, "--size", size, "--method", method, "--seed", "0", "--clock", "2" if quick else "40"), seconds_of(size, 50) + 3,
                (size, method), alone=True, quick=quick,
            )  # fmt: skip


def seconds_of(what: str | int, steps: int) -> float:
    """Predicted, of so many steps alone on an H100."""
    return STEP_MS[what] * steps / 1000


@dataclass
class State:
    """A folder with a folder for each unit, weights that units share, examples that were drawn, and merged results."""

    root: Path
    units: list[Unit]
    data: Path = Path("out/corpus")
    by_name: dict[str, Unit] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {unit.name: unit for unit in self.units if unit.program not in ("clock", "needle", "mqar")}
        self._whole: set[Path] = set()
        self._said: dict[Path, dict[str, Any]] = {}

    def table(self, unit: Unit) -> Path:
        """The unit's CSV."""
        return self.root / unit.folder / ("clock.csv" if unit.program == "clock" else TABLES[unit.program])

    def weights(self, unit: Unit) -> Path:
        """What others begin with, if the unit is a base."""
        return self.root / "weights" / unit.program / f"{unit.name}.pt"

    def drawn(self, unit: Unit) -> Path:
        """The examples that a unit of the program prepare draws."""
        options = _quick_sizes(unit) if unit.quick else lra.TASKS[unit.key[0]]
        return self.root / "drawn" / lra_tasks.kept_name(unit.key[0], options, None if unit.quick else self.data)

    def is_whole(self, unit: Unit) -> bool:
        """Whether there is nothing left to do."""
        if unit.folder not in self._whole and self._ends(unit):
            self._whole.add(unit.folder)
        return unit.folder in self._whole

    def _ends(self, unit: Unit) -> bool:
        if unit.program == "prepare":
            return self.drawn(unit).is_file()
        rows = read(self.table(unit))
        if unit.program == "clock":
            return bool(rows)
        if unit.program == "needle":
            plan = needle.Plan.quick() if unit.quick else needle.Plan(device="cpu")
            return len(rows) == 2 * plan.depths
        if unit.program == "mqar":
            options = train.parse([*unit.arguments, "--device", "cpu"])
            return train.is_whole(rows, train.plan_of(options), "mqar", unit.key[1])
        return any(row["step"] == row["steps"] for row in rows)

    def forget(self, unit: Unit) -> None:
        """Make a unit again from its beginning."""
        self._whole.discard(unit.folder)
        self._said.pop(unit.folder, None)
        shutil.rmtree(self.root / unit.folder, ignore_errors=True)

    def about(self, unit: Unit) -> dict[str, Any]:
        """What earlier commands say of a unit: failures, seconds, slots."""
        if unit.folder not in self._said:
            path = self.root / unit.folder / "unit.json"
            self._said[unit.folder] = json.loads(path.read_text()) if path.is_file() else {}
        return self._said[unit.folder]

    def note(self, unit: Unit, **said: Any) -> None:
        """Add to `about`."""
        path = self.root / unit.folder / "unit.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._said[unit.folder] = self.about(unit) | said
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self._said[unit.folder]))
        part.replace(path)

    def repair(self) -> None:
        """Bases whose weights are gone while a unit still begins with them are made again, and weights that nobody needs are deleted."""
        needed = {unit.base for unit in self.units if unit.base and not self.is_whole(unit) and not self._goes_on(unit)}
        for base in {unit.base for unit in self.units if unit.base}:
            unit = self.by_name[base]
            if base in needed and self.is_whole(unit) and not self.weights(unit).is_file():
                self.forget(unit)
            if base not in needed and self.is_whole(unit):
                self.weights(unit).unlink(missing_ok=True)

    def _goes_on(self, unit: Unit) -> bool:
        return any((self.root / unit.folder / "checkpoints").glob("*.pt"))

    def command(self, unit: Unit, minutes: float, plain: str | None) -> list[str]:
        """The arguments of the program's `main`."""
        said = [*unit.arguments, "--out", str(self.root / unit.folder)]
        if unit.program == "prepare":
            said += ["--prepare", "--cache", str(self.root / "drawn")]
        if unit.program == "lra":
            said += ["--cache", str(self.root / "drawn")]
        if unit.cut:
            said += ["--minutes", f"{minutes:.6g}", "--save", "120", "--weights", str(self.root / "weights" / unit.program)]
        if unit.program in ("needle", "mlm", "lra", "language"):
            said += ["--resume"]
        if unit.program != "mqar":
            said += ["--data", str(self.data)]
        return [*said, "--plain", plain] if plain else said

    def learned(self, unit: Unit) -> bool:
        """Whether a whole dense unit is better than chance."""
        rows = read(self.table(unit))
        if unit.program == "needle":
            found = [float(row["accuracy"]) for row in rows if row["length"] == row["context"]]
            return sum(found) / len(found) > AT_CHANCE["needle"]
        if unit.program == "mqar":
            last = max(int(row["step"]) for row in rows)
            return min(float(row["accuracy"]) for row in rows if int(row["step"]) == last) > AT_CHANCE["mqar"]
        if unit.program == "mlm":
            return float(rows[-1]["perplexity"]) < AT_CHANCE["mlm"]
        return float(rows[-1]["accuracy"]) > AT_CHANCE[unit.group]

    def merge(self) -> list[Path]:
        """Write `results/*.csv` from the units that are whole."""
        made = []
        for program, name in TABLES.items():
            rows: Rows = []
            for unit in (u for u in self.units if u.program == program and self.is_whole(u)):
                rows += [self._timed(unit, row) for row in read(self.table(unit))]
            if rows:
                target = self.root / "results" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target.with_suffix(".part"), "w", newline="") as handle:
                    writer = csv.DictWriter(handle, list(rows[0]), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                target.with_suffix(".part").replace(target)
                made.append(target)
        return made

    def _timed(self, unit: Unit, row: dict[str, str]) -> dict[str, str]:
        """A row with the times of a run that had its GPU for itself, if there is one, and without those of a run that had not."""
        if "step_ms" in row and self.about(unit).get("slots", 1) > 1:
            row = {**row, "step_ms": "nan"}
        if unit.program == "language":
            found = read(self.root / "runs" / "clock" / stem((row["size"], row["method"], 0)) / "clock.csv")
            row = row | {column: found[0][column] for column in ("step_ms", "peak_mib") if found}
        return row

    def pack(self, target: Path, part: int, limit: int) -> list[Path]:
        """One compressed file of rows, of weights that units still begin with and of checkpoints, the small ones first, up to `limit` bytes. Of more
        than `part` bytes it is cut into `<target>.00`, `<target>.01` and so on."""
        self.repair()
        small = [p for p in sorted(self.root.rglob("*")) if p.suffix in (".csv", ".json") and "drawn" not in p.parts]
        large = [p for p in self.root.rglob("*.pt") if "drawn" not in p.parts]
        room, chosen = limit - sum(p.stat().st_size for p in small), list(small)
        for path in sorted(large, key=lambda p: (p.parent.name == "checkpoints", p.stat().st_size)):
            if path.stat().st_size <= room:
                room -= path.stat().st_size
                chosen.append(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in [target, *target.parent.glob(f"{target.name}.[0-9][0-9]")]:
            old.unlink(missing_ok=True)
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w:gz", compresslevel=1) as archive:
            for path in chosen:
                archive.add(path, str(path.relative_to(self.root)))
        whole = held.getvalue()
        if len(whole) <= part:
            target.write_bytes(whole)
            return [target]
        pieces = [whole[at : at + part] for at in range(0, len(whole), part)]
        names = [target.with_name(f"{target.name}.{number:02}") for number in range(len(pieces))]
        for name, piece in zip(names, pieces, strict=True):
            name.write_bytes(piece)
        return names


def unpack(source: Path, root: Path) -> None:
    """The opposite of `State.pack`; files of the state that the packed one has too are replaced."""
    parts = [source] if source.is_file() else sorted(source.parent.glob(f"{source.name}.[0-9][0-9]"))
    if not parts:
        raise ValueError(f"neither {source} nor {source}.00 is there")
    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in parts)), mode="r:gz") as archive:
        archive.extractall(root, filter="data")


def _quick_sizes(unit: Unit) -> lra_tasks.Sizes:
    numbers = dict(zip(unit.arguments[1::2], unit.arguments[2::2], strict=False))
    return lra_tasks.Sizes(lra.QUICK[unit.key[0]].length, int(numbers["--examples"]), int(numbers["--tested"]))


def run_unit(program: str, arguments: list[str], log: Path) -> int:
    """Call the `main` of a program; what it prints goes to the log. Its exit code."""
    named = {"prepare": "lra", "clock": "language", "mqar": "train"}.get(program, program)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as handle, contextlib.redirect_stdout(handle), contextlib.redirect_stderr(handle):
        try:
            return importlib.import_module(named).main(arguments)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        except Exception:  # noqa: BLE001  # of any kind, since the next unit has another process
            traceback.print_exc()
            return 1


def work() -> int:
    """A worker: makes the units that come as lines of JSON, and answers each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    threading.Thread(target=_with_parent, args=(os.getppid(),), daemon=True).start()
    import torch

    for line in sys.stdin:
        task = json.loads(line)
        found = run_unit(task["program"], task["arguments"], Path(task["log"]))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        if found:  # after an error of CUDA a process is of no use
            return 1
    return 0


def _with_parent(parent: int) -> None:
    """End this process as soon as its parent is gone: the next command may make the same unit."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)


class Worker:
    """A process that makes units one after another; it begins when there is one to make."""

    def __init__(self, gpu: int | None, threads: int, errors: Path) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        named = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)}
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "4"} | named
        self.errors, self.process = errors, None

    def do(self, unit: Unit, arguments: list[str], log: Path) -> int:
        """Make a unit; its exit code, -1 if the process died."""
        if self.process is None or self.process.poll() is not None:
            self.errors.parent.mkdir(parents=True, exist_ok=True)
            with open(self.errors, "a") as handle:
                self.process = subprocess.Popen(
                    [sys.executable, __file__, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=handle, text=True,
                    env=self.environment, start_new_session=True,
                )  # fmt: skip
        process = self.process
        try:
            _stream(process.stdin).write(json.dumps({"program": unit.program, "arguments": arguments, "log": str(log)}) + "\n")
            _stream(process.stdin).flush()
            answer = _stream(process.stdout).readline()
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else -1

    def end(self) -> None:
        """Kill it and what it has started."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    process: subprocess.Popen[str] | None


def _stream(stream: Any) -> TextIO:
    return stream


class Here:
    """In place of a `Worker`: this process, for tests."""

    def do(self, unit: Unit, arguments: list[str], log: Path) -> int:
        """Make a unit; its exit code."""
        return run_unit(unit.program, arguments, log)

    def end(self) -> None:
        """Nothing."""


class Queue:
    """Which unit is next, and what has become of each. last: after this command the machine is gone, so that nothing is begun which does not
    end. again: failed units are tried once more."""

    def __init__(
        self, state: State, gpus: int, slots: int, minutes: float, console: Console, *, last=False, plain=None, again=False
    ):
        self.state, self.gpus, self.slots, self.console = state, gpus, slots, console
        self.deadline = time.monotonic() + 60 * minutes if minutes else math.inf
        self.last, self.plain, self.again = last, plain, again
        self.running: dict[Path, tuple[Unit, int, float]] = {}
        self.lock = threading.Condition()
        self.tried: set[Path] = set()
        self.causes: Counter[str] = Counter()
        self.hopeless: set[str] = set()
        state.repair()
        for unit in state.units:
            self._judge(unit)

    def _judge(self, unit: Unit) -> None:
        """Say it where dense attention has learned nothing."""
        if (
            unit.probe
            and unit.group not in self.hopeless
            and not unit.quick
            and self.state.is_whole(unit)
            and not self.state.learned(unit)
        ):
            self.hopeless.add(unit.group)
            self.console.print(
                f"[bold red]{unit.group}: dense attention has not learned it[/]; the other runs go last and say nothing"
            )

    def left(self) -> list[Unit]:
        """Units that are not whole and may be tried."""
        return [u for u in self.state.units if not self.state.is_whole(u) and self._wanted(u)]

    def _wanted(self, unit: Unit) -> bool:
        if unit.program == "prepare":
            return any(u.needs == unit.name and not self.state.is_whole(u) for u in self.state.units)
        failures = self.state.about(unit).get("failures", 0)
        return unit.folder not in self.tried and (failures < 2 or self.again)

    def factor(self, program: str) -> float:
        """How many times as long as predicted units of a program have taken, a share of a GPU for each slot."""
        known = [(u, self.state.about(u)) for u in self.state.units if u.program == program and self.state.is_whole(u)]
        known = [(u, about) for u, about in known if about.get("seconds")]
        predicted = sum(u.seconds for u, _ in known)
        return sum(about["seconds"] / about.get("slots", 1) for _, about in known) / predicted if predicted else 1.0

    def take(self, gpu: int) -> Unit | None:
        """The next unit for a slot of a GPU; waits while others may make one ready, and None when there is none."""
        with self.lock:
            while True:
                now = time.monotonic()
                here = [u for u, g, _ in self.running.values() if g == gpu]
                open_units = [u for u in self.left() if u.folder not in self.running]
                factors = {program: self.factor(program) for program in {u.program for u in open_units}}
                ready = [u for u in open_units if self._ready(u) and self._in_time(u, now, factors[u.program])]
                fitting = [] if any(u.alone for u in here) else [u for u in ready if not (u.alone and here)]
                # what runs alone comes when nothing else is left
                others = [u for u in fitting if not u.alone]
                chosen = min(others or fitting, key=self._order, default=None)
                if chosen is not None:
                    self.running[chosen.folder] = (chosen, gpu, now)
                    self.tried.add(chosen.folder)
                    return chosen
                if not open_units or not self.running or now > self.deadline:
                    return None
                self.lock.wait(1)

    def _ready(self, unit: Unit) -> bool:
        names = [self.state.by_name[name] for name in (unit.base, unit.needs) if name]
        return all(self.state.is_whole(u) and u.folder not in self.running for u in names)

    def _in_time(self, unit: Unit, now: float, factor: float) -> bool:
        seconds = self.deadline - now - (MARGIN if unit.cut else 5)
        wall = unit.seconds * (1 if unit.alone else self.slots) * factor
        whole = wall <= seconds
        return whole if self.last or not unit.cut else seconds > 0

    def _order(self, unit: Unit) -> tuple[bool, int, float]:
        based = [u for u in self.state.units if unit.name == u.base and u.program == unit.program]
        first = 0 if unit.program == "prepare" else 1 if unit.probe else 2 if unit.base else 3
        return unit.group in self.hopeless, first, -unit.seconds - sum(u.seconds for u in based)

    def make(self, unit: Unit, worker: Worker | Here) -> None:
        """Make a unit and note what became of it."""
        about = self.state.about(unit)
        minutes = max(1e-6, (self.deadline - time.monotonic() - MARGIN) / 60) if self.deadline < math.inf else 0.0
        log = self.state.root / unit.folder / "log.txt"
        plain = self.plain or about.get("cause")
        # before it, too: a command may be killed
        self.state.note(unit, slots=max(1 if unit.alone else self.slots, about.get("slots", 1)))
        began = time.monotonic()
        found = worker.do(unit, self.state.command(unit, minutes, plain), log)
        seconds = time.monotonic() - began
        with self.lock:
            del self.running[unit.folder]
            late = found == -1 and time.monotonic() > self.deadline
            self.state.note(unit, seconds=round(about.get("seconds", 0) + seconds, 1), plain=plain)
            if found and not late:
                cause = cause_of(log)
                self.state.note(unit, failures=about.get("failures", 0) + 1, cause=cause)
                if not about.get("failures"):
                    self.tried.discard(unit.folder)
                self.console.print(f"[red]{unit.program} {unit.name} failed ({found})[/]: {_tail(log)}", markup=True)
                self.causes[cause] += 1
                if self.causes[cause] == 3 and not self.plain:
                    self.plain = cause
                    self.console.print(f"[bold red]three units failed: from here on --plain {cause}[/]")
            elif not late:
                whole = self.state.is_whole(unit)
                self.console.print(
                    f"{unit.program:8} {unit.name:32} {'whole' if whole else 'cut':6}{seconds:7.1f} s", highlight=False
                )
                self._judge(unit)
            self.lock.notify_all()


def cause_of(log: Path) -> str:
    """What `--plain` should leave out, by the end of a log."""
    text = log.read_text(errors="replace")[-20_000:] if log.is_file() else ""
    # a step that is captured calls compiled parts too, so what speaks of graphs comes first
    if re.search(r"captur(e|ing)|cudaErrorStreamCapture|CUDAGraph", text):
        return "graph"
    return "compile" if re.search(r"torch/_(dynamo|inductor)|InductorError|BackendCompilerFailed", text) else "all"


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
    return lines[-1] if lines else "it printed nothing"


def make_all(queue: Queue, make_worker: Callable[[int, int], Worker | Here]) -> None:
    """Make units until none is left or the minutes are over."""
    workers = [(gpu, make_worker(gpu, slot)) for slot in range(queue.slots) for gpu in range(queue.gpus)]
    ended = threading.Event()

    def loop(gpu: int, worker: Worker | Here) -> None:
        while not ended.is_set() and (unit := queue.take(gpu)) is not None:
            queue.make(unit, worker)

    if isinstance(workers[0][1], Here):
        return loop(*workers[0])
    threads = [threading.Thread(target=loop, args=pair, daemon=True) for pair in workers]
    total = sum(u.seconds for u in queue.state.units)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=queue.console) as progress:
            bar = progress.add_task("of the predicted time", total=total)
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and time.monotonic() < queue.deadline:
                left, now = sum(u.seconds for u in queue.left()), " · ".join(u.name for u, _, _ in list(queue.running.values()))
                progress.update(bar, completed=total - left, description=now[:100] or "waiting")
                threads[0].join(0.5)
                time.sleep(0.5)
    finally:
        ended.set()
        for _, worker in workers:
            worker.end()
        for thread in threads:
            if thread.ident is not None:
                thread.join(20)
    return None


def report(queue: Queue) -> Table:
    """For each kind of unit: how many are whole, how fast a step was, and the minutes that are left."""
    state = queue.state
    table = Table(title="what is whole and what is left")
    for name in ("units", "whole", "failed", "ms a step", "over predicted", "GPU min left"):
        table.add_column(name)
    total = 0.0
    for program, group in dict.fromkeys((u.program, u.group) for u in state.units):
        own = [u for u in state.units if (u.program, u.group) == (program, group)]
        whole = [u for u in own if state.is_whole(u)]
        failed = [u for u in own if u not in whole and state.about(u).get("failures", 0) > 1]
        left = sum(u.seconds for u in own if u not in whole) * queue.factor(program) / 60
        total += left
        shared = [(state.about(u), u) for u in whole if u.steps]
        paces = [1000 * about["seconds"] / about.get("slots", 1) / u.steps for about, u in shared if about.get("seconds")]
        pace = f"{sum(paces) / len(paces):.1f}" if paces else "-"
        measured = f"{queue.factor(program):.2f}" if whole else "-"
        name = group if program in group or program in ("lra", "mlm") else f"{program} {group}"
        table.add_row(name, f"{len(whole)} of {len(own)}", str(len(failed)), pace, measured, f"{left:.1f}")
    table.caption = f"{total:.0f} GPU minutes are left, {total / queue.gpus:.0f} on {queue.gpus}; a step's time is the wall clock over the slots, starts and tests included"
    return table


def plan_table(state: State) -> Table:
    """Every unit, and its predicted minutes."""
    table = Table("unit", "steps", "predicted seconds, alone on an H100", "state", title="the plan")
    for unit in state.units:
        table.add_row(
            f"{unit.program} {unit.name}",
            str(unit.steps or "-"),
            f"{unit.seconds:.0f}",
            "whole" if state.is_whole(unit) else "left",
        )
    sums = {p: sum(u.seconds for u in state.units if u.program == p) / 60 for p in dict.fromkeys(u.program for u in state.units)}
    table.caption = ", ".join(f"{p} {m:.1f}" for p, m in sums.items()) + f": {sum(sums.values()):.0f} GPU minutes predicted"
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="folder of everything that is made; out/everything, or out/everything-quick")
    parser.add_argument("--data", type=Path, default=Path("out/corpus"), help="folder made by corpus.py")
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="may be repeated; all by default")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--slots", type=int, default=3, help="processes side by side on a GPU")
    parser.add_argument("--minutes", type=float, default=0, help="end after so many; 0: when everything is whole")
    parser.add_argument("--last", action="store_true", help="begin nothing that is not predicted to end in time")
    parser.add_argument("--again", action="store_true", help="try units that failed twice")
    add_plain(parser)
    parser.add_argument("--quick", action="store_true", help="every program at tiny size on the CPU, without the corpus")
    parser.add_argument("--list", action="store_true", help="print the plan and end")
    parser.add_argument("--pack", type=Path, help="write the state into one file at the end")
    parser.add_argument("--part", type=int, default=15, help="MiB of a packed file, which is cut into several beyond that")
    parser.add_argument("--limit", type=int, default=30, help="MiB of what is packed: beyond that large checkpoints stay behind")
    parser.add_argument("--unpack", type=Path, help="read such a file first")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Make what is left; returns an exit code, 3 where something failed."""
    options, console = parse(arguments), Console()
    root = options.state or Path("out/everything-quick" if options.quick else "out/everything")
    units = units_of(options.quick, tuple(options.only or PROGRAMS))
    state = State(root.resolve(), units, options.data.resolve())
    try:
        if min(options.gpus, options.slots, options.part) < 1:
            raise ValueError("--gpus, --slots and --part must be at least 1")
        if options.unpack:
            unpack(options.unpack, state.root)
        if options.list:
            console.print(plan_table(state))
            return 0
        reads = any(u.program not in ("mqar", "prepare") and not u.quick for u in units)
        if reads and not (options.data / "corpus.json").is_file():
            raise ValueError(
                f"{options.data} holds no corpus.json; `python benchmarks/learning/corpus.py --fetch --out {options.data}` makes it"
            )
    except ValueError as error:
        print(f"everything.py: {error}", file=sys.stderr)
        return 2
    queue = Queue(
        state, options.gpus, options.slots, options.minutes, console, last=options.last, plain=options.plain, again=options.again
    )
    threads = max(1, (os.cpu_count() or 1) // (options.gpus * options.slots))
    worker = functools.partial(_worker, quick=options.quick, threads=threads, root=state.root)
    try:
        make_all(queue, worker)
    finally:
        made = state.merge()
        console.print(report(queue))
        for path in made:
            console.print(f"rows in {path}", soft_wrap=True)
        if options.pack:
            parts = state.pack(options.pack, options.part * 2**20, options.limit * 2**20)
            console.print("packed: " + ", ".join(f"{p} ({p.stat().st_size / 2**20:.1f} MiB)" for p in parts), soft_wrap=True)
    return 3 if any(state.about(u).get("failures", 0) > 1 and not state.is_whole(u) for u in units) else 0


def _worker(gpu: int, slot: int, *, quick: bool, threads: int, root: Path) -> Worker:
    return Worker(None if quick else gpu, threads, root / "logs" / f"{gpu}-{slot}.txt")


if __name__ == "__main__":
    sys.exit(work() if sys.argv[1:] == ["--work"] else main(sys.argv[1:]))
