"""Memory between two pages that cannot be read, and a child process for kernels that may read beyond it."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(count: int, dtype: torch.dtype, side: str) -> Tensor:
    """So many numbers that end right before such a page ("behind"), or begin right behind one ("before")."""
    size = count * dtype.itemsize
    inside = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, inside + 2 * PAGE)
    numbers = torch.frombuffer(memory, dtype=dtype, count=count, offset=PAGE + (inside - size if side == "behind" else 0))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # 0: no access
    for place in (start, start + PAGE + inside):
        assert not _mprotect(place, PAGE, 0), os.strerror(ctypes.get_errno())
    return numbers


def ends_well(run: Callable[[], None]) -> bool:
    """Whether a child process survives the call."""
    child = os.fork()
    if not child:
        code = 1
        faulthandler.disable()  # the parent says that it ended
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
