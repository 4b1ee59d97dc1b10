"""The plot of `nm_weights`: what pruned attention gains with dense and with 2:4 weights, beside the paper's projection, and both pruned
over both dense."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plot_style as style
from joint import PAIRS, Gains, gains

_BARS: tuple[tuple[str, Callable[[Gains], float]], ...] = (
    ("saccade, attention alone", lambda g: g.attention),
    ("saccade, attention, around 2:4 weights", lambda g: g.joint),
    ("saccade, attention and weights", lambda g: g.whole),
)
_GROUP = 0.84  # of the place of a problem is taken by its bars
Rows = list[dict[str, str]]


def draw_weights(path: Path) -> list[Path]:
    """Draw `nm_weights.png` and `.dark.png` beside the CSV."""
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    return style.save(path, lambda: _figure(rows))


def gains_of(rows: Rows) -> dict[str, dict[str, Gains]]:
    """Pruned attention -> problem -> its gains; problems whose rows are not all there are left out."""
    times: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        attention, _, weights = row["backend"].removesuffix(" weights").rpartition(", ")
        times.setdefault(row["problem"], {})[weights, attention] = float(row["ms_p50"])
    needed = {(weights, name) for weights in ("dense", "2:4") for name in ("none", *PAIRS, *PAIRS.values())}
    return {name: {p: gains(found, name) for p, found in times.items() if needed <= set(found)} for name in PAIRS}


def _figure(rows: Rows) -> Any:
    found = gains_of(rows)
    figure, axes = style.panels(len(found), 1, 1.2 + 2.4 * len(found), sharex=True)
    for axis, (name, problems) in zip(axes[:, 0], found.items(), strict=True):
        _bars(axis, list(problems.values()))
        axis.set_xticks(range(len(problems)), [_label(problem) for problem in problems])
        axis.set(title=f"{name} over {style.LOOKS[PAIRS[name]].name}", ylabel="times as fast")
    more = (rows[0]["dtype"], "forward", "D = 64", "32,768 tokens")
    style.head(figure, "2:4 weights beside 2:4 attention, an encoder of four layers", style.facts(rows[0], *more))
    return figure


def _bars(axis: Any, problems: list[Gains]) -> None:
    width = _GROUP / len(_BARS)
    for i, (label, number) in enumerate(_BARS):
        places = [x + (i - (len(_BARS) - 1) / 2) * width for x in range(len(problems))]
        axis.bar(places, [number(g) for g in problems], width * 0.94, color=style.shade(style.SACCADE, i), label=label)
    for x, found in enumerate(problems):
        # over the bar that was measured for it
        ends = x - width / 2, x + width / 2
        axis.hlines(
            found.projected, *ends, colors=style.ink(), linewidth=1.6, label="projected: the rest twice as fast", zorder=4
        )
    style.level(axis, "both dense, or attention dense")
    axis.set_xlim(-0.6, len(problems) - 0.4)
    axis.grid(axis="x", visible=False)
    axis.tick_params(axis="x", length=0)


def _label(problem: str) -> str:
    fields = dict(re.findall(r"(\w+)=(\w+)", problem))
    return f"n={int(fields['T']):,}\nH={fields['H']}\nFF={fields['FF']}"
