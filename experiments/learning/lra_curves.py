"""Draws the CSV of `lra.py`: for each task accuracy over steps of what was trained from the start, and below it the accuracy at the end of every
variant: a small dot for each seed, and the mean and range of several. Lines show what guesses reach; below, those near an end alone.

python experiments/learning/lra_curves.py out/lra/lra.csv
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
# (task, length) -> accuracies of guesses on the test examples of `lra_tasks.py`: the most frequent answer, and for ListOps the most frequent
# one under the same outermost operator (`lra_tasks.guessed`)
_GUESSES = {("listops", 2048): (0.149, 0.278), ("image", 1024): (0.12,), ("retrieval", 1024): (0.5,)}
_GUESSED = (("the most frequent answer", 2), ("ListOps: by the first operator alone", 1))
FAR = 0.2  # a guess so far below every end is not drawn there: the ends would lie on one line
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
    figure, axes = style.panels(2, len(tasks), 6.2)
    for column, task in enumerate(tasks):
        own = [row for row in rows if row["task"] == task]
        begun = [row for row in own if not row["variant"].endswith("_tuned") and _whole(own, row)]
        if begun:
            curves.panel(axes[0, column], f"{task}, n = {int(own[0]['length']):,}", begun)
        _ends(axes[1, column], own)
        lowest = min(float(row["accuracy"]) for row in own if row["step"] == row["steps"])
        _guesses(axes[0, column], task, int(own[0]["length"]))
        _guesses(axes[1, column], task, int(own[0]["length"]), above=lowest - FAR)
    for row in axes:
        row[0].set_ylabel("test accuracy")
    first = rows[0]
    counted = [
        {"method": row["variant"], "size": row["task"], "seed": row["seed"]} for row in rows if row["step"] == row["steps"]
    ]
    facts = [
        table, style.devices(rows), f"{int(first['parameters']) / 1e6:.2g}M parameters", "N: Nystromformer",
        style.seeds(counted), f"torch {first['torch']}",
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
            reach = [[mean - min(ends)], [max(ends) - mean]] if len(ends) > 1 else None
            axis.errorbar([place], [mean], yerr=reach, capsize=3, **options)
        if len(ends) > 1:
            axis.plot([place + 0.22] * len(ends), ends, ".", color=look.colour, markersize=4, alpha=0.8)
    axis.set_xticks(range(len(_VARIANTS)), [name for name, _, _ in _VARIANTS.values()], fontsize=6.5)
    axis.set_xlim(-0.5, len(_VARIANTS) - 0.5)
    axis.set_title("at the end")


def _guesses(axis: Any, task: str, length: int, above: float = 0.0) -> None:
    for height, (label, dash) in zip(_GUESSES.get((task, length), ()), _GUESSED, strict=False):
        if height > above:
            axis.axhline(height, color=style.quiet(), linewidth=1.2, linestyle=style.DASHES[dash], label=label, zorder=1.5)


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "lra_curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
