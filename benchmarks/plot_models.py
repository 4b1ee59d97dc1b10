"""The plot of `models` and of `encoders`: items per second of whole encoders relative to stock, forward and training steps side by side."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import plot_style as style

# backend of the table -> its look, the shade of it, and what its label adds
_SHOWN = {
    "saccade": (style.SACCADE, 0, ""),
    "saccade_unpadded": (style.SACCADE, 1, ", without padding"),
    "saccade_cls_only": (style.SACCADE, 2, ", CLS only in the last layer"),
    "saccade_plain": (style.SACCADE, 2, ", fuse=False"),
    "saccade_captured": (style.SACCADE, 1, ", the whole step in a graph"),
    "stock_captured": (style.LOOKS["sdpa_padded"], 0, ", in CUDA graphs"),
    "stock_best": (style.LOOKS["sdpa_padded"], 1, ", the best batch size"),
    "stock_compiled": (style.LOOKS["sdpa"], 0, ", torch.compile"),
    "varlen_unpadded": (style.LOOKS["varlen_attn"], 0, ", without padding"),
    "fa4_unpadded": (style.LOOKS["fa4"], 0, ", without padding"),
}
_DIRECTIONS = {"fwd": "forward", "fwd+bwd": "training step"}
_GROUP = 0.84  # of the place of a problem is taken by its bars

Gains = dict[tuple[str, str], dict[str, float]]  # (direction, problem) -> backend -> its speed over that of stock


def draw_models(path: Path) -> list[Path]:
    """Draw `models.png` and `.dark.png` beside the CSV; nothing if no row can be compared with stock."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    gains = gains_of(rows)
    return style.save(path, lambda: _figure(rows[0], gains)) if gains else []


def gains_of(rows: list[dict[str, str]]) -> Gains:
    """Times of stock over those of each other backend."""
    stock = {(r["direction"], r["problem"]): float(r["ms_p50"]) for r in rows if r["backend"] == "stock"}
    found: Gains = {}
    for row in rows:
        key = row["direction"], row["problem"]
        if row["backend"] in _SHOWN and key in stock:
            found.setdefault(key, {})[row["backend"]] = stock[key] / float(row["ms_p50"])
    return found


def _figure(row: dict[str, str], gains: Gains) -> Any:
    shown = {d: [(p, g) for (direction, p), g in gains.items() if direction == d] for d in _DIRECTIONS}
    columns = [d for d in _DIRECTIONS if shown[d]]
    most = max(len(shown[d]) for d in columns)
    figure, axes = style.panels(1, len(columns), 1.4 + 0.46 * most)
    for axis, direction in zip(axes[0], columns, strict=True):
        _bars(axis, shown[direction])
        axis.set_title(_DIRECTIONS[direction])
        axis.set_xlabel("items per second, relative to stock")
    style.head(figure, "Whole encoders", style.facts(row, row["dtype"], "wall clock", "stock: transformers with SDPA, padded"))
    return figure


def _bars(axis: Any, problems: list[tuple[str, dict[str, float]]]) -> None:
    """A group of horizontal bars for each problem, the first on top."""
    width = _GROUP / max(len(gains) for _, gains in problems)
    for y, (_, gains) in enumerate(problems):
        for i, backend in enumerate(name for name in _SHOWN if name in gains):
            look, shade, more = _SHOWN[backend]
            place = y + (i - (len(gains) - 1) / 2) * width
            colour = style.shade(look, shade)
            axis.barh(place, gains[backend], width * 0.94, color=colour, label=look.name + more)
    axis.axvline(1, color=style.quiet(), linewidth=1.2, linestyle=style.DASHES[1], zorder=1.5)
    axis.set_yticks(range(len(problems)), [_label(problem) for problem, _ in problems])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def _label(problem: str) -> str:
    """Model and batch, and below them the text, without its counts."""
    words = [word for word in problem.split() if not word.startswith(("items=", "mean=", "padding=", "sentences="))]
    split = next((i for i, word in enumerate(words) if word.startswith("B=")), 0) + 1
    return "\n".join(filter(None, (" ".join(words[:split]), " ".join(words[split:]).replace("_", " "))))
