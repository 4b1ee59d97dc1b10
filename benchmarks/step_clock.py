"""A clock of the steps of a call: functions, each timed without the other steps inside of it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

Step = tuple[Any, str, str]  # whose function, its name, the name of the step
BESIDE = "steps in other threads, beside these"


class Clock:
    """Nanoseconds of the steps of one call, each without the steps inside of it, in the thread that makes the clock."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self.beside: list[int] = []
        self._inside: list[int] = []  # nanoseconds of steps inside of each that runs
        self._caller = threading.get_ident()

    def timed(self, step: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is timed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            is_caller = threading.get_ident() == self._caller
            if is_caller:
                self._inside.append(0)
            began = time.perf_counter_ns()
            try:
                return work(*args, **kwargs)
            finally:
                taken = time.perf_counter_ns() - began
                if is_caller:
                    self.spent[step] += taken - self._inside.pop()
                    if self._inside:
                        self._inside[-1] += taken
                else:
                    self.beside.append(taken)

        return run

    def timed_generator(self, step: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """A generator whose every item is timed."""

        def run(*args: Any) -> Iterator[Any]:
            items = iter(work(*args))
            following = self.timed(step, lambda: next(items, items))  # itself at its end
            try:
                while (found := following()) is not items:
                    yield found
            finally:
                items.close()

        return run

    @contextmanager
    def watching(self, functions: Iterable[Step], generators: Iterable[Step]) -> Iterator[None]:
        """The functions are timed."""
        with ExitStack() as stack:
            for wrap, steps in ((self.timed, functions), (self.timed_generator, generators)):
                for owner, name, step in steps:
                    stack.enter_context(patch.object(owner, name, wrap(step, getattr(owner, name))))
            yield

    def take(self) -> dict[str, float]:
        """Milliseconds of the steps since the last time."""
        found = {step: x / 1e6 for step, x in self.spent.items()} | ({BESIDE: sum(self.beside) / 1e6} if self.beside else {})
        self.spent.clear()
        self.beside.clear()
        return found
