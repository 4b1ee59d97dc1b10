"""Draws the CSV of `language.py` (perplexity at the end, a panel for each size) or of `needle.py` (accuracy over depth, a panel for each
method with a thin line for each seed).

python experiments/learning/language_curves.py out/language/language.csv
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

# method -> (label, look, setting of `plot_style.dot`)
_METHODS = {
    "dense": ("dense", style.LOOKS["dense"], 0),
    "window": ("sliding window", style.LOOKS["window"], 0),
    "dynamic_recent": (f"{style.SACCADE.name}, half newest", style.SACCADE, 1),
    "topk_recent": ("not trained, half newest", style.LOOKS["top-K"], 1),
    "dynamic": (f"{style.SACCADE.name}, dynamic mask", style.SACCADE, 0),
    "topk": ("top-K, not trained", style.LOOKS["top-K"], 0),
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
    # methods of one size stand together, though those with scores have a few parameters more
    counts = {row["size"]: min(int(r["parameters"]) for r in rows if r["size"] == row["size"]) for row in rows}
    figure, axes = style.panels(1, len(counts), 1.8 + marks.LINE * len(_METHODS), sharex=True)
    for axis, (size, count) in zip(axes[0], counts.items(), strict=True):
        own = [row for row in rows if row["size"] == size]
        found = {
            label: (look, setting, [float(row["perplexity"]) for row in own if row["method"] == method])
            for method, (label, look, setting) in _METHODS.items()
        }
        marks.ends(axis, found, digits=1, named=axis is axes[0, 0])
        axis.set(title=f"{count / 1e6:.3g}M parameters", xlabel="held-out perplexity")
    first = rows[0]
    facts = [
        table, style.devices(rows), f"w = {first['keep']} of {first['context']} keys", f"{int(first['tokens']):,} tokens", style.seeds(rows),
        f"torch {first['torch']}",
    ]  # fmt: skip
    style.head(figure, "Language models with dynamic masks", facts, legend=False)
    return figure


def _needle(table: str, rows: Rows) -> Any:
    """A panel for each method, and in it a thin line for each seed and length."""
    first, lengths = rows[0], sorted({int(row["length"]) for row in rows})
    figure, axes = style.panels(2, 3, 4.6, sharex=True, sharey=True)
    for axis, (method, (label, look, _)) in zip(axes.flat, _METHODS.items(), strict=True):
        for length, dash in zip(lengths, style.DASHES, strict=False):
            own = [row for row in rows if row["method"] == method and int(row["length"]) == length]
            for seed in dict.fromkeys(row["seed"] for row in own):
                points = [(float(row["depth"]), float(row["accuracy"])) for row in own if row["seed"] == seed]
                axis.plot(*zip(*sorted(points), strict=True), color=look.colour, linestyle=dash, linewidth=1.1)
        axis.set(title=label, ylim=(-0.03, 1.03))
    for length, dash in zip(lengths, style.DASHES, strict=False):
        trained = ", as trained" if length == int(first["context"]) else ""
        axes[0, 0].plot([], [], color=style.ink(), linestyle=dash, linewidth=1.1, label=f"n = {length:,}{trained}")
    for line in axes:
        line[0].set_ylabel("passkeys found")
    axes[-1, 1].set_xlabel("depth of the passkey, 1: just before the question")
    facts = [
        table, style.devices(rows), f"w = {first['keep']}", f"{first['digits']} digits", f"size {first['size']}, {first['steps']} steps",
        "a line for each seed", f"torch {first['torch']}",
    ]  # fmt: skip
    style.head(figure, "A passkey in real text, with dynamic masks", facts)
    return figure


def main() -> int:
    """Parse the command line and draw; an exit code."""
    return plot_command(draw, "language_curves.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
