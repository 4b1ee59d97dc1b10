"""The plots of `short_long`: shares of the roof against the length, a column of axes for each head dim; and for shapes of models."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import plot_style as style

_SHOWN = ("long", "fa4", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
_DIRECTIONS = {"fwd": "forward", "fwd+bwd": "forward and backward"}
_GROUP = 0.84  # of the place of a problem is taken by its bars

Shares = dict[tuple[str, str, str], float]  # (problem, direction, implementation) -> the roof over the time


def draw_long(path: Path) -> list[Path]:
    """Draw `short_long.png`, `short_long_models.png` and their `.dark.png` beside the CSV; the files written."""
    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["backend"] in _SHOWN and r["direction"] in _DIRECTIONS]
    plain = [r for r in rows if not r["note"] and "causal" not in r["problem"]]
    models = [r for r in rows if r["note"] or "causal" in r["problem"]]
    written = []
    if plain:
        written += style.save(path, lambda: _lengths(plain))
    if models:
        written += style.save(path.with_name(path.stem + "_models.csv"), lambda: _models(models))
    return written


def _shares(rows: list[dict[str, str]]) -> Shares:
    return {(r["problem"], r["direction"], r["backend"]): float(r["roof_ms"]) / float(r["ms_p50"]) for r in rows}


def _fields(problem: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b(\w+)=(\d+)\b", problem)}


def _lengths(rows: list[dict[str, str]]) -> Any:
    """A line for each implementation. Lengths stand side by side, since neighbours such as 196 and 197 are what is compared."""
    shares = _shares(rows)
    fields = {r["problem"]: _fields(r["problem"]) for r in rows}
    dims = sorted({f["D"] for f in fields.values()})
    figure, axes = style.panels(len(_DIRECTIONS), len(dims), 5.4, sharex="col", sharey=True)
    for axis_row, (direction, name) in zip(axes, _DIRECTIONS.items(), strict=True):
        for axis, dim in zip(axis_row, dims, strict=True):
            problems = sorted((p for p, f in fields.items() if f["D"] == dim), key=lambda p: fields[p]["Tq"])
            for backend in _SHOWN:
                points = [(x, shares[p, direction, backend]) for x, p in enumerate(problems) if (p, direction, backend) in shares]
                if points:
                    look = style.LOOKS[backend]
                    axis.plot(*zip(*points, strict=True), **style.line(look), label=look.name)
            axis.set_xticks(range(len(problems)), [str(fields[p]["Tq"]) for p in problems])
        axis_row[0].set_ylabel(f"{name},\nshare of the roof")
    for axis, dim in zip(axes[0], dims, strict=True):
        axis.set_title(f"D = {dim}")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    axes[0, 0].set_ylim(bottom=0)  # of all: they share it
    style.head(figure, "Sequences of 129 to 577 tokens", _facts(rows[0]))
    return figure


def _models(rows: list[dict[str, str]]) -> Any:
    """One group of bars a problem. A peer that does not take the problem leaves no gap."""
    shares = _shares(rows)
    labels = {r["problem"]: _label(r) for r in rows}
    figure, axes = style.panels(len(_DIRECTIONS), 1, 5.4, sharex=True)
    width = _GROUP / max(len({r["backend"] for r in rows if r["problem"] == p}) for p in labels)
    for axis, (direction, name) in zip(axes[:, 0], _DIRECTIONS.items(), strict=True):
        for x, problem in enumerate(labels):
            shown = [b for b in _SHOWN if (problem, direction, b) in shares]
            for i, backend in enumerate(shown):
                look = style.LOOKS[backend]
                place = x + (i - (len(shown) - 1) / 2) * width
                axis.bar(place, shares[problem, direction, backend], width * 0.94, color=look.colour, label=look.name)
        axis.set_ylabel(f"{name},\nshare of the roof")
        axis.grid(axis="x", visible=False)
        axis.tick_params(axis="x", length=0)
    axes[-1, 0].set_xticks(range(len(labels)), labels.values())
    style.head(figure, "Shapes of models, 129 to 577 tokens", _facts(rows[0]))
    return figure


def _label(row: dict[str, str]) -> str:
    label = f"{row['note'] or 'causal'}\nS={_fields(row['problem'])['Tq']}"
    return f"{label}\nlengths" if " lengths" in row["problem"] else label


def _facts(row: dict[str, str]) -> list[str]:
    return style.facts(row, row["dtype"], "with autograd", "roof: bytes moved, or products")
