"""`saccade verify`: compares every backend that runs here with the float64 oracle, on the named problems that the tests use."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from saccade.cli.device import DTYPES, describe, device_of, dtype_of
from saccade.cli.info import backends_on
from saccade.engine.backend import Backend
from saccade.env import interpreting_environment, interpreting_triton
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.operations import OPERATIONS

# of the table: what the column of case names has at least, and what the other columns take
_LEAST_COLUMNS, _OTHER_COLUMNS = 14, 66
# slow in the interpreter, where one program takes milliseconds
_LARGE = "large"


@dataclass(frozen=True)
class Selection:
    """The parts to verify; an empty list means everything."""

    backends: list[str]
    cases: list[str]
    dtypes: list[str]
    device: str | None = None
    interpret: bool = False
    every: bool = False
    operations: list[str] = field(default_factory=list)
    as_json: bool = False

    def arguments(self) -> list[str]:
        """The selection as arguments of the command line."""
        lists = (("--op", self.operations), ("--backend", self.backends), ("--case", self.cases), ("--dtype", self.dtypes))
        result = [word for option, values in lists for value in values for word in (option, value)]
        return result + ["--interpret"] * self.interpret + ["--all"] * self.every + ["--json"] * self.as_json


class Job(NamedTuple):
    """One check; `run` is the check function of the operation."""

    operation: str
    backend: Backend
    dtype: str
    case: Any
    run: Callable[..., list]


Tallies = dict[tuple[str, str, str], "Tally"]  # by operation, backend and dtype


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
                self.failures.append(
                    f"{case}: {result.name}: error {result.error:.3g}, budget {result.budget:.3g} ({result.reason})"
                )


def run(selection: Selection) -> int:
    """Verify and print; 0 if every budget is met, 1 if not."""
    if selection.interpret and selection.device not in (None, "cpu"):
        raise InvalidArgument(
            f"device is {selection.device!r}; the interpreter runs on the CPU, leave one of --interpret and --device out"
        )
    if selection.interpret and not interpreting_triton():
        command = [sys.executable, "-m", "saccade", "verify", *selection.arguments()]
        return subprocess.run(command, env=interpreting_environment(), check=False).returncode
    if selection.every and not interpreting_triton():
        raise InvalidArgument("--all is given without --interpret; the interpreter alone leaves large cases out")
    device = device_of("cpu" if selection.interpret else selection.device)
    began = time.monotonic()
    tallies = _measure(_jobs(selection, device), device)
    seconds = time.monotonic() - began
    return _report_as_json(tallies, device) if selection.as_json else _report(tallies, device, seconds)


def _jobs(selection: Selection, device: torch.device) -> list[Job]:
    backends, cases = _chosen_backends(selection), _chosen_cases(selection, device)
    return [
        Job(operation, backend, dtype, case, OPERATIONS[operation].check)
        for operation, chosen in backends.items()
        for backend in chosen
        for dtype in _dtypes(selection, device)
        for case in cases.get(operation, ())
    ]


def _chosen_backends(selection: Selection) -> dict[str, list[Backend]]:
    for operation in selection.operations:
        if operation not in OPERATIONS:
            raise InvalidArgument(f"op is {operation!r}; allowed are {', '.join(map(repr, OPERATIONS))}")
    operations = selection.operations or list(OPERATIONS)
    known = list(dict.fromkeys(b.name for operation in operations for b in OPERATIONS[operation].backends))
    for name in selection.backends:
        if name not in known:
            raise InvalidArgument(f"backend is {name!r}; allowed are {', '.join(map(repr, known))}")
    wanted = selection.backends or known
    return {operation: [b for b in OPERATIONS[operation].backends if b.name in wanted] for operation in operations}


def _chosen_cases(selection: Selection, device: torch.device) -> dict[str, list]:
    operations = selection.operations or list(OPERATIONS)
    named = {
        operation: [
            c for c in OPERATIONS[operation].cases if not selection.cases or any(part in c.name for part in selection.cases)
        ]
        for operation in operations
    }
    if not any(named.values()):
        raise InvalidArgument(f"no case has {' or '.join(map(repr, selection.cases))} in its name")
    quickly = interpreting_triton() and device.type == "cpu" and not selection.every
    return {operation: [c for c in cases if not (quickly and _LARGE in c.tags)] for operation, cases in named.items()}


def _dtypes(selection: Selection, device: torch.device) -> list[str]:
    for name in selection.dtypes:
        dtype_of(name)
    # bfloat16 is wrong in Triton's interpreter, and this command does not test torch's own CPU kernels in half precision
    usual = ["bf16", "fp16", "fp32"] if device.type == "cuda" else ["fp16", "fp32"] if interpreting_triton() else ["fp32"]
    return selection.dtypes or usual


def _measure(jobs: list[Job], device: torch.device) -> Tallies:
    """Run every check, with a bar on a terminal, and elsewhere with a line for each backend when it is done; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    tallies: Tallies = {}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs))
        for number, job in enumerate(jobs, 1):
            progress.update(task, description=f"{job.backend.name} {job.dtype} {job.case.name}"[:32])
            key = (job.operation, job.backend.name, job.dtype)
            _check(tallies.setdefault(key, Tally()), job, device)
            progress.advance(task)
            is_last = number == len(jobs) or (jobs[number].operation, jobs[number].backend.name, jobs[number].dtype) != key
            if is_last and not console.is_terminal:
                print(f"{number}/{len(jobs)} {' '.join(key)}", file=sys.stderr, flush=True)
    return tallies


