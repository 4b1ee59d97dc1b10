"""Training runs in pieces: rows in a CSV as they are made, checkpoints where a command's minutes end, and going on from both.

A run is named by three columns of its rows, such as (size, method, seed). It may begin with the last weights of another run, its base,
which are kept in `weights/` beside the CSV. When a run was cut, its rows up to its checkpoint in `checkpoints/` are kept, and none if it has
no checkpoint. Files are written whole or not at all. A line of a CSV that was cut short is not read. So a command may be killed at any moment.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from captured import add_plain, plain
from rich.console import Console
from rich.progress import Progress

Key = tuple[str, str, int]
Rows = list[dict[str, str]]


class Run(Protocol):
    """A model in training."""

    model: torch.nn.Module
    step: int
    deadline: float

    def rows(self) -> Iterator[Any]:
        """Train from where it stands, but not beyond the deadline; a row, a dataclass, after each evaluation."""

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""

    def said(self, row: Any) -> str:
        """One line about the run, whose last row this is."""


@dataclass(frozen=True)
class Job:
    """The parts that the runs of a command share. table: the CSV. row: the dataclass of a row, with the columns step and steps. key: the columns that
    name a run. begin: makes a run. made_with: what each row of a run must say; `steps` is among it. base: the run whose weights a run
    begins with, if any. is_base: whether the last weights of a run are kept for others. shared: the folder where, unless it is `weights/`."""

    table: Path
    row: type[Any]
    key: tuple[str, str, str]
    begin: Callable[[Key], Run]
    made_with: Callable[[Key], dict[str, Any]]
    base: Callable[[Key], Key | None] = lambda key: None
    is_base: Callable[[Key], bool] = lambda key: False
    shared: Path | None = None

    def key_of(self, row: dict[str, str]) -> Key:
        """The run of a row."""
        first, second, third = (row[column] for column in self.key)
        return first, second, int(third)

    def steps(self, key: Key) -> int:
        """The steps of a whole run."""
        return int(self.made_with(key)["steps"])

    def weights(self, key: Key) -> Path:
        """The file of a base's last weights."""
        return (self.shared or self.table.parent / "weights") / f"{stem(key)}.pt"

    @property
    def checkpoints(self) -> Path:
        """The folder of what was cut."""
        return self.table.parent / "checkpoints"


def stem(key: tuple[Any, ...]) -> str:
    """A name for files of a run; without colons, which some file systems refuse."""
    return "-".join(map(str, key)).replace(":", "of")


def read(path: Path) -> Rows:
    """Rows of a CSV; none if there is no file. A last line without its end is left out."""
    if not path.is_file():
        return []
    text = path.read_text()
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def write_rows(path: Path, columns: list[str], rows: Rows) -> None:
    """Write a CSV, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", newline="") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


@contextmanager
def appending(path: Path, columns: list[str], kept: Rows) -> Iterator[Callable[[list[Any]], None]]:
    """A function that adds rows, dataclasses, to a CSV that begins with the rows `kept`; each is on disk when it returns."""
    write_rows(path, columns, kept)
    with open(path, "a", newline="") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")

        def add(rows: list[Any]) -> None:
            writer.writerows(asdict(row) for row in rows)
            handle.flush()

        yield add


def parser_of(about: str, plan: type[Any], out: Path, methods: tuple[str, ...]) -> argparse.ArgumentParser:
    """The command line of a kind of run: where from and where to, which methods and seeds, in what pieces, and each size of the plan."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/corpus"), help="folder made by corpus.py")
    parser.add_argument("--out", type=Path, default=out, help="folder for rows and checkpoints")
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, without the corpus")
    parser.add_argument("--method", action="append", choices=list(methods), help="may be repeated; all by default")
    parser.add_argument("--seed", action="append", type=int, help="may be repeated; 0, 1 and 2 by default")
    parser.add_argument("--minutes", type=float, default=0, help="end after so many; 0: never")
    parser.add_argument("--resume", action="store_true", help="continue what --out holds")
    parser.add_argument(
        "--save", type=float, default=0, help="write a checkpoint every so many seconds; 0: at the end of --minutes alone"
    )
    parser.add_argument("--weights", type=Path, help="folder of the weights that runs begin with; `weights` in --out by default")
    add_plain(parser)
    for field in fields(plan):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=None, help=f"default {field.default}")
    return parser


def check(plan: Any, least: dict[str, int]) -> None:
    """Refuse sizes of a plan that are below `least`, and a GPU that is not there."""
    for name, lowest in least.items():
        if getattr(plan, name) < lowest:
            raise ValueError(f"--{name} is {getattr(plan, name)}; it must be at least {lowest}")
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device; --quick runs on the CPU, and --device cpu does with any sizes, slowly")


