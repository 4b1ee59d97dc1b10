"""A plot of a table against the length: one line for each implementation and setting, a row of axes for each shape,
logarithmic."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any

_STYLES = {
    "gather": ("#c1272d", "saccade"),
    "decode": ("#c1272d", "saccade"),
    "gather_torch": ("#c1272d", "saccade (plain torch)"),
    "fa4": ("#6a51a3", "FlashAttention-4, dense"),
    "sdpa_cudnn": ("#4b7f3f", "SDPA cuDNN, dense"),
    "sdpa_flash": ("#2b6cb0", "SDPA flash, dense"),
    "sdpa": ("#2b6cb0", "SDPA, dense"),
    "flex": ("#d08b1d", "FlexAttention, exact mask"),
}
_DASHES = {"1024": "-", "2048": "--", "256": "-"}


def draw_lengths(path: Path) -> list[Path]:
    """Draw `<table>.png` beside the CSV; of several rows with the same line and length the fastest is drawn, and host times are
    not."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["backend"] in _STYLES and not r["note"].startswith(("host", "block mask"))]
    directions = [d for d in ("fwd", "bwd") if any(r["direction"] == d for r in rows)]
    shapes = sorted({_shape(r) for r in rows}, key=lambda shape: -int(_field("D", shape)))
    size = (6.5 * len(directions), 5 * len(shapes))
    figure, axes = plt.subplots(len(shapes), len(directions), figsize=size, constrained_layout=True, squeeze=False)
    for (shape, direction), axis in zip(itertools.product(shapes, directions), axes.flat, strict=True):
        _draw(axis, [r for r in rows if r["direction"] == direction and _shape(r) == shape])
        axis.set_ylabel({"fwd": "forward, ms", "bwd": "backward, ms"}[direction])
        axis.set_title(shape, fontsize=10)
    axes[0][0].legend(frameon=False, fontsize=9)
    where = " ".join(x for x in (rows[0]["gpu"], f"torch {rows[0]['torch']}") if x)
    figure.suptitle(f"{rows[0]['table']}: {where}", fontsize=10)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return [target]


def _draw(axis: Any, rows: list[dict[str, str]]) -> None:
    for (backend, keep), points in _lines(rows).items():
        colour, name = _STYLES[backend]
        label = f"{name}, keep = {keep}" if keep else name
        axis.plot(*zip(*points, strict=True), _DASHES.get(keep, "-"), color=colour, marker="o", markersize=3.5, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("keys")
    axis.grid(which="major", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


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
        keep = _field("keep", problem) if row["backend"] in ("gather", "decode", "gather_torch", "flex") else ""
        times = best.setdefault((row["backend"], keep), {})
        length = int(_field("Tk", problem))
        times[length] = min(times.get(length, float("inf")), float(row["ms_p50"]))
    return {line: sorted(times.items()) for line, times in best.items()}


def _field(name: str, problem: str) -> str:
    found = re.search(rf"\b{name}=(\d+)", problem)
    return found[1] if found else ""
