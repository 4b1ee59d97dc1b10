"""The plots against the length: dynamic masks, sequences of 129 to 577 tokens, and against the number of layers."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any

import plot_style as style

Rows = list[dict[str, str]]
Points = list[tuple[int, float]]
_MASKS = ("gather", "decode", "gather_cpp", "gather_torch")
_DENSE = ("fa4", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa")
_SHOWN = (*_MASKS, *_DENSE, "flex")
_TITLES = {
    "dynamic_mask_length": "Dynamic masks against the length",
    "dynamic_mask_decode": "One decoded token against its history",
    "dynamic_mask_cpu": "Dynamic masks on a CPU",
}
_LONG = ("long", "fa4", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
_BOTH = {"fwd": "forward", "fwd+bwd": "forward and backward"}
_GROUP = 0.84  # of the place of a problem is taken by its bars
_POOLED = {"saccade_cls_only": style.SACCADE, "stock_cls_only": style.LOOKS["sdpa"]}
_NOTE = re.compile(r"x([\d.]+) of \w+,")

Shares = dict[tuple[str, str, str], float]  # (problem, direction, implementation) -> the roof over the time


def _read(path: Path) -> Rows:
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def _field(name: str, problem: str) -> int:
    """A size of a problem; 0 if it has none of that name."""
    found = re.search(rf"\b{name}=(\d+)\b", problem)
    return int(found[1]) if found else 0


def draw_masks(path: Path) -> list[Path]:
    """One line for each implementation and setting, a row of axes for each shape. Host times are not drawn, nor shapes and lines of one
    length; of several rows with the same line and length the fastest is."""
    rows = [r for r in _read(path) if r["backend"] in _SHOWN and not r["note"].startswith(("host", "block mask"))]
    lengths: dict[str, set[int]] = {}
    for row in rows:
        lengths.setdefault(_shape(row), set()).add(_field("Tk", row["problem"]))
    return style.save(path, lambda: _masks([r for r in rows if len(lengths[_shape(r)]) > 1]))


def _masks(rows: Rows) -> Any:
    directions = [d for d in ("fwd", "bwd") if any(r["direction"] == d for r in rows)]
    shapes = sorted({_shape(r) for r in rows}, key=lambda shape: -_field("D", shape))
    figure, axes = style.panels(len(shapes), len(directions), 1.1 + 3.0 * len(shapes), sharex=True)
    for (shape, direction), axis in zip(itertools.product(shapes, directions), axes.flat, strict=True):
        _mask_lines(axis, [r for r in rows if r["direction"] == direction and _shape(r) == shape])
        axis.set_ylabel({"fwd": "forward, ms", "bwd": "backward, ms"}[direction])
        axis.set_title(shape)
    for axis in axes[-1]:
        axis.set_xlabel("keys")
    first = rows[0]
    dtype = {"fp32": "float32"}.get(first["dtype"], first["dtype"])
    style.head(figure, _TITLES.get(first["table"], first["table"]), style.facts(first, dtype, "logarithmic scales"))
    return figure


def _mask_lines(axis: Any, rows: Rows) -> None:
    lines = lines_of(rows)
    keeps = sorted({keep for backend, keep in lines if backend in _MASKS})
    for (backend, keep), points in sorted(lines.items(), key=lambda line: (_SHOWN.index(line[0][0]), line[0][1])):
        look = style.LOOKS[backend]
        label = f"{look.name}, dense" if backend in _DENSE else f"{look.name}, keep {keep:,}"
        if backend == "flex":
            label = f"{look.name}, exact mask, keep {keep:,}"
        setting = keeps.index(keep) if backend in _MASKS else 0
        axis.plot(*zip(*points, strict=True), **style.line(look, setting), label=label)
    style.lengths_axis(axis, "")
    axis.set_yscale("log")
    style.plain_numbers(axis)


def _shape(row: dict[str, str]) -> str:
    """The properties that all lengths of a line share."""
    return " ".join(re.findall(r"\b(?:B|H|Hkv|D)=\d+", row["problem"]))


def lines_of(rows: Rows) -> dict[tuple[str, int], Points]:
    """(backend, keep or 0) -> (length, milliseconds), of random scores; a line has two lengths or more."""
    best: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        problem = row["problem"]
        if any(word in problem for word in (" local", " heavy")):
            continue
        keep = _field("keep", problem) if row["backend"] in (*_MASKS, "flex") else 0
        times = best.setdefault((row["backend"], keep), {})
        length = _field("Tk", problem)
        times[length] = min(times.get(length, float("inf")), float(row["ms_p50"]))
    return {line: sorted(times.items()) for line, times in best.items() if len(times) > 1}


def draw_long(path: Path) -> list[Path]:
    """Shares of the roof: `short_long.png` against the length, `short_long_models.png` for shapes of models."""
    rows = [r for r in _read(path) if r["backend"] in _LONG and r["direction"] in _BOTH]
    models = [r for r in rows if r["note"] or "causal" in r["problem"]]
    plain = [r for r in rows if r not in models]
    written = style.save(path, lambda: _long(plain)) if plain else []
    return written + (style.save(path.with_name(path.stem + "_models.csv"), lambda: _long_models(models)) if models else [])


def shares_of(rows: Rows) -> Shares:
    """The roof over the time of every row."""
    return {(r["problem"], r["direction"], r["backend"]): float(r["roof_ms"]) / float(r["ms_p50"]) for r in rows}


def _long(rows: Rows) -> Any:
    """A column of axes for each head dim. Lengths stand side by side, since neighbours such as 196 and 197 are what is compared."""
    shares = shares_of(rows)
    dims = sorted({_field("D", r["problem"]) for r in rows})
    figure, axes = style.panels(len(_BOTH), len(dims), 5.4, sharex="col", sharey=True)
    for line, (direction, name) in zip(axes, _BOTH.items(), strict=True):
        for axis, dim in zip(line, dims, strict=True):
            problems = {_field("Tq", r["problem"]): r["problem"] for r in rows if _field("D", r["problem"]) == dim}
            inside = [problems[length] for length in sorted(problems)]
            for backend in _LONG:
                points = [(x, shares[p, direction, backend]) for x, p in enumerate(inside) if (p, direction, backend) in shares]
                if points:
                    look = style.LOOKS[backend]
                    axis.plot(*zip(*points, strict=True), **style.line(look), label=look.name)
            axis.set_xticks(range(len(inside)), map(str, sorted(problems)))
            axis.set(title=f"D = {dim}" if line is axes[0] else "", xlabel="tokens" if line is axes[-1] else "")
        line[0].set_ylabel(f"{name},\nshare of the roof")
    axes[0, 0].set_ylim(bottom=0)  # of all: they share it
    style.head(figure, "Sequences of 129 to 577 tokens", _long_facts(rows[0]))
    return figure


def _long_models(rows: Rows) -> Any:
    """One group of bars a problem. A peer that does not take the problem leaves no gap."""
    shares = shares_of(rows)
    labels = {r["problem"]: _long_label(r) for r in rows}
    figure, axes = style.panels(len(_BOTH), 1, 5.4, sharex=True)
    width = _GROUP / max(len({r["backend"] for r in rows if r["problem"] == p}) for p in labels)
    for axis, (direction, name) in zip(axes[:, 0], _BOTH.items(), strict=True):
        for x, problem in enumerate(labels):
            shown = [b for b in _LONG if (problem, direction, b) in shares]
            for i, backend in enumerate(shown):
                look = style.LOOKS[backend]
                place = x + (i - (len(shown) - 1) / 2) * width
                axis.bar(place, shares[problem, direction, backend], width * 0.94, color=look.colour, label=look.name)
        axis.set_ylabel(f"{name},\nshare of the roof")
        axis.grid(axis="x", visible=False)
        axis.tick_params(axis="x", length=0)
    axes[-1, 0].set_xticks(range(len(labels)), labels.values())
    style.head(figure, "Shapes of models, 129 to 577 tokens", _long_facts(rows[0]))
    return figure


def _long_label(row: dict[str, str]) -> str:
    label = f"{row['note'] or 'causal'}\nS={_field('Tq', row['problem'])}"
    return f"{label}\nlengths" if " lengths" in row["problem"] else label


def _long_facts(row: dict[str, str]) -> list[str]:
    return style.facts(row, row["dtype"], "with autograd", "roof: bytes moved, or products")


def draw_depth(path: Path) -> list[Path]:
    """The gain of the CLS token alone in the last layer, against the number of layers."""
    rows = _read(path)
    return style.save(path, lambda: _depth(rows))


def points_of(rows: Rows) -> dict[tuple[str, str, str], Points]:
    """(model with its sizes, direction, backend) -> (layers, times as fast as all tokens)."""
    found: dict[tuple[str, str, str], Points] = {}
    for row in rows:
        said = _NOTE.search(row["note"])
        if said and row["backend"] in _POOLED:
            key = re.sub(r" L=\d+", "", row["problem"]), row["direction"], row["backend"]
            found.setdefault(key, []).append((_field("L", row["problem"]), float(said[1])))
    return {key: sorted(points) for key, points in found.items()}


def _depth(rows: Rows) -> Any:
    found = points_of(rows)
    models = list(dict.fromkeys(model for model, _, _ in found))
    directions = [d for d in _BOTH if any(direction == d for _, direction, _ in found)]
    figure, axes = style.panels(len(directions), len(models), 1.2 + 2.2 * len(directions), sharex=True, sharey=True)
    for line, direction in zip(axes, directions, strict=True):
        for axis, model in zip(line, models, strict=True):
            for name, look in _POOLED.items():
                if points := found.get((model, direction, name)):
                    axis.plot(*zip(*points, strict=True), **style.line(look), label=look.name)
            style.level(axis)
            axis.set(title=f"{model}, {'training step' if '+' in direction else 'forward'}")
            axis.xaxis.get_major_locator().set_params(integer=True)
        line[0].set_ylabel("times as fast")
    for axis in axes[-1]:
        axis.set_xlabel("layers")
    title = "The CLS token alone in the last layer, against all tokens"
    style.head(figure, title, style.facts(rows[0], rows[0]["dtype"], "wall clock"))
    return figure
