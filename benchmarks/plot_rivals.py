"""The plot of `nm_rivals`: times as fast as unfused attention against the length, a panel for the attention alone and for each encoder,
bf16 above float32."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import plot_style as style

# backend of the table -> (look, setting of `plot_style.line`, what the label adds)
_SHOWN = {
    "fused 2:4": ("fused", 0, " fused 2:4"),
    "fused 1:2": ("fused", 1, " fused 1:2"),
    "staged 2:4": ("staged", 2, " staged"),
    "staged 1:2": ("staged", 2, " staged"),
    **{name: (name, 0, "") for name in ("sdpa", "window", "performer", "linformer", "nystromformer")},
    "nystromformer 2:4": ("nystromformer", 1, ", pruned 2:4"),
    "nystromformer 1:2": ("nystromformer", 2, ", pruned 1:2"),
}
Rows = list[dict[str, str]]


def draw_rivals(path: Path) -> list[Path]:
    """Draw `nm_rivals.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: _figure(rows))


def gains_of(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    """The gains of one panel: backend -> (length, time of unfused over its time), by length."""
    times = {(_length(r), r["backend"]): float(r["ms_p50"]) for r in rows}
    lengths = sorted({length for length, backend in times if backend == "unfused"})
    return {
        name: points
        for name in _SHOWN
        if (points := [(n, times[n, "unfused"] / times[n, name]) for n in lengths if (n, name) in times])
    }


def _figure(rows: Rows) -> Any:
    kinds, dtypes = (list(dict.fromkeys(map(part, rows))) for part in (_kind, lambda r: r["dtype"]))
    figure, axes = style.panels(len(dtypes), len(kinds), 1.4 + 2.5 * len(dtypes), sharex=True)
    for line, dtype in zip(axes, dtypes, strict=True):
        for axis, kind in zip(line, kinds, strict=True):
            for name, points in gains_of([r for r in rows if (_kind(r), r["dtype"]) == (kind, dtype)]).items():
                look, setting, more = _SHOWN[name]
                axis.plot(
                    *zip(*points, strict=True), **style.line(style.LOOKS[look], setting), label=style.LOOKS[look].name + more
                )
            style.level(axis, style.LOOKS["unfused"].name)
            axis.set_yscale("log")
            style.plain_numbers(axis)
            style.lengths_axis(axis, "n" if dtype == dtypes[-1] else "")
            axis.tick_params(axis="x", labelrotation=45)
            axis.set_title(f"{kind}, {dtype}")
        line[0].set_ylabel("times as fast")
    tokens = int(_field(rows[0], "B")) * _length(rows[0])
    more = (f"{tokens:,} tokens, D = {_field(rows[0], 'D')}", "forward", "logarithmic scales")
    style.head(figure, "Efficient transformers against unfused attention", style.facts(rows[0], *more))
    return figure


def _kind(row: dict[str, str]) -> str:
    """The title of a row's panel."""
    if row["problem"].startswith("attention"):
        return f"attention, {_field(row, 'H')} heads"
    return f"encoder, {_field(row, 'H')} heads, FF = {_field(row, 'FF')}"


def _length(row: dict[str, str]) -> int:
    return int(_field(row, "T"))


def _field(row: dict[str, str], name: str) -> str:
    return re.findall(rf"\b{name}=(\w+)", row["problem"])[0]
