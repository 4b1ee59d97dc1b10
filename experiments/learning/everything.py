"""Makes every run of `train.py --preset paper`, `language.py`, `needle.py`, `mlm.py` and `lra.py`, side by side over several GPUs and in
pieces.

    python experiments/learning/everything.py --list                                             # the plan, with predicted seconds
    python experiments/learning/everything.py --data out/corpus --gpus 2 --slots 3 --minutes 9 --pack out/state.tgz
    python experiments/learning/everything.py --unpack out/state.tgz --data out/corpus ...       # go on, on another machine too
    python experiments/learning/everything.py --known benchmarks/results/h100 --data out/corpus ...    # only what is not whole there
    python experiments/learning/everything.py --quick                                            # everything at tiny size, a CPU

A unit is one run: a program, a size or task, a method and a seed (MQAR trains its seeds side by side). Each has a folder of its own in
--state with its CSV, its log and its checkpoint. A command makes the units that are not whole, the dense ones of the first seed first: where
one of them has not learned its task, it says so, and the other units of the task go last. Then come those that begin with weights that are
there, then the longest. At the end of --minutes units that write checkpoints do so, the others are cut and begin anew; after a kill, too, the
same command goes on. A unit that fails is made once more without compiled parts or CUDA graphs, whichever its log speaks of, and not a third
time unless --again is given; after three such failures for one reason all units are made without it.

With several processes on a GPU the time of a step means nothing, so the merged CSVs have none (nan) but that of `language.py --clock`, whose
units run alone on their GPU. `results/` has the merged CSVs, of whole runs alone. --known takes such CSVs apart again, where a state is
lost: units that are whole in them with the plan's settings are not repeated, and stand in `results/` with the new ones. If other units begin
with the weights of a unit, those weights are lost too. So the unit is repeated if one of the others is missing, and until then the unit is
not in `results/`.

Here are the command line and its tables. `units.py` has the plan and the predictions, `scheduler.py` what comes next, `workers.py` the
processes, `state.py` the folder, `outcomes.py` what is whole, learned or failed, `merging.py` the CSVs in `results/`, `packing.py` --pack.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

from captured import add_plain
from merging import merge, spread
from packing import pack, unpack
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scheduler import Scheduler
from state import State
from units import PROGRAMS, units_of
from workers import Worker

MIB = 2**20


def make_all(scheduler: Scheduler, workers: list[tuple[int, Worker]]) -> None:
    """Make units until none is left or the minutes are over. workers: each with its GPU."""
    units, is_whole = scheduler.state.units, scheduler.state.is_whole
    threads = [threading.Thread(target=scheduler.serve, args=pair, daemon=True) for pair in workers]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=scheduler.console) as progress:
            bar = progress.add_task("of the predicted time", total=sum(u.seconds for u in units))
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and time.monotonic() < scheduler.deadline:
                running = " · ".join(u.name for u in list(scheduler.running))
                progress.update(
                    bar, completed=sum(u.seconds for u in units if is_whole(u)), description=running[:100] or "waiting"
                )
                time.sleep(0.5)
    finally:
        scheduler.stop()
        for _, worker in workers:
            worker.end()
        for thread in threads:
            if thread.ident is not None:
                thread.join(20)


def report(scheduler: Scheduler) -> Table:
    """For each kind of unit: how many are whole, how fast a step was, and the minutes that are left."""
    state, total = scheduler.state, 0.0
    table = Table(title="what is whole and what is left")
    for name in ("units", "whole", "failed", "ms a step", "over predicted", "GPU min left"):
        table.add_column(name)
    for program, group in dict.fromkeys((u.program, u.group) for u in state.units):
        own = [u for u in state.units if (u.program, u.group) == (program, group)]
        whole = [u for u in own if state.is_whole(u)]
        failed = [u for u in own if state.has_failed(u) and u not in whole]
        factor = scheduler.factor(program)
        left = sum(u.seconds for u in own if u not in whole) * factor / 60
        total += left
        paces = [1000 * state.seconds(u) / u.steps for u in whole if u.steps and state.seconds(u)]
        pace = f"{sum(paces) / len(paces):.1f}" if paces else "-"
        name = group if program in group or program in ("lra", "mlm") else f"{program} {group}"
        measured = f"{factor:.2f}" if any(map(state.seconds, whole)) else "-"
        table.add_row(name, f"{len(whole)} of {len(own)}", str(len(failed)), pace, measured, f"{left:.1f}")
    table.caption = (
        f"{total:.0f} GPU minutes are left, {total / scheduler.gpus:.0f} on {scheduler.gpus}; "
        "a step's time is the wall clock over the slots, starts and tests included"
    )
    return table


def plan_table(state: State) -> Table:
    """Every unit, and its predicted seconds."""
    table = Table("unit", "steps", "predicted seconds, alone on an H100", "state", title="the plan")
    for unit in state.units:
        what = "whole" if state.is_whole(unit) else "left"
        table.add_row(f"{unit.program} {unit.name}", str(unit.steps or "-"), f"{unit.seconds:.0f}", what)
    programs = dict.fromkeys(u.program for u in state.units)
    minutes = {p: sum(u.seconds for u in state.units if u.program == p) / 60 for p in programs}
    each = ", ".join(f"{program} {predicted:.1f}" for program, predicted in minutes.items())
    table.caption = f"{each}: {sum(minutes.values()):.0f} GPU minutes predicted"
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
    parser.add_argument(
        "--known", type=Path, help="folder of merged CSVs, such as benchmarks/results/h100, whose runs are not made again"
    )
    return parser.parse_args(arguments)


def state_of(options: argparse.Namespace) -> State:
    """The state as the command finds it; says what is wrong with the command."""
    if min(options.gpus, options.slots, options.part) < 1:
        raise ValueError("--gpus, --slots and --part must be at least 1")
    root = options.state or Path("out/everything-quick" if options.quick else "out/everything")
    if options.unpack:
        unpack(options.unpack, root)
    programs = tuple(p for p in PROGRAMS if p in (options.only or PROGRAMS))
    reads_corpus = not options.quick and programs != ("mqar",)
    if reads_corpus and not options.list and not (options.data / "corpus.json").is_file():
        raise ValueError(
            f"{options.data} holds no corpus.json; `python experiments/learning/corpus.py --fetch --out {options.data}` makes it"
        )
    state = State(root.resolve(), units_of(options.quick, programs), options.data.resolve())
    if options.known:
        take_known(state, options.known)
    return state


def take_known(state: State, folder: Path) -> None:
    """Read what is whole in a folder of merged CSVs, and say how much that is."""
    known, left = spread(state, folder)
    state.repair()  # the plan, too, should show which are made again
    print(f"{len(known)} units are whole in {folder}")
    again = [unit for unit in known if not state.is_whole(unit)]
    for units, why in ((left, "left out, as rows are missing or have other settings"), (again, "made here all the same")):
        if units:
            print(f"{why}: {', '.join(f'{unit.program} {unit.name}' for unit in units)}")


def workers_of(options: argparse.Namespace, state: State) -> list[tuple[int, Worker]]:
    """A worker for each slot, with its GPU; the first slot of every GPU comes first."""
    threads = max(1, (os.cpu_count() or 1) // (options.gpus * options.slots))
    places = [(gpu, slot) for slot in range(options.slots) for gpu in range(options.gpus)]
    logs = state.root / "logs"
    return [(gpu, Worker(None if options.quick else gpu, threads, logs / f"{gpu}-{slot}.txt")) for gpu, slot in places]


def conclude(scheduler: Scheduler, options: argparse.Namespace) -> None:
    """Merge and pack, and say what there is."""
    console, made = scheduler.console, merge(scheduler.state)
    console.print(report(scheduler))
    for path in made:
        console.print(f"rows in {path}", soft_wrap=True)
    if options.pack:
        parts = pack(scheduler.state, options.pack, options.part * MIB, options.limit * MIB)
        console.print("packed: " + ", ".join(f"{p} ({p.stat().st_size / MIB:.1f} MiB)" for p in parts), soft_wrap=True)


def main(arguments: list[str]) -> int:
    """Make what is left; returns an exit code, 3 where something failed."""
    options, console = parse(arguments), Console()
    try:
        state = state_of(options)
    except ValueError as error:
        print(f"everything.py: {error}", file=sys.stderr)
        return 2
    if options.list:
        console.print(plan_table(state))
        return 0
    scheduler = Scheduler(
        state, options.gpus, options.slots, options.minutes, console, last=options.last, plain=options.plain, again=options.again
    )
    try:
        make_all(scheduler, workers_of(options, state))
    finally:
        conclude(scheduler, options)
    return 3 if any(state.has_failed(u) and not state.is_whole(u) for u in state.units) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
