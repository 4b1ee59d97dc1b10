"""Wall-clock medians for the demo; the benchmark tables have their own, stricter, protocol."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def medians(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Median milliseconds of each call. The calls take turns, so that a machine that slows down slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            elapsed = _once(call, device)
            if turn >= warm_up:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def _once(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return 1e3 * (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
