"""Runs random problems in one process or several, shows progress, and ends with a table, the lines that repeat failures, and a log."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from saccade.cli.device import describe, device_of
from saccade.errors import InvalidArgument
from tools.soak import log
from tools.soak.cover import SEEDS, Entry
from tools.soak.draw import FAMILY, stack_of
from tools.soak.judged import Outcome, covering, is_slow, pairs, run_stack
from tools.soak.results import Batch, Found, Tally, command_line
from tools.soak.settings import for_tiny_problems
from tools.soak.spread import begin_on, devices_of, on_own_device

_USUAL_COUNT = 500
# cases of a family that a backend declines before it is not asked for the others
_ENOUGH_DECLINED = 3
# bytes that a process keeps from one stack to the next
_MOST_KEPT = 2**30
_MOST_PROCESSES = 4096
# how often processes are started, where one dies or loses its device
_MOST_POOLS = 20


@dataclass(frozen=True)
class Task:
    """The task of a soak. count: random cases in all (500 if nothing else is asked for); operations, backends: empty for all of them; family: seeds that
    share their kernels; cover: walk the covering lists first, which minutes do too; entry: one entry of one covering list alone; part: "2/4" walks the second
    quarter of each list."""

    count: int | None = None
    minutes: float | None = None
    seed: int = 0
    operations: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    device: str | None = None
    processes: int = 1
    as_json: bool = False
    log: Path | None = None
    family: int = FAMILY
    cover: bool = False
    entry: int | None = None
    part: str | None = None

    @property
    def covers(self) -> bool:
        """Whether it walks the covering lists."""
        return self.entry is None and (self.cover or self.minutes is not None)

    @property
    def random_cases(self) -> int | None:
        """How many; None for as many as the minutes allow."""
        if self.count is not None or self.minutes is not None:
            return self.count
        return 0 if self.cover else _USUAL_COUNT


def run(task: Task) -> int:
    """Soak and print; 0 if every case is within its budget, 1 if one is not or none ran."""
    _check(task)
    device, chosen = device_of(task.device), _chosen(task)
    _check_entry(task, chosen, device)
    if task.log is not None:
        log.check(task.log)
    began = time.monotonic()
    with for_tiny_problems():
        found = _soak(task, chosen, device)
    if task.log is not None:
        log.write(task.log, found.tallies, device, task.seed)
    report = _report_as_json if task.as_json else _report
    report(found, device, task, time.monotonic() - began)
    return 1 if found.failures or not found.ran else 0


def batches(first: int, count: int | None, chosen: list[tuple[str, str]], family: int = FAMILY) -> Iterator[Batch]:
    """Batches of `count` cases from seed `first` on, or without an end: each seed with every operation and backend before the next family begins."""
    left = count
    end = first
    while left is None or left > 0:
        if count is not None and first == end:  # at first, and again where slow cases left some of the count
            end = first + -(-(left or 0) // len(chosen))
        stop = (first // family + 1) * family
        stop = stop if count is None else min(stop, end)
        for operation, backend in chosen:
            seeds = tuple(range(first, stop))
            if is_slow(operation, backend):  # one of a stack
                seeds = tuple(s for s in seeds if s == first or stack_of(s, family) != stack_of(s - 1, family))
            seeds = seeds[:left]
            if seeds:
                yield Batch(operation, backend, seeds, family)
            left = None if left is None else left - len(seeds)
        first = stop


def covering_batches(first: int, chosen: list[tuple[str, str]], device: torch.device, part: str | None = None) -> Iterator[Batch]:
    """A batch for each entry of the covering lists, which are walked side by side; of the same few seeds, whatever a family holds otherwise."""
    first -= first % SEEDS  # of one family
    seeds = tuple(range(first, first + SEEDS))
    for row in itertools.zip_longest(*(_dealt(covering(*pair, device), part) for pair in chosen)):
        for pair, entry in zip(chosen, row, strict=True):
            if entry is not None:
                yield Batch(*pair, seeds, entry=entry.number)


def _dealt(entries: tuple[Entry, ...], part: str | None) -> tuple[Entry, ...]:
    """One part of a covering list; dealt in turns, so that every backend is in every part."""
    if part is None:
        return entries
    number, parts = map(int, part.split("/"))
    return entries[number - 1 :: parts]


def run_batch(batch: Batch, device: str, ends: float | None = None) -> list[Outcome]:
    """The outcomes of a batch, in this process; the first that loses the device is the last. If a backend declines the first cases of a family,
    the others are not tried: each costs a dozen draws. ends: by `time.time()`, which processes share, when no further case begins."""
    outcomes: list[Outcome] = []
    where = torch.device(device)
    entry = None if batch.entry is None else covering(batch.operation, batch.backend, where)[batch.entry]
    for _, stack in itertools.groupby(batch.seeds, lambda seed: stack_of(seed, batch.family)):
        seeds = tuple(stack)
        if ends is not None and time.time() > ends:
            break
        if len(outcomes) >= _ENOUGH_DECLINED and not any(outcome.ran for outcome in outcomes):
            outcomes += [Outcome(batch.operation, batch.backend, seed, False, True) for seed in seeds]
            continue
        outcomes += run_stack(batch.operation, batch.backend, seeds, where, batch.family, entry)
        if outcomes[-1].fatal:
            break
        if device.startswith("cuda") and torch.cuda.memory_reserved(device) > _MOST_KEPT:
            torch.cuda.empty_cache()  # or two dozen processes keep what their largest cases took, and the one after them finds no memory
    return outcomes


def _check(task: Task) -> None:
    if task.count is not None and task.count < 1:
        raise InvalidArgument(f"count is {task.count}; it must be at least 1")
    if task.minutes is not None and not 0 < task.minutes < float("inf"):
        raise InvalidArgument(f"minutes is {task.minutes}; it must be above 0, and finite")
    if task.seed < 0:
        raise InvalidArgument(f"seed is {task.seed}; it must be at least 0")
    if task.family < 1:
        raise InvalidArgument(f"family is {task.family}; it must be at least 1")
    if not 1 <= task.processes <= _MOST_PROCESSES:
        raise InvalidArgument(f"processes is {task.processes}; it must be from 1 to {_MOST_PROCESSES}")
    if task.part is None:
        return
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", task.part)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InvalidArgument(f"part is {task.part!r}; it must be as '2/4', the second of four")
    if not task.covers:
        raise InvalidArgument(
            f"part is {task.part!r} of the covering lists; they are walked with cover or minutes, without an entry"
        )


def _check_entry(task: Task, chosen: list[tuple[str, str]], device: torch.device) -> None:
    if task.entry is None:
        return
    if len(chosen) != 1:
        raise InvalidArgument(
            f"entry is {task.entry} of {len(chosen)} covering lists; name one operation and one backend with it"
        )
    if task.cover or task.minutes is not None:
        raise InvalidArgument(f"entry is {task.entry}, with which neither cover nor minutes may be given")
    entries = len(covering(*chosen[0], device))
    if not 0 <= task.entry < entries:
        raise InvalidArgument(f"entry is {task.entry}; the covering list of {' by '.join(chosen[0])} has 0 to {entries - 1} here")


def _chosen(task: Task) -> list[tuple[str, str]]:
    every = pairs()
    operations, backends = (list(dict.fromkeys(pair[i] for pair in every)) for i in (0, 1))
    for name in task.operations:
        if name not in operations:
            raise InvalidArgument(f"op is {name!r}; allowed are {', '.join(map(repr, operations))}")
    for name in task.backends:
        if name not in backends:
            raise InvalidArgument(f"backend is {name!r}; allowed are {', '.join(map(repr, backends))}")
    found = [(op, b) for op, b in every if op in (task.operations or operations) and b in (task.backends or backends)]
    if not found:
        theirs = list(dict.fromkeys(b for op, b in every if op in task.operations))
        said = f"none of {', '.join(task.operations)} has a backend {' or '.join(task.backends)}"
        raise InvalidArgument(f"{said}; allowed are {', '.join(map(repr, theirs))}")
    return found


def _soak(task: Task, chosen: list[tuple[str, str]], device: torch.device) -> Found:
    found, waiting = Found(), _waiting(task, chosen, device)
    ends = None if task.minutes is None else time.time() + 60 * task.minutes
    found.to_cover = sum(len(_dealt(covering(*pair, device), task.part)) for pair in chosen) if task.covers else 0
    count = None if task.random_cases is None else task.random_cases + found.to_cover * SEEDS
    devices = devices_of(task.device, device)
    with _progress(count, task.minutes) as show:
        for batch, outcomes in _outcomes(waiting, devices, task.processes, ends):
            for outcome in outcomes or ():
                found.add(outcome, device, batch.family, batch.entry)
            if outcomes is None:
                found.failures.append(
                    ("the process died, perhaps in another batch that ran beside this one", command_line(batch, device))
                )
            show(batch, found, len(outcomes or ()))
            if found.lost and task.processes == 1:
                break
    return found


def _waiting(task: Task, chosen: list[tuple[str, str]], device: torch.device) -> Iterator[Batch]:
    """The batches for which a task asks: an entry, or the covering lists and then random cases."""
    if task.entry is not None:
        seeds = tuple(range(task.seed, task.seed + (task.count or SEEDS)))
        return iter([Batch(*chosen[0], seeds, task.family, task.entry)])
    first = covering_batches(task.seed, chosen, device, task.part) if task.covers else ()
    return itertools.chain(first, batches(task.seed, task.random_cases, chosen, task.family))


def _outcomes(
    waiting: Iterator[Batch], devices: tuple[str, ...], processes: int, ends: float | None
) -> Iterator[tuple[Batch, list[Outcome] | None]]:
    """Each batch with its outcomes, until there are no more or the time is over; None where a process died. One process uses the first device."""
    batches_in_time = itertools.takewhile(lambda _: ends is None or time.time() < ends, waiting)
    if processes == 1:
        for batch in batches_in_time:
            yield batch, run_batch(batch, devices[0], ends)
        return
    for _ in range(_MOST_POOLS):
        if not (yield from _of_a_pool(batches_in_time, devices, processes, ends)):
            return
    if next(batches_in_time, None) is not None:
        print(
            f"processes were started {_MOST_POOLS} times and died or lost their device; what is left is not run", file=sys.stderr
        )


def _of_a_pool(
    waiting: Iterator[Batch], devices: tuple[str, ...], processes: int, ends: float | None
) -> Generator[tuple[Batch, list[Outcome] | None], None, bool]:
    """The same of processes that begin now, until one of them dies or loses its device, which is what is returned: a new one has a device again."""
    # spawned: a fork would inherit a CUDA context that it cannot use
    context, lost = multiprocessing.get_context("spawn"), False
    with concurrent.futures.ProcessPoolExecutor(processes, context, begin_on, (devices, context.Value("i", 0))) as pool:
        running = {pool.submit(on_own_device, run_batch, b, ends): b for b in itertools.islice(waiting, processes)}
        while running:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                batch = running.pop(future)
                try:
                    outcomes = future.result()
                except concurrent.futures.process.BrokenProcessPool:
                    yield from [(b, None) for b in (batch, *running.values())]
                    return True
                yield batch, outcomes
                lost |= any(outcome.fatal for outcome in outcomes)
                if not lost:
                    running |= {pool.submit(on_own_device, run_batch, b, ends): b for b in itertools.islice(waiting, 1)}
    return lost


class _progress:
    """A bar on stderr; calling it shows what has just been run, and tells each failure at once: a run that is killed has no report."""

    def __init__(self, count: int | None, minutes: float | None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, transient=True, console=Console(stderr=True))
        self._task = self._bar.add_task("" if minutes is None else f"for {minutes:g} minutes", total=count)
        self._told = 0

    def __enter__(self) -> Callable[[Batch, Found, int], None]:
        self._bar.start()
        return self._show

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def _show(self, batch: Batch, found: Found, cases: int) -> None:
        for said, line in found.failures[self._told :]:
            self._bar.console.print(f"{line}\n    {said}", markup=False, highlight=False, soft_wrap=True)
        self._told = len(found.failures)
        failed = f", {len(found.failures)} failed" if found.failures else ""
        self._bar.update(self._task, advance=cases, description=f"{batch.operation} {batch.backend}{failed}"[:44])


def _report(found: Found, device: torch.device, task: Task, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"random problems against float64 on {describe(device)}, from seed {task.seed}", title_justify="left")
    for column in ("operation", "backend", "cases", "declined", "worst error / budget", "failures"):
        table.add_column(column, overflow="fold")
    for (operation, backend), tally in found.tallies.items():
        failures = f"[red]{tally.failures}[/]" if tally.failures else "0"
        ratio = f"{tally.worst_ratio:.2f}" if tally.cases else ""
        table.add_row(operation, backend, str(tally.cases), str(tally.declined), ratio, failures)
    console.print(table)
    for said, line in found.failures:
        print(f"{line}\n    {said}")
    if found.lost:
        after = "nothing was run after it" if task.processes == 1 else "processes were started anew"
        print(f"a process lost its device in a failure; {after}")
    print(f"{found.ran} cases, {len(found.failures)} failures, {seconds:.0f} s")
    if found.to_cover:
        declined = len(found.covered) - found.entries_ran
        lists = "covering lists" if task.part is None else f"part {task.part} of the covering lists"
        print(f"{lists}: {found.entries_ran:,} of {found.to_cover:,} entries ran, {declined:,} were declined by their backends")
    if not found.ran:
        print("nothing ran: see `saccade info` for the reasons", file=sys.stderr)


def _report_as_json(found: Found, device: torch.device, task: Task, seconds: float) -> None:
    results = [{"operation": op, "backend": backend, **_as_json(tally)} for (op, backend), tally in found.tallies.items()]
    failures = [{"reproduce": line, "what": said} for said, line in found.failures]
    answer = {
        "device": describe(device), "seed": task.seed, "ok": not failures and found.ran > 0, "cases": found.ran, "seconds": round(seconds, 1),
        "device_lost": found.lost, "entries": found.to_cover, "entries_ran": found.entries_ran,
        "entries_declined": len(found.covered) - found.entries_ran, "part": task.part, "results": results, "failures": failures,
    }  # fmt: skip
    print(json.dumps(answer, indent=2))


def _as_json(tally: Tally) -> dict[str, object]:
    # JSON has no infinity, which is the ratio of what is no number or was raised
    return asdict(tally) | {"worst_ratio": tally.worst_ratio if math.isfinite(tally.worst_ratio) else None}
