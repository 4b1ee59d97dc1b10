"""The plots of `short_auto`, a dot for each row in order, and of `short_sizes`, a map of lengths and numbers of problems."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import plot_style as style

_DIRECTIONS = {"fwd": "forward", "fwd+bwd": "forward and backward"}
_LOST = 0.97  # a row below it is named
# title -> (note, ours, the others, of which the fastest is compared)
_WAYS = {
    "eager, auto against SDPA": ("", ("auto",), ("sdpa",)),
    "in a CUDA graph, by name against the best of SDPA's backends": (
        "kernel",
        ("short", "long"),
        ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn"),
    ),
}

Gains = dict[tuple[int, int, int], float]  # (D, S, problems) -> how many times as fast
Rows = list[dict[str, str]]


def draw_auto(path: Path) -> list[Path]:
    """Draw `short_auto.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: _auto(rows))


def _auto(rows: Rows) -> Any:
    """All rows of a direction from the slowest to the fastest; those that lose have their problem beside them."""
    gains = auto_gains(rows)
    figure, axes = style.panels(1, len(_DIRECTIONS), 4.4, sharey=True)
    for axis, (direction, name) in zip(axes[0], _DIRECTIONS.items(), strict=True):
        found = sorted((gain, problem, note) for (problem, note, way), gain in gains.items() if way == direction)
        axis.plot([gain for gain, _, _ in found], **style.dot(style.SACCADE) | {"markersize": 3.6}, label=style.SACCADE.name)
        style.level(axis, f"{style.LOOKS['sdpa'].name}, called directly")
        lost = [(x, gain, _words(problem)) for x, (gain, problem, _) in enumerate(found) if gain < _LOST]
        for x, gain, words in lost:
            axis.annotate(
                f"{gain:.2f}  {words}", (x, gain), xytext=(0.08, 0.02 + 0.055 * x), textcoords="axes fraction", fontsize=7.6,
                arrowprops={"arrowstyle": "-", "color": style.quiet(), "linewidth": 0.7, "relpos": (0, 0.5)},
            )  # fmt: skip
        axis.set(yscale="log", title=f"{name}, {len(found)} rows", xlabel="rows, from the slowest to the fastest")
        axis.set_xlim(-4, len(found) + 3)
        axis.set_ylim(bottom=0.62)  # the names stand below the line
        style.plain_numbers(axis)
    axes[0, 0].set_ylabel("times as fast")
    facts = style.facts(rows[0], "wall clock, eager", "logarithmic scale")
    style.head(figure, "What a program calls, off the grid", facts)
    return figure


def auto_gains(rows: Rows) -> dict[tuple[str, str, str], float]:
    """(problem, note, direction) -> the time of torch's function over that of `auto`; of one measured twice the last."""
    times = {(r["problem"], r["note"], r["direction"], r["backend"]): float(r["ms_p50"]) for r in rows}
    return {
        (p, note, way): times[p, note, way, "sdpa"] / time for (p, note, way, backend), time in times.items() if backend == "auto"
    }


def _words(problem: str) -> str:
    """A problem without its GPU, as a label."""
    return re.sub(r" (grad|sm_\d+)\b", "", problem.partition("(")[2].rstrip(")"))


def draw_sizes(path: Path) -> list[Path]:
    """Draw `short_sizes.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: _sizes(rows))


def _sizes(rows: Rows) -> Any:
    measured = {_size(r["problem"]) for r in rows}
    height = 1.5 + 0.42 * len({size[:2] for size in measured})
    figure, axes = style.panels(len(_WAYS), len(_DIRECTIONS), height, sharex=True, sharey=True)
    for axis_row, (way, compared) in zip(axes, _WAYS.items(), strict=True):
        for axis, (direction, name) in zip(axis_row, _DIRECTIONS.items(), strict=True):
            _map(axis, _gains(rows, direction, *compared), measured)
            axis.set_title(name)
        axis_row[0].set_ylabel(way.replace(", ", ",\n").replace(" the best", "\nthe best"))
    for axis in axes[-1]:
        axis.set_xlabel("problems (B × H)")
    style.head(figure, "From few problems to many: times as fast", style.facts(rows[0], rows[0]["dtype"], "wall clock"))
    return figure


def _map(axis: Any, gains: Gains, measured: set[tuple[int, int, int]]) -> None:
    """A row for each D and S of the table, a column for each number of problems, the gain in each field."""
    sizes, problems = sorted({size[:2] for size in measured}), sorted({n for _, _, n in measured})
    colours, norm = style.gain_colours()
    grid = [[gains.get((*size, n), math.nan) for n in problems] for size in sizes]
    axis.imshow([[math.log2(gain) for gain in row] for row in grid], cmap=colours, norm=norm, aspect="auto")
    for y, row in enumerate(grid):
        for x, gain in enumerate(row):
            if not math.isnan(gain):
                axis.text(x, y, f"{gain:.2f}", ha="center", va="center", fontsize=7.4, color=style.ink())
    axis.set_xticks(range(len(problems)), [f"{n:,}" for n in problems])
    axis.set_yticks(range(len(sizes)), [f"D={dim}  S={length}" for dim, length in sizes])
    axis.tick_params(length=0)
    axis.grid(visible=False)


def _gains(rows: Rows, direction: str, note: str, ours: tuple[str, ...], others: tuple[str, ...]) -> Gains:
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["direction"], row["note"]) == (direction, note):
            times.setdefault(row["problem"], {})[row["backend"]] = float(row["ms_p50"])
    found = {}
    for problem, measured in times.items():
        mine, theirs = [measured[b] for b in ours if b in measured], [measured[b] for b in others if b in measured]
        if mine and theirs:
            found[_size(problem)] = min(theirs) / min(mine)
    return found


def _size(problem: str) -> tuple[int, int, int]:
    """D, S and B * H."""
    fields = {name: int(value) for name, value in re.findall(r"\b(\w+)=(\d+)\b", problem)}
    return fields["D"], fields["Tq"], fields["B"] * fields["H"]
