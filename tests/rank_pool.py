"""Processes that form a process group and run functions of test modules, as ranks of `torch.distributed`.

They are forked from a server that has imported torch once, so a group starts in a second, and they live as long as the tests that
use them: a function takes milliseconds more than its own work.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT = 90  # seconds for one function; a rank that waits for an exchange that never comes fails its test and not the suite


def forking() -> Any:
    """The way of `multiprocessing` to start processes that have imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["saccade.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.debug", "numpy"])
    return context


class RankFailed(AssertionError):
    """A function raised on some rank; the message has the traceback."""


class RankPool:
    """`pool(function, *args)` runs `function(rank, ranks, device, *args)` on every rank and returns their results in order.

    A function is a module-level function of a test file and returns what pickles (no tensors).
    """

    def __init__(self, ranks: int, device_type: str) -> None:
        self.ranks, self.device_type = ranks, device_type
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        context = forking()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            where = (rank, self.ranks, self.device_type, f"{self._folder.name}/store")
            process = context.Process(target=_serve, args=(theirs, *where), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT):
                self.stop()
                raise RankFailed(f"rank {rank} did not answer within {TIMEOUT} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append((False, f"rank {rank} died"))
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(results) if not good]
        if failed:
            # exchanges may be half done
            self.stop()
            raise RankFailed("\n".join(failed))
        return [result for _, result in results]

    def stop(self) -> None:
        """End the processes; the next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []


def _serve(pipe: Any, rank: int, ranks: int, device_type: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    os.environ["SACCADE_NATIVE"] = "0"
    # what runs without a GPU, as users run it: Triton's interpreter, which the suite turns on, would take most of the time
    os.environ.pop("TRITON_INTERPRET", None)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", f"file://{store}", rank=rank, world_size=ranks)
    while True:
        try:
            path, name, args = pipe.recv()
        except (EOFError, OSError):
            break
        torch.manual_seed(1234)
        try:
            answer = (True, getattr(_module(path), name)(rank, ranks, device, *args))
        except BaseException:  # noqa: BLE001 - whatever it is, the test reports it
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _module(path: str) -> Any:
    name = f"ranks_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
