"""The marks that many plots share: dots of times as fast from a line at 1, and dots of seeds with their mean and range."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

import plot_style as style

LINE = 0.215  # inches of a row of dots
_WIDE, _NARROW = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100), (0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4)  # ticks
_NAMED = 8.4  # points of letters beside a row


class Dot(NamedTuple):
    """One value of a row; `label` is its entry in the legend."""

    value: float
    look: style.Look
    label: str
    setting: int = 0


class Row(NamedTuple):
    """One row of dots; `said` stands at its right, the value of ours in words."""

    name: str
    dots: Sequence[Dot]
    said: str


Groups = Mapping[str, Sequence[Row]]  # the rows under their headings; the heading "" takes no line


def height(groups: Groups) -> float:
    """Inches of a figure whose only panel holds these rows."""
    return 1.35 + LINE * sum(len(rows) + bool(heading) for heading, rows in groups.items())


def gains(axis: Any, groups: Groups, label: str = "times as fast, logarithmic scale") -> None:
    """A row of dots for each problem, on a logarithmic axis. A stem leads from the line at 1 to the furthest of ours."""
    names: list[tuple[str, bool]] = []
    for heading, rows in groups.items():
        if heading:
            names.append((heading, True))
        for row in rows:
            y = len(names)
            names.append((row.name, False))
            ours = [dot.value for dot in row.dots if dot.look.colour == style.SACCADE.colour]
            if ours:
                far = max(ours, key=lambda value: abs(value - 1))
                axis.hlines(y, 1, far, colors=style.shade(style.SACCADE, 1), linewidth=1.6, zorder=2)
            for dot in sorted(row.dots, key=lambda dot: dot.look.colour == style.SACCADE.colour):
                axis.plot(dot.value, y, **style.dot(dot.look, dot.setting), label=dot.label, zorder=3)
            axis.annotate(row.said, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=_NAMED)
    axis.axvline(1, color=style.quiet(), linewidth=1.2, linestyle=style.DASHES[1], zorder=1.5)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xticks([x for x in (_WIDE if high / low > 6 else _NARROW) if low <= x <= high], minor=False)
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(label)
    _names(axis, names)


def number(value: float) -> str:
    """A value with three digits, or two beyond 100."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def ends(
    axis: Any,
    found: Mapping[str, tuple[style.Look, int, Sequence[float]]],
    digits: int = 2,
    named: bool = True,
    signed: bool = False,
) -> None:
    """A row for each method: a stroke for each seed on the line of their range, and a dot for the mean, which stands at the right."""
    for y, (look, setting, values) in enumerate(found.values()):
        if not values:
            continue
        mean = round(statistics.fmean(values), 9)  # 0.3375, of which the nearest binary number is below
        axis.hlines(y, min(values), max(values), colors=look.colour, linewidth=1.4, zorder=2)
        axis.plot(values, [y] * len(values), "|", color=look.colour, markersize=7, zorder=2)
        axis.plot(mean, y, **style.dot(look, setting), zorder=3)
        said = Decimal(str(mean)).quantize(Decimal(10) ** -(digits if abs(mean) < 100 else 0), ROUND_HALF_UP)
        options = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": _NAMED}
        axis.annotate(f"{said:+}" if signed else str(said), (1.02, y), **options)
    _names(axis, [(name if named else "", False) for name in found])


def _names(axis: Any, names: Sequence[tuple[str, bool]]) -> None:
    """The names of rows from above, headings among them in bold."""
    axis.set_yticks(range(len(names)), [name for name, _ in names])
    for label, (_, bold) in zip(axis.get_yticklabels(), names, strict=True):
        label.set(fontweight="bold" if bold else "normal", fontsize=_NAMED)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def name_ends(axis: Any, lines: Mapping[str, tuple[str, float]]) -> None:
    """The names of lines at their right ends, in their colours, moved apart where they would lie on each other: name -> (colour, height)."""
    low, high = (axis.transData.transform((0, y))[1] for y in axis.get_ylim())
    least = 0.062 * (high - low)
    places: list[float] = []
    for name, (colour, end) in sorted(lines.items(), key=lambda line: line[1][1]):
        place = axis.transData.transform((1, end))[1]
        places.append(max(place, places[-1] + least) if places else place)
        at = (places[-1] - low) / (high - low)
        axis.annotate(name, (1.02, at), xycoords="axes fraction", va="center", fontsize=_NAMED, color=colour)
