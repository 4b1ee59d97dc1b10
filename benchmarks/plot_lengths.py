"""The plots of a table against the length: one line for each implementation and setting, a row of axes for each shape,
logarithmic."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any

import plot_style as style

_OURS = ("gather", "decode", "gather_cpp", "gather_torch")
_DENSE = ("fa4", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa")
_SHOWN = (*_OURS, *_DENSE, "flex")
_TITLES = {
    "dynamic_mask_length": "Dynamic masks against the length",
    "dynamic_mask_decode": "One decoded token against its history",
    "dynamic_mask_cpu": "Dynamic masks on a CPU",
}


def draw_lengths(path: Path) -> list[Path]:
    """Draw `<table>.png` and `.dark.png` beside the CSV; of several rows with the same line and length the fastest is drawn; host
    times, and shapes that were measured at one length, are not."""
    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["backend"] in _SHOWN and not r["note"].startswith(("host", "block mask"))]
    lengths: dict[str, set[str]] = {}
    for row in rows:
        lengths.setdefault(_shape(row), set()).add(_field("Tk", row["problem"]))
    return style.save(path, lambda: _figure([r for r in rows if len(lengths[_shape(r)]) > 1]))


def _figure(rows: list[dict[str, str]]) -> Any:
    directions = [d for d in ("fwd", "bwd") if any(r["direction"] == d for r in rows)]
    shapes = sorted({_shape(r) for r in rows}, key=lambda shape: -int(_field("D", shape)))
    figure, axes = style.panels(len(shapes), len(directions), 1.1 + 3.0 * len(shapes), sharex=True)
    for (shape, direction), axis in zip(itertools.product(shapes, directions), axes.flat, strict=True):
        _draw(axis, [r for r in rows if r["direction"] == direction and _shape(r) == shape])
        axis.set_ylabel({"fwd": "forward, ms", "bwd": "backward, ms"}[direction])
        axis.set_title(shape)
    for axis in axes[-1]:
        axis.set_xlabel("keys")
    first = rows[0]
    dtype = {"fp32": "float32"}.get(first["dtype"], first["dtype"])
    style.head(figure, _TITLES.get(first["table"], first["table"]), style.facts(first, dtype, "logarithmic scales"))
    return figure


def _draw(axis: Any, rows: list[dict[str, str]]) -> None:
    lines = _lines(rows)
    keeps = sorted({int(keep) for backend, keep in lines if backend in _OURS})
    for (backend, keep), points in sorted(lines.items(), key=lambda line: (_SHOWN.index(line[0][0]), int(line[0][1] or 0))):
        look = style.LOOKS[backend]
        label = f"{look.name}, dense" if backend in _DENSE else f"{look.name}, keep {int(keep):,}"
        if backend == "flex":
            label = f"{look.name}, exact mask, keep {int(keep):,}"
        setting = keeps.index(int(keep)) if backend in _OURS else 0
        axis.plot(*zip(*points, strict=True), **style.line(look, setting), label=label)
    style.lengths_axis(axis, "")
    axis.set_yscale("log")
    style.plain_numbers(axis)


def _shape(row: dict[str, str]) -> str:
    """The properties that all lengths of a line share."""
    return " ".join(re.findall(r"\b(?:B|H|Hkv|D)=\d+", row["problem"]))


def _lines(rows: list[dict[str, str]]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(backend, keep or "") -> (length, milliseconds); random scores."""
    best: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        problem = row["problem"]
        if any(word in problem for word in (" local", " heavy")):
            continue
        keep = _field("keep", problem) if row["backend"] in (*_OURS, "flex") else ""
        times = best.setdefault((row["backend"], keep), {})
        length = int(_field("Tk", problem))
        times[length] = min(times.get(length, float("inf")), float(row["ms_p50"]))
    return {line: sorted(times.items()) for line, times in best.items()}


def _field(name: str, problem: str) -> str:
    found = re.search(rf"\b{name}=(\d+)", problem)
    return found[1] if found else ""
