"""Loading a kernel while a CUDA graph is captured, which the driver refuses unless the thread says that it knows what it does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def loading_allowed(device: torch.device) -> Iterator[None]:
    """The driver loads modules in this thread, capture or not: loading touches no stream, so a graph loses nothing by it."""
    if device.type != "cuda" or not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))  # mode then holds what it was
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # loaded already, by torch
