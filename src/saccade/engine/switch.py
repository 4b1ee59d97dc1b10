"""Whether kernels of ours may run in this process: the switch with which a user finds out whether one of them is at fault."""

from __future__ import annotations

import threading

from saccade import env

REASON = "saccade is disabled (SACCADE_DISABLE=1, or saccade.disabled())"
_lock = threading.Lock()
# of `saccade.disabled()` that run now, in any thread; the environment is read once, as every choice of a kernel asks
_blocks = 1 if env.disabled() else 0


def is_disabled() -> bool:
    """Whether only torch's operations run."""
    return _blocks > 0


def change(by: int) -> None:
    """One block more, or one less."""
    global _blocks
    with _lock:
        _blocks += by
