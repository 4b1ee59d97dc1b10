"""The plots of `models` and of `encoders`: items per second of whole encoders as multiples of stock's, and a few rows of `encoders` for a
first page."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path
from typing import Any

import plot_marks as marks
import plot_style as style

# backend of the table -> its look, the setting of it, and what its label adds
_SHOWN = {
    "saccade_captured": (style.SACCADE, 0, ""),  # of training steps, where the footer says so
    "saccade": (style.SACCADE, 0, ""),
    "saccade_loop": (style.SACCADE, 1, ", a step as a loop in Python"),
    "saccade_unpadded": (style.SACCADE, 1, ", without padding"),
    "saccade_cls_only": (style.SACCADE, 2, ", CLS only in the last layer"),
    "saccade_plain": (style.SACCADE, 2, ", fuse=False"),
    "stock_captured": (style.LOOKS["sdpa_padded"], 0, ", in CUDA graphs"),
    "stock_best": (style.LOOKS["sdpa_padded"], 1, ", the best batch size"),
    "stock_compiled": (style.LOOKS["sdpa"], 0, ", torch.compile"),
    "varlen_unpadded": (style.LOOKS["varlen_attn"], 0, ", without padding"),
    "fa4_unpadded": (style.LOOKS["fa4"], 0, ", without padding"),
}
_DIRECTIONS = {"fwd": "forward", "fwd+bwd": "training step"}
_KINDS = {"nn.TransformerEncoder": "nn.TransformerEncoder", " encode ": "from strings", " predict ": "from strings"}
_TEXT = ("MiniLM", "BERT", "XLM", "ModernBERT", "T5")
_WHOLE = "nn.TransformerEncoder"  # has one row: the mean of its shapes
# of `encoders_head`
_HEAD = {
    "fwd": ("MiniLM B=32 ", "MiniLM B=2048 ", "BERT-base B=32 sent", "BERT-base B=256 pass", "XLM-R-base B=512 "),
    "fwd+bwd": ("MiniLM B=64 ", "BERT-base B=64 "),
}
_HEAD_BACKENDS = ("saccade_captured", "saccade", "stock_captured", "varlen_unpadded")

Gains = dict[tuple[str, str], dict[str, float]]  # (direction, problem) -> backend -> its speed over that of stock


def draw_models(path: Path) -> list[Path]:
    """Draw `<table>.png` and `.dark.png` beside the CSV, and `encoders_head`; nothing if no row can be compared with stock."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    gains = gains_of(rows)
    if not gains:
        return []
    days = sorted({row["date"] for row in rows})
    shown = rows[0] | {"date": " to ".join(dict.fromkeys((days[0], days[-1])))}
    written = style.save(path, lambda: _figure(shown, gains))
    if path.stem == "encoders" and (head := head_of(gains)):
        written += style.save(path.with_name(f"{path.stem}_head.csv"), lambda: _head(rows[0], head))
    return written


def gains_of(rows: list[dict[str, str]]) -> Gains:
    """Times of stock over those of each other backend; beside a captured step ours is called `saccade_loop`."""
    stock = {(r["direction"], r["problem"]): float(r["ms_p50"]) for r in rows if r["backend"] == "stock"}
    found: Gains = {}
    for row in rows:
        key = row["direction"], row["problem"]
        if row["backend"] in _SHOWN and key in stock:
            found.setdefault(key, {})[row["backend"]] = stock[key] / float(row["ms_p50"])
    for gains in found.values():
        if "saccade_captured" in gains and "saccade" in gains:
            gains["saccade_loop"] = gains.pop("saccade")
    return found


def head_of(gains: Gains) -> Gains:
    """The rows of a first page, in bfloat16, with ours and the nearest peers."""
    chosen: Gains = {}
    for (direction, problem), found in gains.items():
        plain = not re.search(r"float32|autocast|compiled", problem)
        shown = {name: found[name] for name in _HEAD_BACKENDS if name in found}
        if plain and problem.startswith(_HEAD[direction]) and shown.keys() & {"saccade", "saccade_captured"}:
            chosen[direction, problem] = shown
    return chosen if len(chosen) > 3 else {}


def _figure(row: dict[str, str], gains: Gains) -> Any:
    groups = _groups(gains)
    figure, axes = style.panels(1, 1, marks.height(groups) + 0.3)
    marks.gains(axes[0, 0], groups, "items per second, as multiples of stock's, logarithmic scale; at the right ours")
    style.head(
        figure, "Whole encoders", style.facts(row, row["dtype"], "stock: transformers with SDPA, padded", _captured(gains))
    )
    return figure


def _head(row: dict[str, str], gains: Gains) -> Any:
    groups = _groups(gains)
    figure, axes = style.panels(1, 1, marks.height(groups) + 0.5, width=6.4)
    marks.gains(axes[0, 0], groups, "times as fast as stock transformers, logarithmic scale")
    style.head(figure, "A text encoder after saccade.optimize(model)", [row["gpu"], row["dtype"], _captured(gains)], columns=2)
    return figure


def _captured(gains: Gains) -> str:
    return "our training steps: one graph" if any("saccade_captured" in found for found in gains.values()) else ""


def _groups(gains: Gains) -> dict[str, list[marks.Row]]:
    """Rows by kind and direction; those of `nn.TransformerEncoder` as one, with a dot each."""
    groups: dict[str, list[marks.Row]] = {}
    whole: dict[str, list[float]] = {}
    for (direction, problem), found in gains.items():
        if problem.startswith(_WHOLE):
            whole.setdefault(direction, []).append(found["saccade"])
        else:
            shown = [name for name in _SHOWN if name in found]
            dots = [
                marks.Dot(found[name], _SHOWN[name][0], _SHOWN[name][0].name + _SHOWN[name][2], _SHOWN[name][1]) for name in shown
            ]
            groups.setdefault(f"{_kind(problem)}, {_DIRECTIONS[direction]}", []).append(
                marks.Row(
                    label_of(problem), dots, " · ".join(marks.number(dot.value) for dot in dots if dot.look is style.SACCADE)
                )
            )
    for direction, values in whole.items():
        mean = statistics.geometric_mean(values)
        dots = [marks.Dot(value, style.SACCADE, style.SACCADE.name) for value in values]
        row = marks.Row(f"{len(values)} shapes, {_DIRECTIONS[direction]}", dots, f"{mean:.2f}, mean")
        groups.setdefault(_WHOLE, []).append(row)
    return groups


def _kind(problem: str) -> str:
    kind = next((kind for word, kind in _KINDS.items() if word in problem), "")
    return kind or ("text" if problem.startswith(_TEXT) else "images")


def label_of(problem: str) -> str:
    """Model, batch and what the row has of its own, without its counts."""
    label = re.sub(r" (items|mean|padding)=[\d.]+", "", problem)
    label = re.sub(
        r" B=(\d+) (sentences|passages|images)(=\d+)?",
        lambda m: f", {int(m[1]):,} {m[2].removesuffix('s') if m[1] == '1' else m[2]}",
        label,
    )
    label = re.sub(r" (\w+) from strings texts=(\d+)", lambda m: f", {m[1]} {int(m[2]):,} texts", label)
    label = re.sub(r" (B|S|size)=(\d+)", r", \1 = \2", label.replace(" tokens=", " S="))
    return re.sub(r" (float32|bfloat16|autocast|compiled|cls_only)", r", \1", label).replace("_", " ")
