"""Plots of the tables of the staged N:M pipeline: stages beside dense, memory, speed-up against density, a model end to end."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plot_style as style

Rows = list[dict[str, str]]
_STAGES = ("scores", "softmax", "matmul")
# (name, setting of `plot_style.line` for ours)
_LINES = {"staged 2:4": ("saccade staged 2:4", 0), "staged 1:2": ("saccade staged 1:2", 1)}
# of bars: (label, look, setting of `plot_style.shade`)
_BARS = {
    "fused 2:4": ("saccade fused 2:4", "fused", 0),
    "fused 1:2": ("saccade fused 1:2", "fused", 1),
    "nm_sparse_attention": ("saccade fused", "fused", 0),
    "in place": ("saccade staged, in place", "staged", 1),
    "staged": ("saccade staged", "staged", 2),
    "staged 2:4": ("saccade staged 2:4", "staged", 2),
    "sdpa": ("SDPA", "sdpa", 0),
}


def draw_staged(path: Path) -> list[Path]:
    """Draw `<table>.png` and `.dark.png` beside the CSV of a table whose name is in `PLOTS`."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: PLOTS[path.stem](rows))


def _stages(rows: Rows) -> Any:
    """Stacked stages of both pipelines, as shares of dense's total."""
    kinds = list(dict.fromkeys(_kind(r["problem"]) for r in rows))
    columns = min(3, len(kinds))
    lines = math.ceil(len(kinds) / columns)
    figure, axes = style.panels(lines, columns, 1.2 + 3.2 * lines, sharey=True)
    for axis in axes.flat[len(kinds) :]:
        axis.set_axis_off()
    for axis, kind in zip(axes.flat[: len(kinds)], kinds, strict=True):
        chosen = [r for r in rows if _kind(r["problem"]) == kind]
        lengths = sorted({_length(r["problem"]) for r in chosen})
        times = {(_length(r["problem"]), r["backend"], r["note"]): float(r["ms_p50"]) for r in chosen}
        for x, n in enumerate(lengths):
            whole = sum(times[n, "unfused", stage] for stage in _STAGES)
            for place, name in ((x - 0.2, "unfused"), (x + 0.2, "staged")):
                top = _stack(axis, place, name, [times[n, name, stage] / whole for stage in _STAGES])
            gain = times[n, "unfused", "total"] / times[n, "staged", "total"]
            axis.annotate(f"{gain:.1f}x", (x + 0.22, top), ha="center", va="bottom", fontsize=8.5, fontweight="bold")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axis.set(title=kind, xlabel="n")
        axis.grid(axis="x", visible=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("time, sum of dense's stages = 1")
    style.head(
        figure,
        "The staged pipeline by stage",
        style.facts(rows[0], _shared(rows, "H", "D"), "times as fast above the bars"),
        columns=2,
    )
    return figure


def _stack(axis: Any, place: float, name: str, heights: list[float]) -> float:
    """One stacked bar; its height."""
    bottom, look = 0.0, style.LOOKS[name]
    for setting, (stage, height) in enumerate(zip(_STAGES, heights, strict=True)):
        label = f"{look.name}, {stage}"
        axis.bar(place, height, 0.38, bottom=bottom, color=style.shade(look, setting), label=label)
        bottom += height
    return bottom


def _memory(rows: Rows) -> Any:
    groups = list(dict.fromkeys(_kind(r["problem"]) for r in rows))
    figure, axes = style.panels(1, len(groups), 3.9, sharey=True)
    for axis, kind in zip(axes[0], groups, strict=True):
        chosen = sorted((r for r in rows if _kind(r["problem"]) == kind), key=lambda r: _length(r["problem"]))
        _ratios(axis, chosen, lambda r: float(re.search(r"peak ([\d.]+)", r["note"])[1]), lambda p: f"{_length(p):,}")  # type: ignore[index]
        axis.set(title=kind, xlabel="n", yscale="log")
        style.plain_numbers(axis)
    axes[0, 0].set_ylabel("peak memory, unfused over ours")
    shared = _shared(rows, "B", "H", "D")
    style.head(figure, "Peak memory against the unfused dense pipeline", style.facts(rows[0], shared, "logarithmic scale"))
    return figure


def _end_to_end(rows: Rows) -> Any:
    rows = [r for r in rows if r["backend"] != "none"]
    heads = sorted({_fields(r["problem"])["H"] for r in rows}, key=int)
    figure, axes = style.panels(len(heads), 1, 1.2 + 2.4 * len(heads), sharex=True, sharey=True)
    for axis, count in zip(axes[:, 0], heads, strict=True):
        _ratios(
            axis, [r for r in rows if _fields(r["problem"])["H"] == count], lambda r: float(r["ms_p50"]),
            lambda p: f"n={_length(p):,}\nFF={_fields(p)['FF']}",
        )  # fmt: skip
        axis.set(title=f"{count} heads", ylabel="times as fast")
    style.head(
        figure,
        "An encoder of four layers, forward, against unfused attention",
        style.facts(rows[0], rows[0]["dtype"], _shared(rows, "D")),
    )
    return figure


def _ratios(axis: Any, rows: Rows, number: Callable[[dict[str, str]], float], label: Callable[[str], str]) -> None:
    """Bars of unfused's number over each other's."""
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    names = [n for n in _BARS if any(r["backend"] == n for r in rows)]
    found = {(r["problem"], r["backend"]): number(r) for r in rows}
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(problems))]
        shown, look, setting = _BARS[name]
        gains = [found[p, "unfused"] / found[p, name] for p in problems]
        axis.bar(places, gains, width * 0.94, color=style.shade(style.LOOKS[look], setting), label=shown)
    style.level(axis, style.LOOKS["unfused"].name)
    axis.set_xticks(range(len(problems)), [label(p) for p in problems])
    axis.set_xlim(-0.6, len(problems) - 0.4)
    axis.grid(axis="x", visible=False)
    axis.tick_params(axis="x", length=0)


