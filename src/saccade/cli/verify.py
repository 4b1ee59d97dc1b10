"""`saccade verify`: every backend that runs here against the float64 oracle, over the named shapes the tests use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from saccade.backends import ATTENTION
from saccade.cli.device import DTYPES, describe, device_of, dtype_of
from saccade.env import interpreting_environment, interpreting_triton
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.kernels.contract import Backend

# slow in the interpreter, where one program takes milliseconds
_LARGE = "large"


@dataclass(frozen=True)
class Selection:
    """What to verify; an empty list means everything."""

    backends: list[str]
    cases: list[str]
    dtypes: list[str]
    device: str | None = None
    interpret: bool = False
    every: bool = False

    def arguments(self) -> list[str]:
        """The same selection as arguments of the command line."""
        lists = (("--backend", self.backends), ("--case", self.cases), ("--dtype", self.dtypes))
        result = [word for option, values in lists for value in values for word in (option, value)]
        return result + ["--interpret"] * self.interpret + ["--all"] * self.every


@dataclass
class Tally:
    """Results of one backend at one dtype."""

    ran: int = 0
    declined: int = 0
    worst: tuple[float, str] = (0.0, "")
    failures: list[str] = field(default_factory=list)

    def add(self, case: str, results) -> None:
        """Count the results of one case: its outputs and gradients, each with its own budget."""
        self.ran += 1
        for result in results:
            self.worst = max(self.worst, (result.ratio, f"{case}: {result.name}"))
            if not result.ok:
                self.failures.append(f"{case}: {result.name}: error {result.error:.3g}, budget {result.budget:.3g}")


def run(selection: Selection) -> int:
    """Verify and print; 0 if every budget is met, 1 if not."""
    if selection.interpret and not interpreting_triton():
        command = [sys.executable, "-m", "saccade", "verify", *selection.arguments()]
        return subprocess.run(command, env=interpreting_environment(), check=False).returncode
    device = device_of("cpu" if selection.interpret else selection.device)
    backends, cases = _chosen_backends(selection), _chosen_cases(selection, device)
    tallies = _measure(backends, cases, _dtypes(selection, device), device)
    return _report(tallies, device)


def _chosen_backends(selection: Selection) -> list[Backend]:
    known = {b.name: b for b in ATTENTION}
    for name in selection.backends:
        if name not in known:
            raise InvalidArgument(f"backend is {name!r}; allowed are {', '.join(map(repr, known))}")
    return [b for b in ATTENTION if not selection.backends or b.name in selection.backends]


def _chosen_cases(selection: Selection, device: torch.device) -> list:
    from saccade.testing.shapes import ATTENTION as SHAPES

    cases = [c for c in SHAPES if not selection.cases or any(part in c.name for part in selection.cases)]
    if not cases:
        raise InvalidArgument(f"no case has {' or '.join(map(repr, selection.cases))} in its name")
    quickly = interpreting_triton() and device.type == "cpu" and not selection.every
    return [c for c in cases if not (quickly and _LARGE in c.tags)]


def _dtypes(selection: Selection, device: torch.device) -> list[str]:
    for name in selection.dtypes:
        dtype_of(name)
    # bfloat16 is wrong in Triton's interpreter, and torch's own CPU kernels in half precision are no business of this command
    usual = ["bf16", "fp16", "fp32"] if device.type == "cuda" else ["fp16", "fp32"] if interpreting_triton() else ["fp32"]
    return selection.dtypes or usual


def _measure(backends: list[Backend], cases: list, dtypes: list[str], device: torch.device) -> dict[tuple[str, str], Tally]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    tallies: dict[tuple[str, str], Tally] = {}
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=len(backends) * len(dtypes) * len(cases))
        for backend, dtype, case in _plan(backends, dtypes, cases):
            progress.update(task, description=f"{backend.name} {dtype} {case.name}"[:32])
            _check(tallies.setdefault((backend.name, dtype), Tally()), backend, dtype, case, device)
            progress.advance(task)
    return tallies


def _plan(backends: list[Backend], dtypes: list[str], cases: list) -> Iterator[tuple]:
    for backend in backends:
        for dtype in dtypes:
            for case in cases:
                yield backend, dtype, case


def _check(tally: Tally, backend: Backend, dtype: str, case, device: torch.device) -> None:
    from saccade.testing.budget import check_attention

    if backend.name == "sdpa" and case.dropout_p > 0:
        tally.declined += 1  # torch draws its own random numbers: there is nothing to compare with
        return
    for lse in (True, False):  # without the log-sum-exp where a backend has none
        try:
            results = check_attention(case, DTYPES[dtype], device, backend.name, lse=lse)
        except UnsupportedProblem:
            continue
        tally.add(case.name, results)
        return
    tally.declined += 1


def _report(tallies: dict[tuple[str, str], Tally], device: torch.device) -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"Against float64 on {describe(device)}", title_justify="left")
    for column in ("backend", "dtype", "cases", "declined", "worst error / budget", "where", "verdict"):
        table.add_column(column, overflow="fold")
    for (backend, dtype), tally in tallies.items():
        verdict = "[red]wrong[/]" if tally.failures else "[green]ok[/]" if tally.ran else "[dim]cannot run here[/]"
        ratio = f"{tally.worst[0]:.2f}" if tally.ran else ""
        table.add_row(backend, dtype, str(tally.ran), str(tally.declined), ratio, tally.worst[1], verdict)
    console.print(table)
    failures = [f"{backend} {dtype} {text}" for (backend, dtype), tally in tallies.items() for text in tally.failures]
    for text in failures:
        console.print(text, style="red", markup=False, highlight=False)
    if not any(tally.ran for tally in tallies.values()):
        console.print("nothing ran: see `saccade info` for the reasons", style="red")
        return 1
    return 1 if failures else 0
