"""What tables with several processes share: starting ranks, and timing a call that all ranks make together."""

from __future__ import annotations

import multiprocessing
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
        for process in started:
            process.join()
    failed = [rank for rank, process in enumerate(started) if process.exitcode]
    if failed:
        raise RuntimeError(f"ranks {failed} failed; their errors are above")
    return answers.get()


def _rank(function: Callable[..., Any], rank: int, ranks: int, device_type: str, where: str, answers: Any, args: tuple) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", where, rank=rank, world_size=ranks)
    found = function(rank, device, *args)
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def together(call: Callable[[], object], device: torch.device, repeats: int) -> Timing:
    """Milliseconds of a call of all ranks, each begun at a barrier; of each repeat the slowest rank counts.

    The number of repeats is fixed: ranks that measured until a time is up would not call equally often.
    """
    return _summary(_slowest(call, device, repeats))


def alone(call: Callable[[], object] | None, device: torch.device, repeats: int) -> Timing:
    """The same of a call that one rank makes while the others, which pass None, wait."""
    return _summary(_slowest(call or (lambda: None), device, repeats))


def _slowest(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    for _ in range(2):  # the first call may compile
        call()
    found = []
    for _ in range(repeats):
        _finish(device)
        dist.barrier()
        _finish(device)
        begin = time.perf_counter()
        call()
        _finish(device)
        took = torch.tensor(1e3 * (time.perf_counter() - begin), device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(took.item())
    return sorted(found)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(times: list[float]) -> Timing:
    return Timing(*(times[min(len(times) - 1, int(q * len(times)))] for q in (0.5, 0.2, 0.8)))
