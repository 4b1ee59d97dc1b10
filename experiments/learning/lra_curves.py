"""Draws the CSV of `lra.py`: for each task the accuracy at the end of every variant, a mark for each seed, their range and mean. Lines show
what guesses reach.

python experiments/learning/lra_curves.py out/lra/lra.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plot_marks as marks
import plot_style as style
from plot_command import plot_command

_NYSTROM, _OURS = style.LOOKS["nystromformer"], style.SACCADE
# variant -> (name on the axis, look, setting of `plot_style.dot`)
_VARIANTS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "1:2": ("saccade 1:2", _OURS, 1),
    "2:4": ("saccade 2:4", _OURS, 0),
    "nystrom": ("Nystromformer", _NYSTROM, 0),
    "nystrom_tuned": ("the same, a tenth more", _NYSTROM, 1),
    "nystrom_1:2_tuned": ("pruned 1:2, a tenth more", _OURS, 1),
    "nystrom_2:4_tuned": ("pruned 2:4, a tenth more", _OURS, 0),
}
# (task, length) -> accuracies of guesses on the test examples of `lra_tasks.py`: the most frequent answer, and for ListOps the most frequent
# one under the same outermost operator (`lra_tasks.guessed`)
_GUESSES = {("listops", 2048): (0.149, 0.278), ("image", 1024): (0.12,), ("retrieval", 1024): (0.5,)}
_GUESSED = (("the most frequent answer", 2), ("ListOps: by the first operator alone", 1))
Rows = list[dict[str, str]]


def draw(path: Path) -> list[Path]:
    """Draw `<name>.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["step"] == row["steps"]]
    if not rows:
        raise ValueError(f"{path} holds no run that was trained to its last step")
    return style.save(path, lambda: _figure(path.stem, rows))


def _figure(table: str, ends: Rows) -> Any:
    tasks = list(dict.fromkeys(row["task"] for row in ends))
    figure, axes = style.panels(1, len(tasks), 1.9 + marks.LINE * len(_VARIANTS))
    for axis, task in zip(axes[0], tasks, strict=True):
        own = [row for row in ends if row["task"] == task]
        found = {
            name: (look, setting, [float(row["accuracy"]) for row in own if row["variant"] == variant])
            for variant, (name, look, setting) in _VARIANTS.items()
        }
        marks.ends(axis, found, digits=3, named=axis is axes[0, 0])
        length = int(own[0]["length"])
        for place, (label, dash) in zip(_GUESSES.get((task, length), ()), _GUESSED, strict=False):
            axis.axvline(place, color=style.quiet(), linewidth=1.2, linestyle=style.DASHES[dash], label=label, zorder=1.5)
        axis.set(title=f"{task}, n = {length:,}", xlabel="test accuracy at the end", xlim=(0, None))
    counted = [{"method": row["variant"], "size": row["task"], "seed": row["seed"]} for row in ends]
    facts = [
        table,
        style.devices(ends),
        f"{int(ends[0]['parameters']) / 1e6:.2g}M parameters",
        style.seeds(counted),
        f"torch {ends[0]['torch']}",
    ]
    style.head(figure, "Long Range Arena in small, with pruned attention", facts)
    return figure


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "lra_curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
