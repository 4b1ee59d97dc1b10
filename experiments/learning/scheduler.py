"""The choice of the unit of `everything.py` that is made next, and the outcome of each."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from pathlib import Path

from outcomes import cause_of, has_learned, last_line
from rich.console import Console
from rich.markup import escape
from state import State
from units import Unit
from workers import Worker

MARGIN = 20  # seconds that a checkpoint may take
ENDING = 5  # seconds that a unit without checkpoints is left to end


class Scheduler:
    """Hands units to workers. slots: units side by side on a GPU. minutes: of the command; 0: until everything is whole. last: after this
    command the machine is gone, so that nothing is begun which does not end. plain: of every unit, as `--plain`. again: units that failed
    twice are tried once more."""

    def __init__(
        self, state: State, gpus: int, slots: int, minutes: float, console: Console, *,
        last: bool = False, plain: str | None = None, again: bool = False,
    ) -> None:  # fmt: skip
        self.state, self.gpus, self.slots, self.console = state, gpus, slots, console
        self.deadline = time.monotonic() + 60 * minutes if minutes else math.inf
        self.last, self.plain, self.again = last, plain, again
        self.stopped = False
        self.running: dict[Unit, int] = {}  # on which GPU
        self.tried: set[Unit] = set()
        self.causes: Counter[str] = Counter()  # of failures
        self.hopeless: set[str] = set()  # groups
        self.changed = threading.Condition()
        self.based: Counter[Unit] = Counter()  # seconds of the units that begin with the weights of one
        for unit in state.units:
            if unit.base:
                self.based[unit.base] += unit.seconds
        state.repair()
        for unit in state.units:
            self._judge(unit)

    def serve(self, gpu: int, worker: Worker) -> None:
        """Make units in a slot of a GPU until there is none for it. An error here, such as a full disk, stops the other slots, which would wait for
        this unit."""
        try:
            while (unit := self.take(gpu)) is not None:
                self.make(unit, worker)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Hand out no more: the processes that are still at work are about to be killed."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def take(self, gpu: int) -> Unit | None:
        """The next unit for a slot of a GPU; waits while others may make one ready, and None when there is none."""
        with self.changed:
            while not self.stopped:
                left = [u for u in self.state.units if self._is_left(u)]
                chosen = min(self._fitting(gpu, left), key=self._order, default=None)
                if chosen is not None:
                    self.running[chosen] = gpu
                    self.tried.add(chosen)
                    return chosen
                if not left or not self.running or time.monotonic() > self.deadline:
                    return None
                self.changed.wait(1)
            return None

    def _is_left(self, unit: Unit) -> bool:
        if unit in self.tried or self.state.is_whole(unit) or (self.state.has_failed(unit) and not self.again):
            return False
        # examples are drawn only where a unit wants them
        return unit.program != "prepare" or any(u.needs == unit and not self.state.is_whole(u) for u in self.state.units)

    def _fitting(self, gpu: int, left: list[Unit]) -> list[Unit]:
        """The units that may begin now beside those that run on the GPU; one that runs alone waits until the others are made."""
        here = [u for u, where in self.running.items() if where == gpu]
        if any(u.alone for u in here):
            return []
        now = time.monotonic()
        factors = {program: self.factor(program) for program in {u.program for u in left}}
        ready = [u for u in left if self._is_ready(u) and self._is_in_time(u, now, factors[u.program])]
        return [u for u in ready if not u.alone] or ([] if here else ready)

    def _is_ready(self, unit: Unit) -> bool:
        return all(self.state.is_whole(u) and u not in self.running for u in (unit.base, unit.needs) if u)

    def _is_in_time(self, unit: Unit, now: float, factor: float) -> bool:
        seconds = self.deadline - now - (MARGIN if unit.cut else ENDING)
        if unit.cut and not self.last:
            return seconds > 0
        return unit.seconds * (1 if unit.alone else self.slots) * factor <= seconds

    def factor(self, program: str) -> float:
        """How many times as long as predicted units of a program have taken of a GPU."""
        known = [u for u in self.state.units if u.program == program and self.state.is_whole(u) and self.state.seconds(u)]
        predicted = sum(u.seconds for u in known)
        return sum(self.state.seconds(u) for u in known) / predicted if predicted else 1.0

    def _order(self, unit: Unit) -> tuple[bool, int, float]:
        first = 0 if unit.program == "prepare" else 1 if unit.probe else 2 if unit.base else 3
        return unit.group in self.hopeless, first, -unit.seconds - self.based[unit]

    def make(self, unit: Unit, worker: Worker) -> None:
        """Make a unit and note what became of it."""
        about, log = self.state.about(unit), self.state.log(unit)
        plain = self.plain or about.get("cause")
        # before it, too: a command may be killed
        self.state.note(unit, slots=max(1 if unit.alone else self.slots, about.get("slots", 1)))
        began = time.monotonic()
        code = worker.do(unit.program, self.state.command(unit, self._minutes(began), plain), log)
        seconds = time.monotonic() - began
        with self.changed:
            del self.running[unit]
            self.state.note(unit, seconds=round(about.get("seconds", 0) + seconds, 1), plain=plain)
            if code == 0:
                self._ended(unit, seconds)
            elif code != -1 or not self.stopped:
                self._failed(unit, code, log)
            self.changed.notify_all()

    def _minutes(self, now: float) -> float:
        """Until a checkpoint must begin; 0: never."""
        return max(1e-6, (self.deadline - now - MARGIN) / 60) if self.deadline < math.inf else 0.0

    def _ended(self, unit: Unit, seconds: float) -> None:
        what = "whole" if self.state.is_whole(unit) else "cut"
        self.console.print(f"{unit.program:8} {unit.name:32} {what:6}{seconds:7.1f} s", highlight=False)
        self._judge(unit)

    def _failed(self, unit: Unit, code: int, log: Path) -> None:
        failures, cause = self.state.about(unit).get("failures", 0), cause_of(log)
        self.state.note(unit, failures=failures + 1, cause=cause)
        if not failures:
            self.tried.discard(unit)
        self.console.print(f"[red]{unit.program} {unit.name} failed ({code})[/]: {escape(last_line(log))}")
        self.causes[cause] += 1
        if self.causes[cause] == 3 and not self.plain:
            self.plain = cause
            self.console.print(f"[bold red]three units failed: from here on --plain {cause}[/]")

    def _judge(self, unit: Unit) -> None:
        """Say it where dense attention has learned nothing."""
        if not unit.probe or unit.quick or unit.group in self.hopeless or not self.state.is_whole(unit):
            return
        if not has_learned(unit, self.state.rows(unit)):
            self.hopeless.add(unit.group)
            self.console.print(
                f"[bold red]{unit.group}: dense attention has not learned it[/]; the other runs go last and say nothing"
            )
