"""Draws the CSV of `language.py` (perplexity, time and memory of a step over parameters) or of `needle.py` (accuracy over depth): one
colour per method, a line for the mean over seeds, a band from the lowest to the highest seed.

python experiments/learning/language_curves.py out/language/language.csv
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plot_style as style
from plot_command import plot_command

# method -> (label, look, setting of `plot_style.line`); drawn in this order, so the last one is on top
_METHODS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "window": ("sliding window", style.LOOKS["window"], 0),
    "topk": ("top-K, scores not trained", style.LOOKS["top-K"], 0),
    "topk_recent": ("top-K, scores not trained, half newest", style.LOOKS["top-K"], 1),
    "dynamic_recent": (f"{style.SACCADE.name}, dynamic mask, half newest", style.SACCADE, 1),
    "dynamic": (f"{style.SACCADE.name}, dynamic mask", style.SACCADE, 0),
}
_COLUMNS = {
    "perplexity": "held-out perplexity",
    "step_ms": "ms of a training step",
    "peak_mib": "peak MiB while training",
}
Rows = list[dict[str, str]]


def draw(path: Path) -> list[Path]:
    """Draw `<name>.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    if not rows:
        raise ValueError(f"{path} holds no rows yet")
    if "depth" in rows[0]:
        return style.save(path, lambda: _needle(path.stem, rows))
    ends = [row for row in rows if row["step"] == row["steps"]]
    if not ends:
        raise ValueError(f"{path} holds no run that was trained to its last step")
    return style.save(path, lambda: _language(path.stem, ends))


def _language(table: str, rows: Rows) -> Any:
    # a CPU has no peak memory to draw
    columns = [c for c in _COLUMNS if any(float(row[c]) > 0 for row in rows if c == "perplexity" or _timed(row))]
    # methods of one size stand above each other, though those with scores have a few parameters more
    counts = {row["size"]: min(int(r["parameters"]) for r in rows if r["size"] == row["size"]) for row in rows}
    rows = [{**row, "place": str(counts[row["size"]])} for row in rows]
    figure, axes = style.panels(1, len(columns), 4.1)
    for axis, column in zip(axes[0], columns, strict=True):
        for method, (label, look, setting) in _METHODS.items():
            own = [row for row in rows if row["method"] == method and (column == "perplexity" or _timed(row))]
            _band(axis, _by(own, "place", column), label, style.line(look, setting))
        axis.set_title(_COLUMNS[column])
        axis.set_xscale("log")
        axis.set_xlabel("parameters")
        axis.set_xticks(list(counts.values()), [f"{count / 1e6:.3g}M" for count in counts.values()])
        axis.set_xticks([], minor=True)
        axis.set_yscale("log")
        style.plain_numbers(axis)
    first = rows[0]
    facts = [
        table, style.devices(rows), f"w = {first['keep']} of {first['context']} keys", f"{int(first['tokens']):,} tokens", style.seeds(rows),
        f"torch {first['torch']}",
    ]  # fmt: skip
    style.head(figure, "Language models with dynamic masks", facts)
    return figure


def _needle(table: str, rows: Rows) -> Any:
    lengths = sorted({int(row["length"]) for row in rows})
    figure, axes = style.panels(1, len(lengths), 3.9, sharey=True)
    for axis, length in zip(axes[0], lengths, strict=True):
        here = [row for row in rows if int(row["length"]) == length]
        for method, (label, look, setting) in _METHODS.items():
            _band(axis, _by([r for r in here if r["method"] == method], "depth", "accuracy"), label, style.line(look, setting))
        trained = int(rows[0]["context"])
        axis.set_title(f"n = {length:,}" + (", as trained" if length == trained else f", trained at {trained:,}"))
        axis.set_xlabel("depth of the passkey, 1: just before the question")
        axis.set_ylim(-0.03, 1.03)
    axes[0, 0].set_ylabel("passkeys found")
    first = rows[0]
    facts = [
        table, style.devices(rows), f"w = {first['keep']}", f"{first['digits']} digits", f"size {first['size']}, {first['steps']} steps",
        style.seeds(rows), f"torch {first['torch']}",
    ]  # fmt: skip
    style.head(figure, "A passkey in real text, with dynamic masks", facts)
    return figure


def _timed(row: dict[str, str]) -> bool:
    """Whether the run had its GPU for itself: the peak of one that had not is of another measurement."""
    return not math.isnan(float(row["step_ms"]))


def _by(rows: Rows, x: str, y: str) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(float(row[x]), []).append(float(row[y]))
    return dict(sorted(found.items()))


def _band(axis: Any, points: dict[float, list[float]], label: str, options: dict[str, Any]) -> None:
    if not points:
        return
    places, values = list(points), list(points.values())
    axis.plot(places, [statistics.fmean(v) for v in values], **options, label=label)
    lowest, highest = ([least(v) for v in values] for least in (min, max))
    axis.fill_between(places, lowest, highest, color=options["color"], alpha=0.16, linewidth=0)


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "language_curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
