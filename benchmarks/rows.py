"""One measurement, one CSV row."""

from __future__ import annotations

import csv
import datetime
import functools
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import torch

import saccade
from saccade.hardware import package_version

HERE = Path(__file__).resolve().parent
Case = TypeVar("Case")


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


@dataclass
class Row:
    """`backend` is ours or a peer, `direction` fwd, bwd or fwd+bwd, `note` "kernel" on a kernel-only row."""

    table: str
    problem: str
    backend: str
    direction: str
    dtype: str
    ms_p50: float | str
    ms_p20: float | str
    ms_p80: float | str
    roof_ms: float | str = ""
    tflops: float | str = ""
    error_ratio: float | str = ""
    note: str = ""
    gpu: str = ""
    torch: str = ""
    triton: str = ""
    driver: str = ""
    commit: str = ""
    date: str = ""


@dataclass
class Writer:
    """Appends rows to a CSV as they are measured, so that an interrupted run keeps its rows."""

    path: Path
    common: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "w", newline="") as handle:
            csv.writer(handle, lineterminator="\n").writerow(f.name for f in fields(Row))

    def add(self, row: Row) -> Row:
        """Complete a row with the machine's columns and write it."""
        for name, value in self.common.items():
            setattr(row, name, value)
        self.rows.append(row)
        rounded = [f"{v:.4g}" if isinstance(v, float) else v for v in asdict(row).values()]
        with open(self.path, "a", newline="") as handle:
            csv.writer(handle, lineterminator="\n").writerow(rounded)
        return row


def named(cases: Iterable[Case], rows: Sequence[str]) -> list[Case]:
    """The cases with one of these words in their names; all of them without words.

    Raises:
        SystemExit: a word is in no name.
    """
    names = {str(case): case for case in cases}
    if unknown := [word for word in rows if not any(word in name for name in names)]:
        raise SystemExit(f"--rows is {', '.join(unknown)}; the rows are {'; '.join(names)}")
    return [case for name, case in names.items() if not rows or any(word in name for word in rows)]
