"""The plots of a table, light and dark. Tables without a plot of another module show how many times as fast as the best peer we are."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plot_marks as marks
import plot_style as style
from plot_lines import draw_depth, draw_long, draw_masks
from plot_models import draw_models
from plot_nm import PLOTS, draw_nm
from plot_short import draw_auto, draw_sizes

_OURS = ("short", "long", "shared_bias", "ragged", "volta", "auto")  # the first that a table has is compared
_LEFT_OUT = {"windows": ("ragged",)}  # at D = 256 `auto` takes torch's function
_PEERS = (
    "fa4", "varlen_attn", "flex", "cuequivariance", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa", "sdpa_padded", "unfused",
)  # fmt: skip
_TITLES = {
    "short_full": "Short sequences",
    "short_pooling": "One query (CLS only, pooling)",
    "short_models": "Shapes of models",
    "short_ragged": "Packed sequences of different lengths",
    "shared_bias": "A bias that rows share, and its gradient",
    "windows": "Sliding windows on packed sequences",
    "volta": "float16 without bf16 tensor cores",
}
_READ = ("dynamic_mask_documents", "dynamic_mask_sampling", "nm_fp8", "nm_masks")  # as tables: no plot of them is drawn
_WAYS = {"fwd": ("forward", 2), "fwd+bwd": ("forward and backward", 0)}
Rows = list[dict[str, str]]
Times = dict[str, dict[str, float]]  # direction -> implementation -> ms


def draw(path: Path) -> list[Path]:
    """Draw `<table>.png` and `.dark.png` beside the CSV, and the further plots that some tables have; the files written."""
    if path.stem in _READ:
        return []
    if path.stem in PLOTS:
        return draw_nm(path)
    if path.stem.startswith("dynamic_mask"):
        return draw_masks(path)
    own = {
        "models": draw_models, "encoders": draw_models, "short_auto": draw_auto, "short_sizes": draw_sizes, "short_long": draw_long,
        "pooled_depth": draw_depth,
    }  # fmt: skip
    if path.stem in own:
        return own[path.stem](path)
    with open(path, newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if _is_plain(r) and r["backend"] in (*_OURS, *_PEERS)]
    rows = [r for r in rows if r["backend"] not in _LEFT_OUT.get(path.stem, ())]
    return style.save(path, lambda: _figure(rows)) if rows else []


def _is_plain(row: dict[str, str]) -> bool:
    """Whether a row is of a call as a program makes it, eager or in a CUDA graph. Notes of `shared_bias` begin with the model."""
    return row["note"] == "" or row["table"] == "shared_bias" or _in_graph(row)


def _in_graph(row: dict[str, str]) -> bool:
    return row["note"].endswith("captured")


def newest(folder: Path, table: str) -> Path | None:
    """The CSV of a table that has most rows of the latest day. None if no machine has one.

    A CSV with fewer than three fifths of the problems of the largest is a part of a table, measured elsewhere, which no plot shows.
    """
    found = {}
    for path in sorted(folder.glob(f"*/{table}.csv")):
        if path.parent.name != "predictions":
            with open(path, newline="") as handle:
                found[path] = list(csv.DictReader(handle))
    problems = {path: len({row.get("problem") for row in rows}) for path, rows in found.items()}
    whole = [path for path in found if 5 * problems[path] >= 3 * max(problems.values())]

    def age(path: Path) -> tuple[str, int]:
        days = [row.get("date") or "" for row in found[path]]
        return max(days, default=""), days.count(max(days, default=""))

    return max(whole, key=age, default=None)


def _figure(rows: Rows) -> Any:
    groups: dict[str, list[marks.Row]] = {}
    for heading, row in _rows(rows):
        groups.setdefault(heading, []).append(row)
    if len(groups) == 1:
        groups = {"": groups.popitem()[1]}
    figure, axes = style.panels(1, 1, marks.height(groups))
    marks.gains(axes[0, 0], groups, "times as fast as the best of the others, which is named at the right; logarithmic scale")
    first = rows[0]
    title = f"{_TITLES.get(first['table'], first['table'])}: forward, and forward and backward"
    style.head(figure, title, style.facts(first, first["dtype"], "with autograd"))
    return figure


def _rows(rows: Rows) -> Iterator[tuple[str, marks.Row]]:
    """Heading and row of every problem; one that no peer ran is left out. Problems of one name have their batch beside it."""
    names = Counter(_label(problem) for problem in {r["problem"] for r in rows})
    for problem, in_graph in sorted({(r["problem"], _in_graph(r)): None for r in rows}, key=lambda found: found[1]):
        times: Times = {}
        of_problem = [r for r in rows if (r["problem"], _in_graph(r)) == (problem, in_graph)]
        for row in of_problem:
            times.setdefault(row["direction"], {})[row["backend"]] = float(row["ms_p50"])
        dots, said = [], []
        for way, (name, setting) in _WAYS.items():
            gain, best = best_of(_of(way, times))
            if best:
                dots.append(marks.Dot(gain, style.SACCADE, f"{style.SACCADE.name}, {name}", setting))
                said.append((marks.number(gain), style.LOOKS[best].name))
        if dots:
            heading, label = _label(problem)
            if names[heading, label] > 1:
                label += f", B = {int(re.findall(r'B=([0-9]+)', problem)[0]):,}"
            note = of_problem[0]["note"].split(", ")[0]  # a model's name, if the table has one
            heading = note if note not in ("", "captured") else heading
            yield (
                f"{heading}, in a CUDA graph" if in_graph else heading,
                marks.Row(label, dots, " · ".join(value for value, _ in said) + f"  {said[-1][1]}"),
            )


def _of(way: str, times: Times) -> dict[str, float]:
    """The times of one direction; of both together those measured so, or the sums."""
    if way in times:
        return times[way]
    forward, backward = times.get("fwd", {}), times.get("bwd", {})
    return {name: forward[name] + backward[name] for name in forward if name in backward}


def best_of(found: dict[str, float]) -> tuple[float, str]:
    """How many times as fast as the best peer ours is, and that peer; "" if either is missing."""
    ours, peers = [found[b] for b in _OURS if b in found], [(found[b], b) for b in _PEERS if b in found]
    return (min(peers)[0] / ours[0], min(peers)[1]) if ours and peers else (0.0, "")


def _label(problem: str) -> tuple[str, str]:
    """The heading under which a problem stands, and its name there."""
    fields = dict(re.findall(r"(\w+)=(\w+)", problem))
    more = "".join(f", {word.replace('_', ' ')}" for word in ("causal", "lengths", "bias", "key_mask") if word in problem)
    if window := re.search(r"window=\((\d+), (\d+)\)", problem):
        return f"window {window[1]}, {window[2]}{more}", f"D = {fields['D']}, longest {int(fields['longest']):,}"
    if "longest" in fields:
        mean = f"mean {fields['mean']} of " if "mean" in fields else ""
        return f"{mean}{fields['longest']} tokens, {int(fields['B']):,} sequences", f"D = {fields['D']}, H = {fields['H']}{more}"
    heading = "packed QKV" if " packed" in problem else "separate Q, K, V"
    tokens = f"{fields['Tq']} tokens" if fields["Tq"] == fields["Tk"] else f"{fields['Tq']} × {fields['Tk']}"
    if fields["Tq"] == "1":
        tokens = f"1 query, {fields['Tk']} keys"
    return heading, f"{tokens}, D = {fields['D']}" + (f"{more}, H = {fields['H']}" if more else "")
