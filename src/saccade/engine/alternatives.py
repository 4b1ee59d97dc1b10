"""Finds the launchers of a backend by the name that ops carry, and a replacement if a kernel that `auto` chose does not compile.

A backend requested by its name ("short") runs or raises. One that `auto` chose ("auto:short") is replaced on failure: if NVRTC
failed, first by its own variants that need no NVRTC, then by the next backend of its chain. Dispatch then skips it for calls of
that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from saccade.engine import prepare
from saccade.engine.backend import Backend
from saccade.engine.tracing import load
from saccade.errors import CompileError
from saccade.launch.disabled import FAILURES, disable, failure_of
from saccade.native.recording import restart
from saccade.nvrtc import give_up


class Alternatives:
    """The launchers of one operation.

    following: names of the backends that take over, in order. reference: launchers of the reference.
    join: `(alternatives, chain) -> launchers`, whose entries try the backends of a chain in turn (`attempt`).
    """

    def __init__(
        self,
        operation: str,
        backends: tuple[Backend, ...],
        following: tuple[str, ...],
        reference: Any,
        join: Callable[[Alternatives, tuple[str, ...]], Any],
    ):
        self.operation, self.following, self.join = operation, following, join
        self._backends = {backend.name: backend for backend in backends}
        self._reference = reference
        self._known: dict[str, Any] = {}

    def launchers(self, name: str) -> Any:
        """The launchers of the backend `name`. With "auto:" before the name they fall back to other backends."""
        found = self._known.get(name)
        if found is None:
            by_auto, _, own = name.rpartition(":")
            chain = (own, *(other for other in self.following if other != own))
            found = self._known[name] = self.join(self, chain) if by_auto else self.of(own)
        return found

    def of(self, name: str) -> Any:
        """The launchers of one backend, which runs or raises."""
        backend = self._backends[name]
        return self._reference if backend.is_reference else load(backend)

    def attempt(self, chain: tuple[str, ...], query: Tensor, key: Tensor, run: Callable[[Any], Any]) -> Any:
        """`run(launchers)` with the first backend of the chain whose kernels compile."""
        for name, following in zip(chain, (*chain[1:], None), strict=True):
            what = (self.operation, name, tuple(query.shape), tuple(key.shape), query.dtype)
            if following is not None and failure_of(what):
                continue
            try:
                return _with_or_without_nvrtc(self.of(name), run)
            except FAILURES as error:
                if following is None:
                    raise
                disable(what, f"backend {following!r}", error)
                prepare.forget()
                restart()
        raise AssertionError("the last of a chain runs or raises")


def _with_or_without_nvrtc(found: Any, run: Callable[[Any], Any]) -> Any:
    try:
        return run(found)
    except CompileError as error:
        if not give_up(error):
            raise
        prepare.forget()
        restart()
        return run(found)
