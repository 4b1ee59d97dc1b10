"""Draws the CSV of `lra.py`: for each task accuracy over steps of what was trained from the start, and below it the accuracy at the end of every
variant, its mean and range over seeds.

python benchmarks/learning/lra_curves.py out/lra/lra.csv
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

import curves  # also puts the folder of plot_style on the path
import plot_style as style
from plot_command import plot_command

_NYSTROM, _OURS = style.LOOKS["nystromformer"], style.SACCADE
# variant -> (name on the axis, look, setting of `plot_style.line`)
_VARIANTS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "1:2": ("1:2", _OURS, 1),
    "2:4": ("2:4", _OURS, 0),
    "nystrom": ("N", _NYSTROM, 0),
    "nystrom_tuned": ("N,\ntuned", _NYSTROM, 0),
    "nystrom_1:2_tuned": ("N 1:2,\ntuned", _OURS, 1),
    "nystrom_2:4_tuned": ("N 2:4,\ntuned", _OURS, 0),
}
Rows = list[dict[str, str]]


def draw(path: Path) -> list[Path]:
    """Draw `<name>.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    if not [row for row in rows if row["step"] == row["steps"]]:
        raise ValueError(f"{path} holds no run that was trained to its last step")
    return style.save(path, lambda: _figure(path.stem, rows))


def _figure(table: str, rows: Rows) -> Any:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = style.panels(2, len(tasks), 6.2, sharey="col")
    for column, task in enumerate(tasks):
        own = [row for row in rows if row["task"] == task]
        begun = [row for row in own if not row["variant"].endswith("_tuned") and _whole(own, row)]
        if begun:
            curves.panel(axes[0, column], f"{task}, n = {int(own[0]['length']):,}", begun)
        _ends(axes[1, column], own)
    for row in axes:
        row[0].set_ylabel("test accuracy")
    first, seeds = rows[0], len({row["seed"] for row in rows})
    facts = [
        table, first["device"], f"{int(first['parameters']) / 1e6:.2g}M parameters", "N: Nystromformer",
        f"{seeds} seeds, below: their mean and range" if seeds > 1 else "one seed", f"torch {first['torch']}",
    ]  # fmt: skip
    style.head(figure, "Long Range Arena in small, with pruned attention", facts)
    return figure


def _whole(rows: Rows, row: dict[str, str]) -> bool:
    """Whether the run of a row was trained to its last step."""
    return any((r["variant"], r["seed"], r["step"]) == (row["variant"], row["seed"], row["steps"]) for r in rows)


def _ends(axis: Any, rows: Rows) -> None:
    for place, (variant, (_, look, setting)) in enumerate(_VARIANTS.items()):
        ends = [float(r["accuracy"]) for r in rows if r["variant"] == variant and r["step"] == r["steps"]]
        if ends:
            mean = statistics.fmean(ends)
            options = style.line(look, setting) | {"linestyle": "none"}
            axis.errorbar([place], [mean], yerr=[[mean - min(ends)], [max(ends) - mean]], capsize=3, **options)
    axis.set_xticks(range(len(_VARIANTS)), [name for name, _, _ in _VARIANTS.values()], fontsize=6.5)
    axis.set_xlim(-0.5, len(_VARIANTS) - 0.5)
    axis.set_title("at the end")


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "lra_curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
