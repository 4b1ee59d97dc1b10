"""Locks that are free in a forked child: a fork waits for the threads that hold one.

A lock that another thread holds at a fork would stay held in the child. If the child ignored it, it would find a half-updated state.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_PATIENCE = 60.0  # seconds; a thread that holds a lock for longer may itself wait for the forking thread
_locks: WeakSet[Any] = WeakSet()
_adding = threading.RLock()  # for `_locks` itself
_forking = threading.local()  # `held`: the locks that this thread has taken for a fork


def lock() -> Any:
    """A new `threading.RLock`."""
    found = threading.RLock()
    with _adding:
        _locks.add(found)
    return found


def _take() -> None:
    _adding.acquire()
    _forking.held = [_adding]
    for x in sorted(_locks, key=id):  # in a fixed order, because another thread may fork too
        if x.acquire(timeout=_PATIENCE):
            _forking.held.append(x)


def _release() -> None:
    for x in _forking.held:
        x.release()
    _forking.held = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_release, after_in_child=_release)
