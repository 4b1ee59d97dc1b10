"""Plots of the tables of the staged N:M pipeline: stages beside dense, memory, speed-up against density, a model end to end."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, str]]
_STAGES = {"scores": "#1f6fb2", "softmax": "#d08b1d", "matmul": "#4b7f3f"}
_LINES = {"staged 2:4": "#c1272d", "staged 1:2": "#6a51a3", "fixed": "#4b7f3f", "top-K": "#2b6cb0"}


def draw_staged(path: Path) -> list[Path]:
    """Draw `<table>.png` beside the CSV of a table whose name is in `PLOTS`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    figure = PLOTS[path.stem](rows, plt)
    figure.suptitle(f"{path.stem}: {rows[0]['gpu']}, torch {rows[0]['torch']}", fontsize=11)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return [target]


def _stages(rows: Rows, plt: Any) -> Any:
    """Stacked stages of both pipelines, as shares of dense's total."""
    kinds = list(dict.fromkeys(_kind(r["problem"]) for r in rows))
    figure, axes = plt.subplots(1, len(kinds), figsize=(4.6 * len(kinds), 4), sharey=True, squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds, strict=True):
        chosen = [r for r in rows if _kind(r["problem"]) == kind]
        lengths = sorted({_length(r["problem"]) for r in chosen})
        times = {(_length(r["problem"]), r["backend"], r["note"]): float(r["ms_p50"]) for r in chosen}
        for x, n in enumerate(lengths):
            whole = sum(times[n, "unfused", stage] for stage in _STAGES)
            for place, name in ((x - 0.2, "unfused"), (x + 0.2, "staged")):
                bottom = 0.0
                for stage, colour in _STAGES.items():
                    height = times[n, name, stage] / whole
                    label = stage if (x, name) == (0, "staged") else None
                    axis.bar(
                        place, height, 0.36, bottom=bottom, color=colour, alpha=0.5 if name == "unfused" else 1.0, label=label
                    )
                    bottom += height
            gain = times[n, "unfused", "total"] / times[n, "staged", "total"]
            axis.annotate(f"{gain:.2f}x", (x + 0.2, bottom), ha="center", va="bottom", fontsize=9)
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set(title=kind, xlabel="n (left: dense, right: ours)")
    axes[0][0].set_ylabel("time, sum of dense's stages = 1")
    axes[0][0].legend(frameon=False)
    return figure


def _memory(rows: Rows, plt: Any) -> Any:
    return _ratios(rows, plt, lambda r: float(re.search(r"peak ([\d.]+)", r["note"])[1]), "peak memory, dense / ours")  # type: ignore[index]


def _end_to_end(rows: Rows, plt: Any) -> Any:
    return _ratios([r for r in rows if r["backend"] != "none"], plt, lambda r: float(r["ms_p50"]), "speed-up over unfused dense")


def _ratios(rows: Rows, plt: Any, number: Callable[[dict[str, str]], float], label: str) -> Any:
    """Bars of unfused's number over each other's."""
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    names = [n for n in dict.fromkeys(r["backend"] for r in rows) if n != "unfused"]
    found = {(r["problem"], r["backend"]): number(r) for r in rows}
    figure, axis = plt.subplots(figsize=(max(8, 0.7 * len(problems)), 4.6), layout="constrained")
    for i, name in enumerate(names):
        places = [x + (i - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(problems))]
        axis.bar(places, [found[p, "unfused"] / found[p, name] for p in problems], 0.8 / len(names), label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(problems)), [_label(p) for p in problems], fontsize=7)
    axis.set_ylabel(label)
    axis.legend(frameon=False, ncols=len(names))
    return figure


def _density(rows: Rows, plt: Any) -> Any:
    """Measured (solid) and theoretical (dotted) speed-up against density."""
    figure, axis = plt.subplots(figsize=(6.5, 4.6), layout="constrained")
    for name, colour in _LINES.items():
        points = sorted(tuple(map(float, re.findall(r"[\d.]+", r["note"]))) for r in rows if r["backend"] == name)
        if points:
            density, measured, theory = zip(*points, strict=True)
            axis.plot(density, measured, "o-", color=colour, markersize=4, label=name)
            axis.plot(density, theory, "x:", color=colour, markersize=5)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="density", ylabel="speed-up over unfused dense (dotted: theory)")
    axis.legend(frameon=False)
    return figure


def _kind(problem: str) -> str:
    return f"{problem.partition('(')[2].partition(' ')[0]} {problem.rstrip(')').rsplit(' ', 1)[1]}"


def _length(problem: str) -> int:
    return int(re.search(r"\bTk?=(\d+)", problem)[1])  # type: ignore[index]


def _label(problem: str) -> str:
    fields = dict(re.findall(r"(\w+)=(\w+)", problem))
    return f"n={_length(problem)}\n" + (f"H={fields['H']}\nFF={fields['FF']}" if "FF" in fields else _kind(problem))


PLOTS: dict[str, Callable[[Rows, Any], Any]] = {
    "nm_figure5": _stages,
    "nm_memory": _memory,
    "nm_figure11": _density,
    "nm_end_to_end": _end_to_end,
}
