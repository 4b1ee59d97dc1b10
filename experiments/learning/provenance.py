"""The columns that say where and with what a row was made."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import machine


@functools.cache
def provenance(device: str) -> tuple[str, ...]:
    """The last columns of every CSV of a training: device, torch, triton, driver, commit and date."""
    found = machine()
    gpu = found["gpu"] if device.startswith("cuda") else "cpu"
    return gpu, found["torch"], found["triton"], found["driver"], found["commit"], found["date"]
