"""Draws the CSV of `mlm.py`: the held-out perplexity of every pruned model at the end, less that of the dense run of the same seed.

python experiments/learning/mlm_curves.py out/mlm/mlm.csv
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

# attention -> (label, look, setting of `plot_style.dot`)
_ATTENTIONS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "1:2": (f"{style.SACCADE.name} 1:2", style.SACCADE, 1),
    "2:4": (f"{style.SACCADE.name} 2:4", style.SACCADE, 0),
}
_WAYS = {"pruned": "the dense weights, not tuned", "tuned": "the dense weights, tuned", "scratch": "pruned from the start"}
Rows = list[dict[str, str]]


def draw(path: Path) -> list[Path]:
    """Draw `<name>.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        ends = [row for row in csv.DictReader(handle) if row["step"] == row["steps"]]
    if not [row for row in ends if row["method"] == "dense"]:
        raise ValueError(f"{path} holds no dense run that was trained to its last step")
    return style.save(path, lambda: _figure(path.stem, ends))


def _figure(table: str, ends: Rows) -> Any:
    dense = {row["seed"]: float(row["perplexity"]) for row in ends if row["method"] == "dense"}
    figure, axes = style.panels(1, len(_WAYS), 1.7 + marks.LINE * len(_ATTENTIONS), sharex=True)
    for axis, (way, title) in zip(axes[0], _WAYS.items(), strict=True):
        found = {}
        for attention, (label, look, setting) in _ATTENTIONS.items():
            own = [row for row in ends if row["method"] == f"{attention}_{way}" and row["seed"] in dense]
            found[label] = look, setting, [float(row["perplexity"]) - dense[row["seed"]] for row in own]
        marks.ends(axis, found, named=axis is axes[0, 0], signed=True)
        axis.axvline(0, color=style.quiet(), linewidth=1.2, linestyle=style.DASHES[1], zorder=1.5)
        axis.set_title(title)
    axes[0, 1].set_xlabel("held-out perplexity at the end, less that of the dense run with the same seed")
    first = ends[0]
    facts = [
        table, first["device"], f"{int(first['parameters']) / 1e6:.3g}M parameters, {first['context']} tokens, {float(first['masked']):.0%} masked",
        style.seeds(ends), f"torch {first['torch']}",
    ]  # fmt: skip
    style.head(figure, "Masked language models with pruned attention", facts, legend=False)
    return figure


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "mlm_curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
