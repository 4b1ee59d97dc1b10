"""Draws accuracy over steps from the CSV of `train.py` or `listops.py`: one panel per task and length, one colour per variant, a thin line
per seed and a thick line for the mean.

python experiments/learning/curves.py out/learning/learning.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plot_style as style
from plot_command import plot_command

# variant -> (label, look, setting of `plot_style.line`); drawn in this order, so the last one is on top
_VARIANTS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "window": ("sliding window", style.LOOKS["window"], 0),
    "nystrom": (style.LOOKS["nystromformer"].name, style.LOOKS["nystromformer"], 0),
    "dynamic_frozen": (f"{style.SACCADE.name}, A = 0 frozen", style.SACCADE, 2),
    "dynamic_detached": (f"{style.SACCADE.name}, scores not trained", style.SACCADE, 1),
    "dynamic": (f"{style.SACCADE.name}, dynamic mask", style.SACCADE, 0),
    "1:2": (f"{style.SACCADE.name} 1:2", style.SACCADE, 1),
    "2:4": (f"{style.SACCADE.name} 2:4", style.SACCADE, 0),
}
_LEARNED = 0.99


def draw(path: Path) -> list[Path]:
    """Draw `<name>.png` and `.dark.png` beside the CSV."""
    rows = read(path)
    return style.save(path, lambda: _figure(path.stem, rows))


def _figure(table: str, rows: list[dict[str, str]]) -> Any:
    kinds = sorted({_kind(row) for row in rows}, key=lambda kind: (_order(rows, kind[0]), kind[1]))
    figure, axes = style.panels(1, len(kinds), 3.9, sharey=True)
    for axis, (task, length) in zip(axes[0], kinds, strict=True):
        own = [row for row in rows if _kind(row) == (task, length)]
        panel(axis, task if _lengths(rows) == 1 else f"{task}, n = {length:,}{_more(own[0])}", own)
    axes[0, 0].set_ylabel("test accuracy")
    first = rows[0]
    title = "Accuracy while training with dynamic masks" if "keep" in first else "Accuracy while training with pruned attention"
    seeds = f"{len({row['seed'] for row in rows})} seeds, thick: their mean"
    stops = "dot: all learned; cross: cut off" if _stops_early(rows) else ""
    kept = _kept(first) if _lengths(rows) == 1 else ""
    style.head(figure, title, [table, first["device"], kept, seeds, stops, f"torch {first['torch']}"])
    return figure


def _kind(row: dict[str, str]) -> tuple[str, int]:
    return row["task"], int(row["length"])


def _order(rows: list[dict[str, str]], task: str) -> int:
    return [row["task"] for row in rows].index(task)


def _lengths(rows: list[dict[str, str]]) -> int:
    return len({row["length"] for row in rows})


def _more(row: dict[str, str]) -> str:
    """The other facts that differ between lengths of one task."""
    return f", w = {row['keep']}\n{row['items']} pairs" if "items" in row else ""


def _stops_early(rows: list[dict[str, str]]) -> bool:
    """Whether some run ended before the longest of its task."""
    last: dict[tuple[tuple[str, int], str], int] = {}
    for row in rows:
        run = (_kind(row), row["variant"])
        last[run] = max(last.get(run, 0), int(row["step"]))
    return any(len({steps for (k, _), steps in last.items() if k == kind}) > 1 for kind, _ in last)


def read(path: Path) -> list[dict[str, str]]:
    """Rows of the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    if not rows:
        raise ValueError(f"{path} holds no rows yet; train.py writes the first after its first evaluation")
    return rows


def _kept(row: dict[str, str]) -> str:
    if "keep" in row:
        return f"keep {row['keep']} of n = {row['length']} keys"
    return f"up to {row['length']} tokens"


def panel(axis: Any, title: str, rows: list[dict[str, str]]) -> None:
    """One task: a thin line for each seed, a thick one for their mean."""
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
        # the run stopped there because it had learned the task, or it was cut off
        if steps[-1] < longest:
            axis.plot(
                steps[-1], mean[-1], "o" if min(v[-1] for v in seeds) >= _LEARNED else "x", color=look.colour, markersize=5.5
            )
    axis.set_title(title)
    axis.set_xlabel("steps")


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
