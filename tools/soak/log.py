"""The log of a soak: a CSV to which each run adds its rows, one for an operation and backend."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.machine import machine
from saccade import __version__
from saccade.cli.device import describe
from saccade.errors import InvalidArgument
from tools.soak.results import Tally

COLUMNS = (
    "date", "operation", "backend", "cases", "declined", "failures", "worst_ratio", "seconds", "seed", "device", "saccade", "torch",
    "triton", "cuda", "python", "driver", "commit",
)  # fmt: skip


def check(path: Path) -> None:
    """Raise unless rows can be added to `path`; asked before a run, which may take an hour.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def write(path: Path, tallies: Mapping[tuple[str, str], Tally], device: torch.device, seed: int) -> None:
    """Add the rows of one run to `path`, which is made if it is not there.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    about = (seed, describe(device), *_versions(), *(machine()[name] for name in ("driver", "commit")))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        fresh = not path.exists() or not path.stat().st_size
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if fresh:
                rows.writerow(COLUMNS)
            for (operation, backend), t in tallies.items():
                counted = (t.cases, t.declined, t.failures, f"{t.worst_ratio:.3f}", f"{t.seconds:.1f}")
                rows.writerow((date, operation, backend, *counted, *about))
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"log is {str(path)!r}, which cannot be written: {error.strerror or error}")


def _versions() -> tuple[str, ...]:
    """The versions of saccade, torch, Triton, the CUDA that torch was built for, and Python; empty if there is none."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return __version__, torch.__version__, triton, torch.version.cuda or "", platform.python_version()
