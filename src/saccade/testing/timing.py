"""The one timer: medians with p20 and p80, L2 flushed between runs on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Milliseconds of one call: median, 20th and 80th percentile."""

    p50: float
    p20: float
    p80: float


def measure(call: Callable[[], object], device: torch.device | str = "cuda", warmup_ms: int = 10, repeat_ms: int = 50) -> Timing:
    """Time `call`: on CUDA by device events with a flushed L2 (`triton.testing.do_bench`), elsewhere by the wall clock."""
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        return Timing(*do_bench(call, warmup=warmup_ms, rep=repeat_ms, quantiles=[0.5, 0.2, 0.8]))
    call()
    times: list[float] = []
    ends = time.perf_counter() + repeat_ms / 1e3
    while len(times) < 3 or time.perf_counter() < ends:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    return Timing(*(times[min(len(times) - 1, int(q * len(times)))] for q in (0.5, 0.2, 0.8)))
