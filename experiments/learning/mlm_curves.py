"""Draws the CSV of `mlm.py`: held-out perplexity while training dense and pruned models from the start, and at the end of every method less that
of the dense run of the same seed.

python experiments/learning/mlm_curves.py out/mlm/mlm.csv
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plot_style as style
from plot_command import plot_command

# attention -> (label, look, setting of `plot_style.line`)
_ATTENTIONS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "1:2": (f"{style.SACCADE.name} 1:2", style.SACCADE, 1),
    "2:4": (f"{style.SACCADE.name} 2:4", style.SACCADE, 0),
}
_WAYS = {"pruned": "dense weights,\nnot tuned", "tuned": "dense weights,\ntuned", "scratch": "from the start"}
Rows = list[dict[str, str]]


def draw(path: Path) -> list[Path]:
    """Draw `<name>.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    ends = [row for row in rows if row["step"] == row["steps"]]
    if not [row for row in ends if row["method"] == "dense"]:
        raise ValueError(f"{path} holds no dense run that was trained to its last step")
    return style.save(path, lambda: _figure(path.stem, rows, ends))


def _figure(table: str, rows: Rows, ends: Rows) -> Any:
    figure, axes = style.panels(1, 2, 4.1)
    _while_training(axes[0, 0], rows)
    _at_the_end(axes[0, 1], ends)
    first = rows[0]
    facts = [
        table, first["device"], f"{int(first['parameters']) / 1e6:.3g}M parameters, {first['context']} tokens, {float(first['masked']):.0%} masked",
        style.seeds(ends), f"torch {first['torch']}",
    ]  # fmt: skip
    style.head(figure, "Masked language models with pruned attention", facts)
    return figure


def _while_training(axis: Any, rows: Rows) -> None:
    for attention, (label, look, setting) in _ATTENTIONS.items():
        own = [row for row in rows if row["method"] == (attention if attention == "dense" else f"{attention}_scratch")]
        points: dict[int, list[float]] = {}
        for row in own:
            points.setdefault(int(row["step"]), []).append(float(row["perplexity"]))
        if points:
            options = style.line(look, setting) | {"marker": ""}
            axis.plot(list(points), [statistics.fmean(v) for v in points.values()], **options, label=label)
            axis.fill_between(list(points), *([f(v) for v in points.values()] for f in (min, max)), color=look.colour, alpha=0.16, linewidth=0)  # fmt: skip
    axis.set_title("held-out perplexity, trained from the start")
    axis.set_xlabel("steps")
    axis.set_yscale("log")
    style.plain_numbers(axis)


def _at_the_end(axis: Any, ends: Rows) -> None:
    dense = {row["seed"]: float(row["perplexity"]) for row in ends if row["method"] == "dense"}
    for shift, (attention, (label, look, setting)) in zip((-0.16, 0, 0.16), _ATTENTIONS.items(), strict=True):
        for place, way in enumerate(_WAYS):
            own = [row for row in ends if row["method"] == f"{attention}_{way}" and row["seed"] in dense]
            less = [float(row["perplexity"]) - dense[row["seed"]] for row in own]
            if less:
                mean = statistics.fmean(less)
                reach = [[mean - min(less)], [max(less) - mean]]
                options = style.line(look, setting) | {"linestyle": "none"}
                axis.errorbar([place + shift], [mean], yerr=reach, capsize=3, **options, label=label)
    axis.axhline(0, color=style.quiet(), linewidth=1.2, linestyle=style.DASHES[1], zorder=1.5)
    axis.set_xticks(range(len(_WAYS)), list(_WAYS.values()))
    axis.set_xlim(-0.5, len(_WAYS) - 0.5)
    axis.set_title("perplexity at the end, less the dense run's")


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "mlm_curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
