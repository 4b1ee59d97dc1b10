"""Processes that make the units of `everything.py`, one after another. A worker is this file as a program; its end of the pipe is `work`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

MODULES = {"prepare": "lra", "clock": "language", "mqar": "train"}  # of programs that have another name


class Worker:
    """A process on a GPU, or on the CPU (None); it begins when there is something to make. errors: a file of what libraries print."""

    def __init__(self, gpu: int | None, threads: int, errors: Path) -> None:
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        if gpu is not None:
            self.environment["CUDA_VISIBLE_DEVICES"] = _device(gpu)
        self.errors = errors
        self.process: subprocess.Popen[str] | None = None

    def do(self, program: str, arguments: list[str], log: Path) -> int:
        """Call the `main` of a program in the process; its exit code, -1 if the process died."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._begun()
        task = {"program": program, "arguments": arguments, "log": str(log)}
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else -1

    def _begun(self) -> subprocess.Popen[str]:
        self.errors.parent.mkdir(parents=True, exist_ok=True)
        with open(self.errors, "a") as handle:
            return subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=handle, text=True,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def end(self) -> None:
        """Kill it and what it has started."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _device(gpu: int) -> str:
    """The name of the gpu-th of the devices that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)


def run_unit(program: str, arguments: list[str], log: Path) -> int:
    """Call the `main` of a program in this process; what it prints goes to the log. Its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as handle, contextlib.redirect_stdout(handle), contextlib.redirect_stderr(handle):
        try:
            return importlib.import_module(MODULES.get(program, program)).main(arguments)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        except Exception:  # noqa: BLE001  # of any kind, since the next unit has another process
            traceback.print_exc()
            return 1


def work() -> int:
    """Make the units that come as lines of JSON, and answer each with its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    import torch  # takes seconds, in which the parent may be killed

    for line in sys.stdin:
        task = json.loads(line)
        code = run_unit(task["program"], task["arguments"], Path(task["log"]))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        answers.write(json.dumps(code) + "\n")
        answers.flush()
        if code:  # after an error of CUDA a process is of no use
            return 1
    return 0


def _end_with(parent: int) -> None:
    """End this process as soon as its parent is gone: the next command may make the same unit."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(work())