def _density(rows: Rows) -> Any:
    """Measured (solid) and theoretical (dotted) speed-up against density."""
    figure, axes = style.panels(1, 1, 4.6)
    axis = axes[0, 0]
    for name in ("top-K", "fixed", *_LINES):
        points = sorted(tuple(map(float, re.findall(r"[\d.]+", r["note"]))) for r in rows if r["backend"] == name)
        if not points:
            continue
        label, setting = _LINES.get(name, (style.LOOKS.get(name, style.SACCADE).name, 0))
        look = style.LOOKS.get(name, style.SACCADE)
        density, measured, theory = zip(*points, strict=True)
        ours = {"markersize": 8, "zorder": 4} if name in _LINES else {}
        axis.plot(density, measured, **{**style.line(look, setting), "linestyle": "-", **ours}, label=label)
        axis.plot(density, theory, linestyle=style.DASHES[2], color=look.colour, marker="x", markersize=6)
    style.level(axis, style.LOOKS["unfused"].name)
    axis.plot([], [], linestyle=style.DASHES[2], color=style.quiet(), marker="x", markersize=6, label="in theory")
    axis.set(xscale="log", yscale="log", xlabel="share of the scores that is kept", ylabel="times as fast")
    axis.xaxis.set_major_formatter("{x:g}")
    style.plain_numbers(axis)
    shared = (rows[0]["dtype"], _shared(rows, "B", "H", "Tq", "D"), "logarithmic scales")
    style.head(figure, "Speed against the share of scores kept", style.facts(rows[0], *shared))
    return figure


def _kind(problem: str) -> str:
    return f"{problem.partition('(')[2].partition(' ')[0]} {problem.rstrip(')').rsplit(' ', 1)[1]}"


def _length(problem: str) -> int:
    return int(re.search(r"\bTk?=(\d+)", problem)[1])  # type: ignore[index]


def _fields(problem: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\w+)", problem))


def _shared(rows: Rows, *names: str) -> str:
    """The values that these sizes have in all rows, as "B = 24 or 48, H = 4"."""
    values = {name: sorted({int(_fields(r["problem"])[name]) for r in rows}) for name in names}
    return ", ".join(f"{name} = {' or '.join(map(str, found))}" for name, found in values.items())


PLOTS: dict[str, Callable[[Rows], Any]] = {
    "nm_figure5": _stages,
    "nm_memory": _memory,
    "nm_figure11": _density,
    "nm_end_to_end": _end_to_end,
}
