"""The plots of N:M attention: throughput, rivals, a model end to end, memory and density, and the staged pipeline by stage."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plot_marks as marks
import plot_style as style

Rows = list[dict[str, str]]
Points = list[tuple[float, float]]
_STAGES = ("scores", "softmax", "matmul")
# name of an implementation -> (look, setting of `plot_style.line`, label)
_FUSED = {
    "mma_sp 1:2": ("mma_sp", 1, f"{style.SACCADE.name} 1:2"),
    "mma_sp 2:4": ("mma_sp", 0, f"{style.SACCADE.name} 2:4"),
    **{name: (name, 0, f"{style.LOOKS[name].name}, dense") for name in ("fa4", "sdpa_cudnn", "sdpa_flash")},
}
_RIVALS = {
    "fused 2:4": ("fused", 0, f"{style.SACCADE.name} 2:4"),
    **{name: (name, 0, style.LOOKS[name].name) for name in ("sdpa", "window", "performer", "linformer", "nystromformer")},
}
_FORMS = {
    "fused 2:4": ("fused", 0, f"{style.SACCADE.name} fused 2:4"),
    "fused 1:2": ("fused", 1, f"{style.SACCADE.name} fused 1:2"),
    "staged 2:4": ("staged", 2, f"{style.SACCADE.name} staged 2:4"),
}
_MEMORY = {
    "nm_sparse_attention": ("fused", 0, f"{style.SACCADE.name} fused"),
    "in place": ("staged", 1, f"{style.SACCADE.name} staged, in place"),
    "staged": ("staged", 2, f"{style.SACCADE.name} staged"),
}
_DENSITY = {
    **{name: (name, 0, style.LOOKS[name].name) for name in ("top-K", "fixed")},
    "staged 2:4": ("staged", 0, f"{style.SACCADE.name} staged 2:4"),
    "staged 1:2": ("staged", 1, f"{style.SACCADE.name} staged 1:2"),
}
_TITLES = {
    "nm_fused": "N:M sparse attention, forward, against the length",
    "nm_fused_sm80": "N:M sparse attention, the form for other GPUs, forward",
}


def draw_nm(path: Path) -> list[Path]:
    """Draw `<table>.png` and `.dark.png` beside the CSV of a table whose name is in `PLOTS`."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: PLOTS[path.stem](rows))


def _lines(axis: Any, shown: dict[str, tuple[str, int, str]], found: dict[str, Points]) -> None:
    """A line against the length for each implementation that is `shown` and has points."""
    for name, (look, setting, label) in shown.items():
        if name in found:
            axis.plot(*zip(*sorted(found[name]), strict=True), **style.line(style.LOOKS[look], setting), label=label)
    style.lengths_axis(axis, "n")
    axis.tick_params(axis="x", labelrotation=45)


def throughput(rows: Rows) -> dict[str, Points]:
    """Implementation, with our pattern from the note -> (length, TFLOP/s)."""
    found: dict[str, Points] = {}
    for row in rows:
        pattern = row["note"].split(",")[0] if row["backend"] == "mma_sp" else ""
        found.setdefault(f"{row['backend']} {pattern}".strip(), []).append((_length(row), float(row["tflops"])))
    return {name: sorted(found[name]) for name in _FUSED if name in found}


def _fused(rows: Rows) -> Any:
    """A panel for each head dim, causal and not."""
    figure, axes = style.panels(1, 4, 4.0, sharey=True)
    kinds = [(dim, causal) for dim in ("64", "128") for causal in (False, True)]
    for axis, (dim, causal) in zip(axes[0], kinds, strict=True):
        own = [r for r in rows if r["direction"] == "fwd" and (_fields(r)["D"], "causal" in r["problem"]) == (dim, causal)]
        _lines(axis, _FUSED, throughput(own))
        axis.set_title(f"D = {dim}{', causal' if causal else ''}")
    axes[0, 0].set(ylim=(0, None), ylabel="TFLOP/s, counted as dense")
    title = _TITLES.get(rows[0]["table"], rows[0]["table"])
    style.head(figure, title, style.facts(rows[0], "32,768 rows of hidden size 2,048", "bf16"))
    return figure


def gains_over(rows: Rows, baseline: str, number: Callable[[dict[str, str]], float]) -> dict[str, Points]:
    """Implementation -> (length, the baseline's number over its own), for lengths that have both."""
    found = {(_length(r), r["backend"]): number(r) for r in rows}
    gains: dict[str, Points] = {}
    for (n, name), own in found.items():
        if (n, baseline) in found:
            gains.setdefault(name, []).append((n, found[n, baseline] / own))
    return gains


