"""The plot of `pooled_depth`: what the CLS token alone in the last layer gains, against the number of layers, beside its predictions."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import plot_style as style

_BACKENDS = {"saccade_cls_only": style.SACCADE, "stock_cls_only": style.LOOKS["sdpa"]}
_DIRECTIONS = {"fwd": "forward", "fwd+bwd": "training step"}
_NOTE = re.compile(r"x([\d.]+) of \w+, x([\d.]+) predicted by multiplications, x([\d.]+|nan) by time")
Points = list[tuple[int, float, float, float]]  # depth, measured, by multiplications, by time


def draw_depth(path: Path) -> list[Path]:
    """Draw `pooled_depth.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: _figure(rows))


def points_of(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], Points]:
    """By model with its sizes, direction and backend; by depth."""
    found: dict[tuple[str, str, str], Points] = {}
    for row in rows:
        said = _NOTE.search(row["note"])
        if said and row["backend"] in _BACKENDS:
            depth = int(re.findall(r" L=(\d+)", row["problem"])[0])
            key = re.sub(r" L=\d+", "", row["problem"]), row["direction"], row["backend"]
            measured, counted, timed = map(float, said.groups())
            found.setdefault(key, []).append((depth, measured, counted, timed))
    return {key: sorted(points) for key, points in found.items()}


def _figure(rows: list[dict[str, str]]) -> Any:
    found = points_of(rows)
    models = list(dict.fromkeys(model for model, _, _ in found))
    directions = [d for d in _DIRECTIONS if any(direction == d for _, direction, _ in found)]
    figure, axes = style.panels(len(directions), len(models), 1.4 + 2.5 * len(directions), sharex=True, sharey="row")
    for line, direction in zip(axes, directions, strict=True):
        for axis, model in zip(line, models, strict=True):
            _lines(axis, {name: found[model, direction, name] for name in _BACKENDS if (model, direction, name) in found})
            axis.set_title(f"{model}, {_DIRECTIONS[direction]}")
            style.level(axis)
            axis.set_yscale("log")  # one layer gains several times, twelve a few per cent
            style.plain_numbers(axis)
        line[0].set_ylabel("times as fast")
    for axis in axes[-1]:
        axis.set_xlabel("layers")
    title = "The CLS token alone in the last layer, against all tokens"
    style.head(figure, title, style.facts(rows[0], rows[0]["dtype"], "wall clock", "logarithmic scale"))
    return figure


def _lines(axis: Any, found: dict[str, Points]) -> None:
    for name, points in found.items():
        look = _BACKENDS[name]
        depths, measured, _, timed = zip(*points, strict=True)
        axis.plot(depths, measured, **style.line(look), label=look.name)
        axis.plot(depths, timed, color=look.colour, linestyle=style.DASHES[2], label=f"{look.name}, predicted by time")
    depths, _, counted, _ = zip(*next(iter(found.values())), strict=True)
    axis.plot(depths, counted, color=style.ink(), linestyle=style.DASHES[1], linewidth=1.2, label="predicted by multiplications")
    axis.xaxis.get_major_locator().set_params(integer=True)