def kept_rows(rows: Rows, job: Job, runs: list[Key]) -> Rows:
    """The rows that a continued command keeps: those of whole runs, and those up to the checkpoint of a run that has one. A base whose
    weights are gone while one of `runs` still needs them is repeated."""
    for row in rows:
        wanted = {column: str(value) for column, value in job.made_with(job.key_of(row)).items()}
        made = {column: row[column] for column in wanted}
        if made != wanted:
            raise ValueError(f"the CSV has rows made with {made}; this command has {wanted}, which needs another --out")
    last = {job.key_of(row): int(row["step"]) for row in rows if row["step"] == row["steps"]}
    for run in runs:
        base = job.base(run)
        begins = run not in last and checkpoint_of(job.checkpoints, run) is None
        if begins and base in last and base in runs and not job.weights(base).is_file():
            del last[base]
    for key in {job.key_of(row) for row in rows} - set(last):
        found = checkpoint_of(job.checkpoints, key)
        last[key] = step_of(found) if found else -1
    return [row for row in rows if int(row["step"]) <= last[job.key_of(row)]]


def checkpoint_of(folder: Path, key: Key) -> Path | None:
    """The newest checkpoint of a run that was cut, `<names of the run>-<step>.pt`."""
    return max(folder.glob(f"{stem(key)}-*.pt"), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The step after which it was saved."""
    return int(checkpoint.stem.rsplit("-", 1)[1])


def save(run: Run, key: Key, folder: Path) -> None:
    """Write a checkpoint of the run in the place of older ones."""
    target = folder / f"{stem(key)}-{run.step}.pt"
    write(run.state(), target)
    for old in set(folder.glob(f"{stem(key)}-*.pt")) - {target}:
        old.unlink()


def remove(key: Key, folder: Path) -> None:
    """Delete the checkpoints of the run."""
    for old in folder.glob(f"{stem(key)}-*.pt"):
        old.unlink()


def write(state: dict[str, Any], target: Path) -> None:
    """Write a file of tensors, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, target.with_suffix(".part"))
    target.with_suffix(".part").rename(target)


def begun(job: Job, key: Key, resume: bool, device: str) -> Run:
    """The run at its checkpoint, or with the weights of its base, or new."""
    run = job.begin(key)
    checkpoint = checkpoint_of(job.checkpoints, key) if resume else None
    base = job.base(key)
    if checkpoint is not None:
        run.load(torch.load(checkpoint, map_location=device, weights_only=True))
    elif base is not None:
        if not job.weights(base).is_file():
            raise ValueError(
                f"{stem(key)} begins with the weights of {stem(base)}, and {job.weights(base)} is not there; make that run too"
            )
        run.model.load_state_dict(torch.load(job.weights(base), map_location=device, weights_only=True))
    return run


def train_all(job: Job, runs: list[Key], options: argparse.Namespace, device: str, console: Console) -> bool:
    """Make each run in turn; False if --minutes were over first. Rows are written at once."""
    plain(options.plain)
    job = replace(job, shared=options.weights)
    kept = kept_rows(read(job.table), job, runs) if options.resume else []
    whole = {job.key_of(row) for row in kept if row["step"] == row["steps"]}
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    columns = [f.name for f in fields(job.row)]
    with appending(job.table, columns, kept) as add, Progress(console=console) as progress:
        bar = progress.add_task("all runs", total=sum(map(job.steps, runs)))
        made = False  # a command gets one evaluation further, however few its minutes
        for number, key in enumerate(runs):
            if key in whole:
                continue
            if made and time.monotonic() > deadline:
                return False
            made = True
            run = begun(job, key, options.resume, device)
            before = sum(map(job.steps, runs[:number]))
            saved, run.deadline = time.monotonic(), deadline
            for row in run.rows():
                last = row.step == job.steps(key)
                if last and job.is_base(key):  # before the row, which says that the run is whole
                    write(run.model.state_dict(), job.weights(key))
                add([row])
                progress.update(bar, completed=before + row.step, description=" ".join(map(str, key)))
                if options.save and time.monotonic() > saved + options.save and not last:
                    save(run, key, job.checkpoints)
                    saved = time.monotonic()
            if run.step < job.steps(key):
                save(run, key, job.checkpoints)
                return False
            remove(key, job.checkpoints)
            progress.console.print(run.said(row))
            del run  # its memory would count as the next one's
    return True
