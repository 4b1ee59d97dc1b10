"""Allows loading a kernel during CUDA graph capture, which the driver refuses unless the thread switches to the relaxed capture
mode."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def loading_allowed(device: torch.device) -> Iterator[None]:
    """A context in which this thread may load modules even during capture. This is safe because loading uses no stream."""
    if device.type != "cuda" or not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))  # afterwards mode holds the previous mode
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # loaded already, by torch
