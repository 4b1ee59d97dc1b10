"""Nsight Compute's counters of the kernels that a script launches inside its NVTX ranges `case` / `<name of the case>`."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import machine


@dataclass
class Launch:
    """One launch of a kernel. counters: Nsight Compute's name -> value in its base unit."""

    case: str
    kernel: str
    counters: dict[str, float] = field(default_factory=dict)


class NcuFailed(Exception):
    """Raised when ncu is missing, may not read the counters, or finds no kernel."""


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """A context whose launches are profiled under this name (without spaces)."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("case")
    torch.cuda.nvtx.range_push(name)
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_pop()


def profile(script: str, kernels: str, metrics: list[str], arguments: Sequence[str] = ()) -> list[Launch]:
    """Run `script --inner` with `arguments` under ncu. Clocks are left as they are; caches are flushed before each launch."""
    command = ["ncu", "--csv", "--clock-control", "none", "--print-units", "base", "--nvtx", "--nvtx-include", "case/",
               "--kernel-name", kernels, "--metrics", ",".join(metrics), sys.executable, script, "--inner", *arguments]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NcuFailed(f"ncu cannot be run: {error}") from error
    found = parse(done.stdout)
    if done.returncode or not found:
        raise NcuFailed(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\nncu failed: may it read the counters?")
    return found


def parse(text: str) -> list[Launch]:
    """Parse the output of `ncu --csv`."""
    lines = text[text.find('"ID"') :] if '"ID"' in text else ""
    launches: dict[str, Launch] = {}
    for record in csv.DictReader(io.StringIO(lines)):
        if not record.get("Metric Name"):
            continue
        ranges = " ".join(v for k, v in record.items() if k and "range" in k.lower() and v)
        names = re.findall(r"[\w.\-]+(?:/[\w.\-]+)+", ranges)
        launch = launches.setdefault(record["ID"], Launch(names[0] if names else "", record["Kernel Name"]))
        launch.counters[record["Metric Name"]] = float(record["Metric Value"].replace(",", ""))
    return list(launches.values())


def write(rows: list[dict[str, str]], path: Path) -> None:
    """As a CSV, with the GPU and the versions."""
    where = machine()
    with open(path, "w", newline="") as handle:
        writer = csv.DictWriter(handle, list(dict.fromkeys([*rows[0], *where])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | where for row in rows)


def markdown(rows: list[dict[str, str]], head: list[str]) -> str:
    """As a table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row.get(h, "") for h in head) + " |" for row in rows])
