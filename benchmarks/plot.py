"""A plot of a table: our time, the peers, the roof; one PNG for each input layout."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from plot_fused import draw_fused
from plot_lengths import draw_lengths
from plot_staged import PLOTS, draw_staged

_COLOURS = {
    "short": "#c1272d",
    "fa4": "#6a51a3",
    "sdpa_cudnn": "#4b7f3f",
    "sdpa_flash": "#2b6cb0",
    "sdpa_efficient": "#d08b1d",
    "volta": "#c1272d",
    "unfused": "#777777",
    "ragged": "#c1272d",
    "varlen_attn": "#2b6cb0",
    "sdpa_padded": "#4b7f3f",
}
_NAMES = {
    "short": "saccade",
    "fa4": "FlashAttention-4",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_flash": "SDPA flash",
    "sdpa_efficient": "SDPA efficient",
    "volta": "saccade",
    "unfused": "unfused",
    "ragged": "saccade",
    "varlen_attn": "torch varlen_attn",
    "sdpa_padded": "SDPA, padded with a mask",
}


def draw(path: Path) -> list[Path]:
    """Draw `<table>[_packed].png` beside the CSV; the files written. Tables of the dynamic mask are plotted against the
    length."""
    if path.stem.startswith("dynamic_mask"):
        return draw_lengths(path)
    if path.stem.startswith("nm_fused"):
        return draw_fused(path)
    if path.stem in PLOTS:
        return draw_staged(path)
    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["note"] == "" and r["direction"] in ("fwd", "bwd")]
    groups = {
        "": [r for r in rows if " packed" not in r["problem"]],
        "_packed": [r for r in rows if " packed" in r["problem"]],
    }
    return [_figure(path, suffix, found) for suffix, found in groups.items() if found]


def _label(problem: str) -> str:
    fields = dict(re.findall(r"(\w+)=(\w+)", problem))
    if "longest" in fields:
        return f"{fields['mean']} of {fields['longest']}\nD={fields['D']}\nB={fields['B']}"
    label = (
        f"{fields['Tq']}×{fields['Tk']}\nD={fields['D']}"
        if fields["Tq"] != fields["Tk"]
        else f"S={fields['Tq']}\nD={fields['D']}"
    )
    for word in ("causal", "lengths", "bias"):
        if word in problem:
            label += f"\n{word} H={fields['H']}" if word == "bias" else f"\n{word}"
    return label


def _figure(path: Path, suffix: str, rows: list[dict[str, str]]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problems = list(dict.fromkeys(r["problem"] for r in rows))
    backends = [b for b in _COLOURS if any(r["backend"] == b for r in rows)]
    figure, axes = plt.subplots(2, 1, figsize=(12, 8), sharex=True, constrained_layout=True)
    for axis, direction, title in zip(axes, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        times = {(r["problem"], r["backend"]): float(r["ms_p50"]) for r in rows if r["direction"] == direction}
        roofs = {r["problem"]: float(r["roof_ms"]) for r in rows if r["direction"] == direction and r["roof_ms"]}
        width = 0.8 / len(backends)
        for i, backend in enumerate(backends):
            xs = [x + (i - (len(backends) - 1) / 2) * width for x, p in enumerate(problems) if (p, backend) in times]
            heights = [times[p, backend] for p in problems if (p, backend) in times]
            axis.bar(xs, heights, width, color=_COLOURS[backend], label=_NAMES[backend])
        for x, problem in enumerate(problems):
            if problem in roofs:
                axis.hlines(roofs[problem], x - 0.45, x + 0.45, colors="black", linestyles="dashed", linewidth=1.2,
                            label="streaming roof" if x == 0 else None)  # fmt: skip
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
        axis.set_ylabel(f"{title}, ms (log)")
        axis.grid(axis="y", which="both", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(ncols=len(backends) + 1, fontsize=9, loc="upper left", frameon=False, bbox_to_anchor=(0, 1.13))
    axes[1].set_xticks(range(len(problems)), [_label(p) for p in problems])
    first = rows[0]
    inputs = "packed qkv" if suffix else "separate q, k, v"
    if "longest" in first["problem"]:
        inputs = "packed tokens, mean length of the longest"
    figure.suptitle(
        f"{first['table']}: {inputs}, {first['dtype']}, end to end with autograd, {first['gpu']}, torch {first['torch']}",
        fontsize=11,
    )
    target = path.with_name(path.stem + suffix + ".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target
