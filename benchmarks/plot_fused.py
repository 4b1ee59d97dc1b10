"""The plots of `nm_fused` and `nm_fused_sm80`: forward throughput against the length, a panel for each head dim, causal and
not."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import plot_style as style

# (label, setting of `plot_style.line`)
_STYLES = {
    "mma_sp 1:2": (f"{style.SACCADE.name} 1:2", 1),
    "mma_sp 2:4": (f"{style.SACCADE.name} 2:4", 0),
    **{name: (f"{style.LOOKS[name].name}, dense", 0) for name in ("fa4", "sdpa_cudnn", "sdpa_flash")},
}
_PANELS = [(dim, causal) for dim in ("64", "128") for causal in (False, True)]
_TITLES = {
    "nm_fused": "N:M sparse attention, forward, against the length",
    "nm_fused_sm80": "N:M sparse attention, the form for other GPUs, forward",
}


def draw_fused(path: Path) -> list[Path]:
    """Draw `<table>.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["direction"] == "fwd"]
    lines = {panel: _lines([r for r in rows if _panel(r["problem"]) == panel]) for panel in _PANELS}
    return style.save(path, lambda: _figure(rows[0], lines))


def _figure(first: dict[str, str], lines: dict[tuple[str, bool], dict[str, list[tuple[int, float]]]]) -> Any:
    figure, axes = style.panels(1, 4, 4.0, sharey=True)
    for axis, ((dim, causal), found) in zip(axes[0], lines.items(), strict=True):
        for name, points in found.items():
            label, setting = _STYLES[name]
            axis.plot(*zip(*points, strict=True), **style.line(style.LOOKS[name.split()[0]], setting), label=label)
        axis.set_title(f"D = {dim}{', causal' if causal else ''}")
        style.lengths_axis(axis, "n")
        axis.tick_params(axis="x", labelrotation=45)
    axes[0, 0].set_ylim(0, 1.05 * max(y for found in lines.values() for points in found.values() for _, y in points))
    axes[0, 0].set_ylabel("TFLOP/s, counted as dense")
    style.head(
        figure, _TITLES.get(first["table"], first["table"]), style.facts(first, "32,768 rows of hidden size 2,048", "bf16")
    )
    return figure


def _panel(problem: str) -> tuple[str, bool]:
    found = re.search(r"\bD=(\d+)", problem)
    return (found[1] if found else "", "causal" in problem)


def _lines(rows: list[dict[str, str]]) -> dict[str, list[tuple[int, float]]]:
    """Implementation, with our pattern from the note -> (length, TFLOP/s)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        pattern = row["note"].split(",")[0] if row["backend"] == "mma_sp" else ""
        length = re.search(r"\bTk=(\d+)", row["problem"])
        if length is not None:
            found.setdefault(f"{row['backend']} {pattern}".strip(), []).append((int(length[1]), float(row["tflops"])))
    return {name: sorted(found[name]) for name in _STYLES if name in found}
