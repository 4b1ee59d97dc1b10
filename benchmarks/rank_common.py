"""The parts that tables with several processes share: starting ranks, and timing a call that all ranks make together."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from saccade.testing.timing import Timing


def on_ranks(function: Callable[..., Any], ranks: int, device_type: str, *args: Any) -> Any:
    """`function(rank, device, *args)` on every rank of a process group, NCCL or gloo; returns what rank 0 returns."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        started = [
            context.Process(target=_rank, args=(function, rank, ranks, device_type, where, answers, args))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        failed = _first_failures(started)
        for process in started:
            if failed:  # the others may wait for an exchange that never comes
                process.terminate()
            process.join()
    if failed:
        raise RuntimeError(f"ranks {failed} failed; their errors are above")
    return answers.get()


def counts_of(ranks: int) -> list[int]:
    """The counts among 1, 2, 4 and 8 for which a machine has enough ranks."""
    if ranks < 1:
        raise RuntimeError("torch sees no GPU here; a table of ranks needs one at least")
    return [count for count in (1, 2, 4, 8) if count <= ranks]


def first_ranks(count: int) -> Any:
    """The group of the first ranks. Every rank calls it, those outside too."""
    return dist.new_group(list(range(count)))


def _first_failures(processes: list[Any]) -> list[int]:
    """The ranks that have failed by the time the first does; empty once all have ended well."""
    left = {process.sentinel: process for process in processes}
    while left:
        for sentinel in multiprocessing.connection.wait(list(left)):
            left.pop(sentinel).join()
        if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
            return failed
    return []


def _rank(function: Callable[..., Any], rank: int, ranks: int, device_type: str, where: str, answers: Any, args: tuple) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", where, rank=rank, world_size=ranks)
    found = function(rank, device, *args)
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def in_turns(
    steps: dict[tuple[str, str], Callable[[], object] | None], device: torch.device, repeats: int
) -> dict[tuple[str, str], Timing]:
    """Milliseconds of each step, begun by all ranks at a barrier; of each repeat the slowest rank counts. None: the rank waits.

    The steps take turns, in an order drawn anew each time, the same on every rank: a GPU that has multiplied for a second has a lower
    clock, so that who is timed first would look fast. The number of repeats is fixed: ranks that measured until a time is up would not
    call equally often.
    """
    for step in steps.values():
        for _ in range(2 if step else 0):  # the first call may compile
            step()
    found: dict[tuple[str, str], list[float]] = {name: [] for name in steps}
    drawn = random.Random(0)
    for _ in range(repeats):
        for name in drawn.sample(list(steps), len(steps)):
            found[name].append(_slowest(steps[name], device))
    return {name: _summary(sorted(times)) for name, times in found.items()}


def in_turns_made(
    makers: dict[str, Callable[[], dict[str, Callable[[], object]]] | None],
    directions: tuple[str, ...],
    device: torch.device,
    repeats: int,
) -> dict[tuple[str, str], Timing]:
    """`in_turns` for backends that do not fit into memory side by side: `makers` make the steps of a turn, which are gone after it. The
    maker makes a warm-up call in every turn. None: the rank waits."""
    found: dict[tuple[str, str], list[float]] = {(name, direction): [] for name in makers for direction in directions}
    drawn = random.Random(0)
    for _ in range(repeats):
        for name in drawn.sample(list(makers), len(makers)):
            if device.type == "cuda":
                torch.cuda.empty_cache()
            maker = makers[name]
            steps = maker() if maker else {}
            for direction in directions:
                found[name, direction].append(_slowest(steps.get(direction), device))
            del steps
    return {name: _summary(sorted(times)) for name, times in found.items()}


def _slowest(call: Callable[[], object] | None, device: torch.device) -> float:
    _finish(device)
    dist.barrier()
    _finish(device)
    begin = time.perf_counter()
    if call:
        call()
    _finish(device)
    took = torch.tensor(1e3 * (time.perf_counter() - begin), device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(times: list[float]) -> Timing:
    return Timing(*(times[min(len(times) - 1, int(q * len(times)))] for q in (0.5, 0.2, 0.8)))
