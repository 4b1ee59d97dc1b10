"""Draws accuracy over steps from the CSV of `train.py` or `listops.py`: one panel per task, one colour per variant, a thin line
per seed and a thick line for the mean.

python benchmarks/learning/curves.py out/learning/learning.csv
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

# drawn in this order, so the last one is on top
_STYLES = {
    "dense": ("dense", "#4a4a4a", "-"),
    "window": ("sliding window", "#d08b1d", "-"),
    "dynamic_frozen": ("dynamic, A = 0 frozen", "#8c6bb1", "--"),
    "dynamic_detached": ("dynamic, scores not trained", "#2b6cb0", "-"),
    "dynamic": ("dynamic mask", "#c1272d", "-"),
    "1:2": ("pruned 1:2", "#2b6cb0", "-"),
    "2:4": ("pruned 2:4", "#c1272d", "-"),
}
_LEARNED = 0.99


def draw(path: Path) -> Path:
    """`<name>.png` beside the CSV."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read(path)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(1.6 + 3.3 * len(tasks), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        _panel(axis, task, [row for row in rows if row["task"] == task])
    axes[0][0].set_ylabel("accuracy")
    handles = {line.get_label(): line for axis in axes[0] for line in axis.lines if not line.get_label().startswith("_")}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 1 + len(tasks)), frameon=False
    )
    first = rows[0]
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(
        f"{_kept(first)}; {seeds} seeds\n{first['device']}, torch {first['torch']}",
        fontsize=10,
    )
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target


def read(path: Path) -> list[dict[str, str]]:
    """Rows of the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    if not rows:
        raise ValueError(f"{path} holds no rows yet; train.py writes the first after its first evaluation")
    return rows


def _kept(row: dict[str, str]) -> str:
    if "keep" in row:
        return f"each query keeps w = {row['keep']} of n = {row['length']} keys"
    return f"up to {row['length']} tokens"


def _panel(axis, task: str, rows: list[dict[str, str]]) -> None:
    longest = max(int(row["step"]) for row in rows)
    for variant, (label, colour, dash) in _STYLES.items():
        run = [row for row in rows if row["variant"] == variant]
        steps = sorted({int(row["step"]) for row in run})
        if not steps:
            continue
        seeds = [[float(r["accuracy"]) for r in run if r["seed"] == seed] for seed in dict.fromkeys(r["seed"] for r in run)]
        for values in seeds:
            axis.plot(steps, values, color=colour, linewidth=0.6, alpha=0.4)
        mean = [sum(at) / len(at) for at in zip(*seeds, strict=True)]
        axis.plot(steps, mean, dash, color=colour, linewidth=1.9, label=label)
        # the run stopped there because it had learned the task, or it was cut off
        if steps[-1] < longest:
            axis.plot(steps[-1], mean[-1], "o" if min(v[-1] for v in seeds) >= _LEARNED else "x", color=colour, markersize=5)
    axis.set_title(task)
    axis.set_xlabel("steps (dot: learned; cross: cut off)")
    axis.set_ylim(-0.02, 1.04)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Parse the command line and draw; an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    path = parser.parse_args().csv
    try:
        print(draw(path))
    except (OSError, ValueError) as error:
        print(f"curves.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
