"""Draws the CSV of `train.py` or `listops.py`: accuracy over steps at several lengths of one task, with a thin line for each seed and a thick
one for their mean, or else what every seed had when its training ended.

python experiments/learning/curves.py out/learning/learning.csv
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

# variant -> (label, look, setting of `plot_style.line`); drawn in this order, so the last line is on top. `dynamic_frozen` is the window
_VARIANTS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "window": ("sliding window", style.LOOKS["window"], 0),
    "dynamic_detached": (f"{style.SACCADE.name}, scores not trained", style.SACCADE, 1),
    "dynamic": (f"{style.SACCADE.name}, dynamic mask", style.SACCADE, 0),
    "1:2": (f"{style.SACCADE.name} 1:2", style.SACCADE, 1),
    "2:4": (f"{style.SACCADE.name} 2:4", style.SACCADE, 0),
}
_LEARNED = 0.99
Rows = list[dict[str, str]]


def draw(path: Path) -> list[Path]:
    """Draw `<name>.png` and `.dark.png` beside the CSV."""
    rows = read(path)
    return style.save(path, lambda: _figure(path.stem, rows))


def _figure(table: str, rows: Rows) -> Any:
    kinds = sorted({_kind(row) for row in rows}, key=lambda kind: (_order(rows, kind[0]), kind[1]))
    several = len({length for _, length in kinds}) > 1
    first, held = rows[0], [variant for variant in _VARIANTS if any(row["variant"] == variant for row in rows)]
    height = 3.9 if several else 1.6 + marks.LINE * len(held)
    figure, axes = style.panels(1, len(kinds), height, sharex=not several, sharey=several)
    for axis, (task, length) in zip(axes[0], kinds, strict=True):
        own = [row for row in rows if _kind(row) == (task, length)]
        if several:
            _lines(axis, f"{task}, n = {length:,}{_more(own[0])}", own)
        else:
            marks.ends(axis, ended(own, held), digits=2 if "keep" in first else 3, named=axis is axes[0, 0])
            axis.set(title=task, xlabel="test accuracy at the end", xlim=(0, None))
    axes[0, 0].set_ylabel("test accuracy" if several else "")
    title = "Accuracy after training with " + ("dynamic masks" if "keep" in first else "pruned attention")
    seeds = f"{len({row['seed'] for row in rows})} seeds"
    drawn = "thick: their mean; dot: all learned; cross: stopped before" if several else "dot: their mean"
    kept = (
        ""
        if several
        else f"keep {first['keep']} of n = {first['length']} keys"
        if "keep" in first
        else f"up to {first['length']} tokens"
    )
    style.head(figure, title, [table, first["device"], kept, seeds, drawn, f"torch {first['torch']}"], legend=several)
    return figure


def _kind(row: dict[str, str]) -> tuple[str, int]:
    return row["task"], int(row["length"])


def _order(rows: Rows, task: str) -> int:
    return [row["task"] for row in rows].index(task)


def _more(row: dict[str, str]) -> str:
    """The other facts that differ between lengths of one task."""
    return f", w = {row['keep']}\n{row['items']} pairs" if "items" in row else ""


def read(path: Path) -> Rows:
    """Rows of the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    if not rows:
        raise ValueError(f"{path} holds no rows yet; train.py writes the first after its first evaluation")
    return rows


def ended(rows: Rows, variants: list[str]) -> dict[str, tuple[style.Look, int, list[float]]]:
    """For `plot_marks.ends`: the last accuracy of every seed, by the label of its variant."""
    found = {}
    for variant in variants:
        label, look, setting = _VARIANTS[variant]
        last = {
            row["seed"]: float(row["accuracy"]) for row in rows if row["variant"] == variant
        }  # rows are in the order of steps
        found[label] = look, setting, list(last.values())
    return found


def _lines(axis: Any, title: str, rows: Rows) -> None:
    """One task at one length: a thin line for each seed, a thick one for their mean."""
    longest = max(int(row["step"]) for row in rows)
    for variant, (label, look, setting) in _VARIANTS.items():
        run = [row for row in rows if row["variant"] == variant]
        steps = sorted({int(row["step"]) for row in run})
        if not steps:
            continue
        seeds = [[float(r["accuracy"]) for r in run if r["seed"] == seed] for seed in dict.fromkeys(r["seed"] for r in run)]
        plain = {**style.line(look, setting), "marker": ""}
        for values in seeds:
            axis.plot(steps, values, **plain | {"linewidth": 0.6}, alpha=0.45)
        mean = [sum(at) / len(at) for at in zip(*seeds, strict=True)]
        axis.plot(steps, mean, **plain, label=label)
        if steps[-1] < longest:
            mark = "o" if min(v[-1] for v in seeds) >= _LEARNED else "x"
            axis.plot(steps[-1], mean[-1], mark, color=look.colour, markersize=5.5)
    axis.set(title=title, xlabel="steps")


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
