"""A registered name of attention in transformers, and its removal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

from saccade.errors import SaccadeError
from saccade.integrations.refusal import allow_models_that_ignore, refuse_models_that_ignore


class Registration:
    """The handle that `register` returns. As a context manager it unregisters the name at the end of the block.

    Registrations of one name are counted, as those of `saccade.replace_sdpa` are: the newest one left decides what the name runs, and the last one
    removes the name.
    """

    _lock: ClassVar = threading.RLock()
    # of each name the handles that want it, the newest last
    _wanted: ClassVar[dict[str, list[Registration]]] = {}

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        mask: Callable[..., Any],
        registered: set[str],
        undo: Callable[[str], None],
        exact: bool = False,
    ) -> None:
        """registered: the dict that holds the name meanwhile. undo: called with the name once it is removed. exact: whether it computes what "sdpa" does."""
        self._name, self._forward, self._mask, self._registered, self._undo = name, forward, mask, registered, undo
        self._exact = exact
        with self._lock:
            self._put()
            self._wanted.setdefault(name, []).append(self)
            registered.add(name)
        self._active = True

    @property
    def name(self) -> str:
        """The name by which models select it."""
        return self._name

    @property
    def active(self) -> bool:
        """Whether this handle still wants the name."""
        return self._active

    def restore(self) -> None:
        """Give this registration up; with the last one transformers forgets the name. Models that use the name keep it, and transformers refuses to
        run them. Later calls do nothing."""
        from transformers import AttentionInterface, AttentionMaskInterface

        with self._lock:
            if not self._active:
                return
            self._active = False
            handles = self._wanted[self._name]
            handles.remove(self)
            if handles:
                handles[-1]._put()
                return
            del self._wanted[self._name]
            for interface in (AttentionInterface, AttentionMaskInterface):
                interface._global_mapping.pop(self._name, None)
            allow_models_that_ignore(self._name)
            self._registered.discard(self._name)
            self._undo(self._name)

    def _put(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        refuse_models_that_ignore(self._name, self._exact)
        AttentionInterface.register(self._name, self._forward)
        AttentionMaskInterface.register(self._name, self._mask)

    def __enter__(self) -> Registration:
        if not self._active:
            raise SaccadeError(f"the name {self._name!r} was given up; register it again")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<registration of {self._name!r}: {'active' if self._active else 'restored'}>"
