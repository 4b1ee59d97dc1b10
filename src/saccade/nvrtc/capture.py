"""The facts of CUDA graph capture that a launch needs. The driver refuses to load kernels during a capture unless the thread switches to the relaxed
mode. Each capture has a number. torch's compiler refuses tensors that stay alive in its own graphs' memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
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


def capture_id(device: torch.device) -> int:
    """The number of the capture that the current stream is part of, unlike that of any other in the process; 0 for none."""
    if device.type != "cuda" or not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return 0
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    failed = _driver().cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return 0 if failed else number.value


def in_compilers_graph(device: torch.device) -> bool:
    """Whether `torch.compile(mode="reduce-overhead")` records a CUDA graph in this thread, or warms up for one. It raises if memory of its pool stays
    alive without being an output."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    try:
        manager = trees.get_manager(device.index or 0, create_if_none_exists=False)
    except AssertionError:  # a thread that torch's compiler knows nothing of
        return False
    # both run on its own stream; its states change only behind a record, in torch 2.11 to 2.13
    return manager is not None and torch.cuda.current_stream(device) == manager.stream


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # loaded already, by torch