def _rivals(rows: Rows) -> Any:
    """Attention alone, and the narrowest encoder around it, in bf16."""
    rows = [r for r in rows if r["dtype"] == "bf16"]
    kinds = list(dict.fromkeys(map(_kind_of_rival, rows)))[:2]
    figure, axes = style.panels(1, 2, 4.1, sharey=True)
    panels = []
    for axis, kind in zip(axes[0], kinds, strict=False):
        found = gains_over([r for r in rows if _kind_of_rival(r) == kind], "unfused", _time)
        _lines(axis, _RIVALS, found)
        style.level(axis)
        axis.set(yscale="log", title=kind)
        style.plain_numbers(axis)
        panels.append((axis, found))
    for axis, found in panels:  # once both have set the heights that they share
        ends = {
            label: (style.LOOKS[look].colour, max(found[name])[1]) for name, (look, _, label) in _RIVALS.items() if name in found
        }
        marks.name_ends(axis, ends | {style.LOOKS["unfused"].name: (style.quiet(), 1.0)})
    axes[0, 0].set_ylabel("times as fast as unfused dense")
    tokens = int(_fields(rows[0])["B"]) * _length(rows[0])
    more = ("bf16", f"{tokens:,} tokens, D = {_fields(rows[0])['D']}", "forward", "logarithmic scales")
    style.head(figure, "Efficient transformers, against unfused attention", style.facts(rows[0], *more), legend=False)
    return figure


def _kind_of_rival(row: dict[str, str]) -> str:
    """The title of a row's panel."""
    fields = _fields(row)
    if row["problem"].startswith("attention"):
        return f"attention, {fields['H']} heads"
    return f"an encoder around it, {fields['H']} heads, FF = {fields['FF']}"


def _end_to_end(rows: Rows) -> Any:
    """Lines over n against SDPA: a row of panels for each number of heads, a column for each width of the feed-forward layers."""
    heads, widths = (sorted({int(_fields(r)[name]) for r in rows}) for name in ("H", "FF"))
    figure, axes = style.panels(len(heads), len(widths), 1.2 + 2.2 * len(heads), sharex=True, sharey=True)
    for line, count in zip(axes, heads, strict=True):
        for axis, width in zip(line, widths, strict=True):
            own = [r for r in rows if (int(_fields(r)["H"]), int(_fields(r)["FF"])) == (count, width)]
            _lines(axis, _FORMS, gains_over(own, "sdpa", _time))
            style.level(axis, style.LOOKS["sdpa"].name)
            axis.set_title(f"{count} heads, FF = {width:,}")
        line[0].set_ylabel("times as fast as SDPA")
    more = (rows[0]["dtype"], _shared(rows, "D"))
    style.head(figure, "An encoder of four layers, forward, against SDPA", style.facts(rows[0], *more))
    return figure


def _memory(rows: Rows) -> Any:
    """The share of the dense peak that is left, from zero."""
    rows = [r for r in rows if _length(r).bit_count() == 1]  # 1,000 is beside 1,024, and as it is
    kinds = list(dict.fromkeys(map(_kind, rows)))
    figure, axes = style.panels(1, len(kinds), 3.7, sharey=True)
    for axis, kind in zip(axes[0], kinds, strict=True):
        found = gains_over([r for r in rows if _kind(r) == kind], "unfused", lambda r: 1 / _peak(r))
        _lines(axis, _MEMORY, found)
        style.level(axis, style.LOOKS["unfused"].name)
        axis.set(title=kind, ylim=(0, 1.06))
    axes[0, 0].set_ylabel("peak memory, share of unfused dense")
    title = "Peak memory, as a share of the unfused dense pipeline's"
    style.head(figure, title, style.facts(rows[0], _shared(rows, "B", "H", "D")))
    return figure


