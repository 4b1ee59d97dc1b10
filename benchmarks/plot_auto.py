"""The plot of `short_auto`: how many times as fast as torch's own function a call with `auto` is, a dot for each row."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import plot_style as style

_MARKS = {"fwd": ("forward", -0.17, 1.0), "fwd+bwd": ("forward and backward", 0.17, 0.45)}


def draw_auto(path: Path) -> list[Path]:
    """Draw `short_auto.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: _figure(rows))


def _figure(rows: list[dict[str, str]]) -> Any:
    gains = _gains(rows)
    kinds = list(dict.fromkeys(kind for kind, _ in gains))
    figure, axes = style.panels(1, 1, 4.2)
    axis = axes[0, 0]
    style.level(axis, f"{style.LOOKS['sdpa'].name}, called directly")
    for direction, (name, shift, opacity) in _MARKS.items():
        for x, kind in enumerate(kinds):
            values = sorted(gains.get((kind, direction), []))
            places = [x + shift + 0.16 * ((i % 3) - 1) / 2 for i in range(len(values))]  # beside each other where they are close
            axis.scatter(
                places, values, s=26, color=style.SACCADE.colour, alpha=opacity, linewidths=0, label=f"{style.SACCADE.name}, {name}", zorder=3
            )  # fmt: skip
    axis.set_yscale("log")
    style.plain_numbers(axis)
    axis.grid(axis="x", visible=False)
    axis.tick_params(axis="x", length=0)
    axis.set_xticks(range(len(kinds)), [kind.replace(" ", "\n") for kind in kinds])
    axis.set_ylabel("times as fast")
    rows_drawn = sum(map(len, gains.values()))
    style.head(
        figure,
        "What a program calls, off the grid",
        style.facts(rows[0], f"{rows_drawn} rows", "wall clock, eager", "logarithmic scale"),
    )
    return figure


def _gains(rows: list[dict[str, str]]) -> dict[tuple[str, str], list[float]]:
    """(kind, direction) -> the time of torch's function over that of `auto`, for each problem; of one measured twice the last."""
    times = {(r["problem"], r["note"], r["direction"], r["backend"]): float(r["ms_p50"]) for r in rows}
    found: dict[tuple[str, str], list[float]] = {}
    for (problem, note, direction, backend), time in times.items():
        if backend == "auto":
            kind = "equal rows" if note.startswith("equal rows") else _kind(problem)
            found.setdefault((kind, direction), []).append(times[problem, note, direction, "sdpa"] / time)
    return found


def _kind(problem: str) -> str:
    """The feature that sets a row apart from plain bf16 attention; of several, the one that weighs most."""
    fields = dict(re.findall(r"(\w+)=(\w+)", problem))
    if fields["Tq"] == "1":
        return "one query"
    for word, kind in (("fp32", "float32"), ("fp16", "float16"), ("Hkv=", "grouped heads")):
        if word in problem:
            return kind
    for word in ("bias", "dropout", "causal", "lengths"):
        if word in problem:
            return word
    if "mask[" in problem:
        return "key mask" if re.search(r"mask\[\d+x1x1x", problem) else "full mask"
    return "plain bf16" if fields["Tq"] == fields["Tk"] else "Tq≠Tk"