def _check(tally: Tally, job: Job, device: torch.device) -> None:
    if job.backend.own_dropout and job.case.dropout_p > 0:
        # torch draws its own random numbers, so there is nothing to compare with
        tally.declined += 1
        return
    # without the log-sum-exp if a backend has none
    for lse in (True, False):
        try:
            results = job.run(job.case, DTYPES[job.dtype], device, job.backend.name, lse=lse)
        except UnsupportedProblem:
            continue
        tally.add(job.case.name, results)
        return
    tally.declined += 1


def _report(tallies: Tallies, device: torch.device, seconds: float) -> int:
    from rich.console import Console

    console = Console()
    for operation in dict.fromkeys(names[0] for names in tallies):
        console.print(_table(operation, tallies, device, console.width))
    failures = _failures(tallies)
    for text in failures:
        console.print(text, style="red", markup=False, highlight=False)
    style = "green" if _exit_code(tallies) == 0 else "red"
    console.print(_verdict(tallies, device, seconds), style=style, markup=False, highlight=False)
    return _exit_code(tallies)


def _verdict(tallies: Tallies, device: torch.device, seconds: float) -> str:
    """One line: whether all is well."""
    if not _any_ran(tallies):
        found = backends_on(device)
        reasons = dict.fromkeys(f"{name}: {'; '.join(found[of][name])}" for of, name, _ in tallies if found[of][name])
        return "nothing ran: " + ("; ".join(reasons) or "no chosen case is one that the backend takes")
    ran, failed = sum(tally.ran for tally in tallies.values()), len(_failures(tallies))
    if failed:
        return f"{failed} results of {ran} checks missed their error budget, in {seconds:.0f} s"
    return f"all {ran} checks passed in {seconds:.0f} s"


def _report_as_json(tallies: Tallies, device: torch.device) -> int:
    results = []
    for (operation, backend, dtype), tally in tallies.items():
        worst = {"worst_ratio": tally.worst[0], "worst_case": tally.worst[1]} if tally.ran else {}
        counts = {"cases": tally.ran, "declined": tally.declined, "failures": tally.failures}
        results.append({"operation": operation, "backend": backend, "dtype": dtype, **counts, **worst})
    code = _exit_code(tallies)
    print(json.dumps({"device": describe(device), "ok": code == 0, "results": results}, indent=2))
    return code


def _failures(tallies: Tallies) -> list[str]:
    return [f"{' '.join(names)} {text}" for names, tally in tallies.items() for text in tally.failures]


def _any_ran(tallies: Tallies) -> bool:
    return any(tally.ran for tally in tallies.values())


def _exit_code(tallies: Tallies) -> int:
    return 1 if _failures(tallies) or not _any_ran(tallies) else 0


def _between_words(name: str, width: int) -> str:
    """The name of a case in lines that end between its words, in a terminal of `width` columns."""
    return "\n".join(textwrap.wrap(name, max(_LEAST_COLUMNS, width - _OTHER_COLUMNS)))


def _table(operation: str, tallies: Tallies, device: torch.device, width: int):
    from rich.table import Table

    table = Table(title=f"{operation} against float64 on {describe(device)}", title_justify="left")
    for column in ("backend", "dtype", "ran", "declined", "worst\nerror /\nbudget", "where", "verdict"):
        # names stay whole in a narrow terminal
        table.add_column(column, overflow="fold", no_wrap=column in ("backend", "dtype", "where", "verdict"))
    for (of, backend, dtype), tally in tallies.items():
        if of != operation:
            continue
        verdict = "[red]wrong[/]" if tally.failures else "[green]ok[/]" if tally.ran else "[dim]not here[/]"
        ratio = f"{tally.worst[0]:.2f}" if tally.ran else ""
        table.add_row(backend, dtype, str(tally.ran), str(tally.declined), ratio, _between_words(tally.worst[1], width), verdict)
    return table
