"""Timers for a single call, for several calls in turns, and by wall clock. The first gives median, p20 and p80, and flushes L2
between runs on a GPU."""

from __future__ import annotations

import random
import statistics
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
    """Time `call`: on CUDA with device events and a flushed L2 (`triton.testing.do_bench`), elsewhere with the wall clock.

    A call longer than both `warmup_ms` and `repeat_ms` is timed three times; p20 and p80 are then the least and the most, and L2
    is not flushed.
    """
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        call()  # the first call may compile
        if _event_times(call, 1)[0] > max(warmup_ms, repeat_ms):
            least, middle, most = sorted(_event_times(call, 3))  # do_bench makes at least eight calls
            return Timing(middle, least, most)
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


def _event_times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` calls."""
    found = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found


def measure_in_turns(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device | str = "cuda",
    warmup_ms: int = 60,
    repeat_ms: int = 20,
) -> dict[str, Timing]:
    """`measure` each call in each of `rounds` rounds, in a new random order each time; the median over the rounds of each number.

    So a short disturbance of the machine, or the call that ran just before, favours no call. A GPU's clock follows the power of
    the last tens of milliseconds, which `warmup_ms` spends on the call itself.
    """
    found: dict[str, list[Timing]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            found[name].append(measure(calls[name], device, warmup_ms, repeat_ms))
    return {name: Timing(*map(statistics.median, zip(*timings, strict=True))) for name, timings in found.items()}


def throughput_in_turns(
    calls: dict[str, Callable[[], object]], device: torch.device | str, rounds: int = 5, window_ms: float = 20
) -> dict[str, Timing]:
    """Wall-clock milliseconds per call for calls made one after another, as a program makes them. So host time counts if the device
    waits for it. Each call gets its own window in each round, in a new random order; median, least and most over the rounds. Caches
    are not flushed.
    """
    device = torch.device(device)
    counts = {}
    for name, call in calls.items():
        call()  # the first call may compile
        counts[name] = max(3, int(window_ms / max(_once(call, device), 1e-3)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            _wait(device)
            start = time.perf_counter()
            for _ in range(counts[name]):
                calls[name]()
            _wait(device)
            found[name].append(1e3 * (time.perf_counter() - start) / counts[name])
    return {name: Timing(statistics.median(times), min(times), max(times)) for name, times in found.items()}


def kernel_time(call: Callable[[], object], device: torch.device | str) -> float | None:
    """Milliseconds that the kernels of a call take, one after another, as a profiler sees them; None on a CPU.

    Together with the wall clock it shows whether the host or the device limits a call.
    """
    if torch.device(device).type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    call()
    _wait(torch.device(device))
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        _wait(torch.device(device))
    return sum(event.self_device_time_total for event in seen.key_averages()) / 1e3


def take_turns(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Median wall-clock milliseconds of each call, measured in turns, so that a slower machine slows all of them."""
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