def _density(rows: Rows) -> Any:
    """Measured (solid) and theoretical (dotted) speed-up against density."""
    figure, axes = style.panels(1, 1, 4.6)
    axis = axes[0, 0]
    for name, (look, setting, label) in _DENSITY.items():
        points = sorted(tuple(map(float, re.findall(r"[\d.]+", r["note"]))) for r in rows if r["backend"] == name)
        if points:
            density, measured, theory = zip(*points, strict=True)
            options = style.line(style.LOOKS[look], setting)
            ours = {"markersize": 8, "zorder": 4} if look == "staged" else {}
            axis.plot(density, measured, **{**options, "linestyle": "-", **ours}, label=label)
            axis.plot(density, theory, linestyle=style.DASHES[2], color=options["color"], marker="x", markersize=6)
    style.level(axis, style.LOOKS["unfused"].name)
    axis.plot([], [], linestyle=style.DASHES[2], color=style.quiet(), marker="x", markersize=6, label="in theory")
    axis.set(xscale="log", yscale="log", xlabel="share of the scores that is kept", ylabel="times as fast")
    axis.xaxis.set_major_formatter("{x:g}")
    style.plain_numbers(axis)
    shared = (rows[0]["dtype"], _shared(rows, "B", "H", "Tq", "D"), "logarithmic scales")
    style.head(figure, "Speed against the share of scores kept", style.facts(rows[0], *shared))
    return figure


def _stages(rows: Rows) -> Any:
    """Stacked stages of both pipelines, as shares of dense's total."""
    kinds = list(dict.fromkeys(map(_kind, rows)))
    columns = min(3, len(kinds))
    lines = math.ceil(len(kinds) / columns)
    figure, axes = style.panels(lines, columns, 1.2 + 3.2 * lines, sharey=True)
    for axis in axes.flat[len(kinds) :]:
        axis.set_axis_off()
    for axis, kind in zip(axes.flat[: len(kinds)], kinds, strict=True):
        chosen = [r for r in rows if _kind(r) == kind]
        lengths = sorted(set(map(_length, chosen)))
        times = {(_length(r), r["backend"], r["note"]): _time(r) for r in chosen}
        for x, n in enumerate(lengths):
            whole = sum(times[n, "unfused", stage] for stage in _STAGES)
            for place, name in ((x - 0.2, "unfused"), (x + 0.2, "staged")):
                top = _stack(axis, place, name, [times[n, name, stage] / whole for stage in _STAGES])
            gain = times[n, "unfused", "total"] / times[n, "staged", "total"]
            axis.annotate(f"{gain:.1f}x", (x + 0.22, top), ha="center", va="bottom", fontsize=8.5, fontweight="bold")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axis.set(title=kind, xlabel="n")
        axis.grid(axis="x", visible=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("time, sum of dense's stages = 1")
    facts = style.facts(rows[0], _shared(rows, "H", "D"), "times as fast above the bars")
    style.head(figure, "The staged pipeline by stage", facts, columns=2)
    return figure


def _stack(axis: Any, place: float, name: str, heights: list[float]) -> float:
    """One stacked bar; its height."""
    bottom, look = 0.0, style.LOOKS[name]
    for setting, (stage, height) in enumerate(zip(_STAGES, heights, strict=True)):
        axis.bar(place, height, 0.38, bottom=bottom, color=style.shade(look, setting), label=f"{look.name}, {stage}")
        bottom += height
    return bottom


def _time(row: dict[str, str]) -> float:
    return float(row["ms_p50"])


def _peak(row: dict[str, str]) -> float:
    return float(re.search(r"peak ([\d.]+)", row["note"])[1])  # type: ignore[index]


def _kind(row: dict[str, str]) -> str:
    """Pattern and dtype."""
    problem = row["problem"]
    return f"{problem.partition('(')[2].partition(' ')[0]} {problem.rstrip(')').rsplit(' ', 1)[1]}"


def _length(row: dict[str, str]) -> int:
    return int(re.search(r"\bTk?=(\d+)", row["problem"])[1])  # type: ignore[index]


def _fields(row: dict[str, str]) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\w+)", row["problem"]))


def _shared(rows: Rows, *names: str) -> str:
    """The values that these sizes have in all rows, as "B = 24 or 48, H = 4"."""
    values = {name: sorted({int(_fields(r)[name]) for r in rows}) for name in names}
    return ", ".join(f"{name} = {' or '.join(map(str, found))}" for name, found in values.items())


PLOTS: dict[str, Callable[[Rows], Any]] = {
    "nm_fused": _fused,
    "nm_fused_sm80": _fused,
    "nm_rivals": _rivals,
    "nm_end_to_end": _end_to_end,
    "nm_memory": _memory,
    "nm_figure11": _density,
    "nm_figure5": _stages,
}
