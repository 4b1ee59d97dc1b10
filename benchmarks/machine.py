"""The machine and the versions with which rows are measured."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
from pathlib import Path

import torch

import saccade
from saccade.hardware import package_version

HERE = Path(__file__).resolve().parent


def in_checkout() -> bool:
    """Whether these files are those of a checkout, and not of an installed package."""
    return (HERE.parent / "src" / "saccade").is_dir()


def commit() -> str:
    """The commit of this checkout, or the version that is installed."""
    if not in_checkout():
        return f"v{saccade.__version__}"
    try:
        asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def _cpu() -> str:
    """Model and number of usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        models = [
            line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
    except OSError:
        models = []
    return f"{models[0] if models else platform.machine()}, {cores} cores"


@functools.cache
def machine() -> dict[str, str]:
    """The columns that say where and with what a row was measured."""
    driver = "unknown"
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        pass
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "torch": torch.__version__,
        "triton": package_version("triton") or "none",
        "driver": driver,
        "commit": commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
