"""A setting that `with` blocks change for the whole process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


class Setting:
    """`on` is the value of the newest open block in any thread, and False without one. Blocks of several threads overlap, so none can restore the
    value that it found."""

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.Lock()
        self._running: list[list[bool]] = []

    @contextlib.contextmanager
    def block(self, on: bool) -> Iterator[None]:
        """A block that sets `on`."""
        mine = [on]  # a list, because entries are compared by identity
        with self._alone():
            self._running = [*self._running, mine]
            self.on = on
        try:
            yield
        finally:
            with self._alone():
                self._running = [block for block in self._running if block is not mine]
                self.on = self._running[-1][0] if self._running else False

    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        # torch.compile cannot trace a lock, and a graph changes nothing outside itself
        return contextlib.nullcontext() if torch.compiler.is_compiling() else self._lock
