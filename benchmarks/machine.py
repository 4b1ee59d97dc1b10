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
    """The commit of this checkout, "-dirty" behind it if code of saccade differs from it; or the version that is installed."""
    if not in_checkout():
        return f"v{saccade.__version__}"
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(HERE.parent), *asked], capture_output=True, text=True, check=False).stdout.strip()
            for asked in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", "src"))
        )
    except OSError:
        return "unknown"
    return head + "-dirty" * bool(changes) if head else "unknown"


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
