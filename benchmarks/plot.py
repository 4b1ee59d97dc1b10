"""The plots of a table, light and dark: our time, the peers, the roof; one for each input layout."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any

import plot_style as style
from plot_auto import draw_auto
from plot_depth import draw_depth
from plot_fused import draw_fused
from plot_lengths import draw_lengths
from plot_long import draw_long
from plot_models import draw_models
from plot_rivals import draw_rivals
from plot_sizes import draw_sizes
from plot_staged import PLOTS, draw_staged
from plot_weights import draw_weights

_BACKENDS = (
    "short",
    "shared_bias",
    "ragged",
    "volta",
    "fa4",
    "varlen_attn",
    "flex",
    "sdpa_cudnn",
    "sdpa_flash",
    "sdpa_efficient",
    "sdpa_padded",
    "unfused",
)
_TITLES = {
    "short_full": "Short sequences",
    "short_pooling": "One query (CLS only, pooling)",
    "short_models": "Shapes of models",
    "short_ragged": "Packed sequences of different lengths",
    "shared_bias": "A bias that rows share, and its gradient",
    "windows": "Sliding windows on packed sequences",
    "volta": "float16 without bf16 tensor cores",
}
_READ = ("dynamic_mask_documents", "nm_masks")  # as tables: no plot of them is drawn
_GROUP = 0.84  # of the place of a problem is taken by its bars


def draw(path: Path) -> list[Path]:
    """Draw `<table>[_packed].png` and `.dark.png` beside the CSV; the files written. Tables of the dynamic mask are plotted against
    the length; tables in `_READ` have none."""
    if path.stem in _READ:
        return []
    if path.stem.startswith("dynamic_mask"):
        return draw_lengths(path)
    if path.stem.startswith("nm_fused"):
        return draw_fused(path)
    if path.stem in PLOTS:
        return draw_staged(path)
    own = {
        "models": draw_models, "encoders": draw_models, "nm_rivals": draw_rivals, "nm_weights": draw_weights, "pooled_depth": draw_depth, "short_auto": draw_auto,
        "short_long": draw_long, "short_sizes": draw_sizes,
    }  # fmt: skip
    if path.stem in own:
        return own[path.stem](path)
    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["note"] == "" and r["direction"] in ("fwd", "bwd")]
    groups = {
        "": [r for r in rows if " packed" not in r["problem"]],
        "_packed": [r for r in rows if " packed" in r["problem"]],
    }
    written = []
    for suffix, found in groups.items():
        if found:
            written += style.save(
                path.with_name(path.stem + suffix + ".csv"), lambda suffix=suffix, found=found: _figure(suffix, found)
            )
    return written


def _labels(problems: list[str]) -> list[str]:
    """A label for each problem. Labels of packed sequences that differ in D alone share the rest, below the one in their middle."""
    if "longest" not in problems[0]:
        return [_label(p) for p in problems]
    fields = [dict(re.findall(r"(\w+)=(\w+)", p)) for p in problems]
    found = []
    for (mean, longest, batch), run in itertools.groupby(fields, key=lambda f: (f["mean"], f["longest"], f["B"])):
        dims = [f"D={f['D']}" for f in run]
        dims[len(dims) // 2] += f"\nmean {mean}\nmax {longest}\nB={int(batch):,}"
        found += dims
    return found


def _label(problem: str) -> str:
    fields = dict(re.findall(r"(\w+)=(\w+)", problem))
    tokens = f"{fields['Tq']}×{fields['Tk']}" if fields["Tq"] != fields["Tk"] else f"S={fields['Tq']}"
    label = f"{tokens}\nD={fields['D']}"
    for word in ("causal", "lengths", "bias"):
        if word in problem:
            label += f"\n{word} H={fields['H']}" if word == "bias" else f"\n{word}"
    return label


def _figure(suffix: str, rows: list[dict[str, str]]) -> Any:
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    figure, axes = style.panels(2, 1, 6.2, sharex=True)
    for axis, direction, name in zip(axes[:, 0], ("fwd", "bwd"), ("forward", "backward"), strict=True):
        _bars(axis, problems, [r for r in rows if r["direction"] == direction])
        axis.set_ylabel(f"{name}, ms")
    axes[1, 0].set_xticks(range(len(problems)), _labels(problems))
    axes[1, 0].set_xlim(-0.6, len(problems) - 0.4)
    first = rows[0]
    title = _TITLES.get(first["table"], first["table"])
    if "longest" not in first["problem"]:
        title += ": packed QKV" if suffix else ": separate Q, K, V"
    style.head(figure, title, style.facts(first, first["dtype"], "with autograd", "logarithmic scale"))
    return figure


def _bars(axis: Any, problems: list[str], rows: list[dict[str, str]]) -> None:
    """One group of bars a problem. A peer that does not take the problem leaves no gap."""
    most = max(len({r["backend"] for r in rows if r["problem"] == p and r["backend"] in _BACKENDS}) for p in problems)
    width = _GROUP / most
    for x, problem in enumerate(problems):
        times = {r["backend"]: float(r["ms_p50"]) for r in rows if r["problem"] == problem}
        shown = [b for b in _BACKENDS if b in times]
        for i, backend in enumerate(shown):
            look = style.LOOKS[backend]
            place = x + (i - (len(shown) - 1) / 2) * width
            axis.bar(place, times[backend], width * 0.94, color=look.colour, label=look.name)
        roofs = [float(r["roof_ms"]) for r in rows if r["problem"] == problem and r["roof_ms"]]
        if roofs:
            half = (len(shown) * width + 0.06) / 2
            style.roof(axis, roofs[0], x - half, x + half)
    axis.set_yscale("log")
    style.plain_numbers(axis)
    axis.grid(axis="x", visible=False)
    axis.tick_params(axis="x", length=0)
