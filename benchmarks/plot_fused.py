"""The plot of `nm_fused` and `nm_fused_sm80`: forward throughput against the length, a panel for each head dim, causal and
not."""

from __future__ import annotations

import csv
import re
from pathlib import Path

_STYLES = {
    "mma_sp 1:2": ("#c1272d", "saccade 1:2"),
    "mma_sp 2:4": ("#e8743b", "saccade 2:4"),
    "fa4": ("#6a51a3", "FlashAttention-4, dense"),
    "sdpa_cudnn": ("#4b7f3f", "SDPA cuDNN, dense"),
    "sdpa_flash": ("#2b6cb0", "SDPA flash, dense"),
}


def draw_fused(path: Path) -> list[Path]:
    """Draw `<table>.png` beside the CSV."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["direction"] == "fwd"]
    panels = [(dim, causal) for dim in ("64", "128") for causal in (False, True)]
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.4), sharey=True, constrained_layout=True)
    for axis, (dim, causal) in zip(axes, panels, strict=True):
        for backend, points in _lines([r for r in rows if _panel(r["problem"]) == (dim, causal)]).items():
            colour, label = _STYLES[backend]
            axis.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=label)
        axis.set_title(f"D = {dim}{', causal' if causal else ''}")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axis.set_xlabel("n")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(0, 1.05 * max(float(r["tflops"]) for r in rows))  # shared, so only when all panels are drawn
    axes[0].set_ylabel("TFLOP/s, counted as dense")
    handles = {line.get_label(): line for axis in axes for line in axis.lines}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(_STYLES), frameon=False)
    figure.suptitle(
        f"{path.stem}, forward, 32,768 rows of hidden 2,048, bf16, {rows[0]['gpu']}, torch {rows[0]['torch']}", fontsize=10
    )
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return [target]


def _panel(problem: str) -> tuple[str, bool]:
    found = re.search(r"\bD=(\d+)", problem)
    return (found[1] if found else "", "causal" in problem)


def _lines(rows: list[dict[str, str]]) -> dict[str, list[tuple[int, float]]]:
    """Implementation, with our pattern from the note -> (length, TFLOP/s)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        pattern = row["note"].split(",")[0] if row["backend"] == "mma_sp" else ""
        length = re.search(r"\bTk=(\d+)", row["problem"])
        if length is not None:
            found.setdefault(f"{row['backend']} {pattern}".strip(), []).append((int(length[1]), float(row["tflops"])))
    return {name: sorted(found[name]) for name in _STYLES if name in found}
