"""How every plot looks: fonts, colours, markers, the roof's line, and the two variants for a light and a dark page.

An implementation has one name and one colour in all plots. Ours is always the same orange, and what tells our patterns and settings apart
is the shade of a bar or the dash of a line. The colours are of middle lightness, so that they serve on both backgrounds.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH = 9.0  # inches of every plot: a page scales all by one factor, so their letters come out equally large
DPI = 144
_COLOURS = 128  # of a PNG's palette: a third of the bytes, and no difference to be seen
_SHADES = (1.0, 0.64, 0.38)  # shares of the colour, the rest is paper
DASHES = ("-", (0, (4, 1.6)), (0, (1, 1.3)))  # lines that share one


@dataclass(frozen=True)
class Look:
    """How one implementation is shown."""

    name: str
    colour: str
    marker: str = "o"


@dataclass(frozen=True)
class Theme:
    """A variant of every plot; `suffix` ends the name of its file."""

    suffix: str
    paper: str
    ink: str
    quiet: str
    grid: str


# the dark paper is that of the site's dark scheme
THEMES = (
    Theme(".png", "#ffffff", "#24292f", "#656d76", "#e3e6ea"),
    Theme(".dark.png", "#1e2129", "#e3e6ec", "#9aa3b0", "#363c48"),
)

SACCADE = Look("saccade", "#dd6330")
LOOKS = {
    "fa4": Look("FlashAttention-4", "#8a6bc9", "s"),
    "varlen_attn": Look("torch varlen_attn", "#2f9e9e", "d"),
    "sdpa_cudnn": Look("SDPA cuDNN", "#4c9a5b", "^"),
    "sdpa_flash": Look("SDPA flash", "#4a8ac9", "v"),
    "sdpa_efficient": Look("SDPA efficient", "#c9a227", "D"),
    "sdpa": Look("SDPA", "#7a93ad", "P"),  # torch chooses the backend
    "sdpa_padded": Look("SDPA padded, with a mask", "#a3a13c", "X"),
    "flex": Look("FlexAttention", "#cb6298", "p"),
    "cuequivariance": Look("cuEquivariance", "#5f9ea0", "h"),
    "dense": Look("dense", "#8d939c", "s"),
    "unfused": Look("unfused dense", "#747c88", "s"),
    "window": Look("sliding window", "#b08a5b", "^"),
    "top-K": Look("top-K", "#6f7bd6", "s"),
    "fixed": Look("fixed pattern", "#7f9f45", "^"),
    "performer": Look("Performer", "#3f86bf", "D"),
    "performer orthogonal": Look("Performer, orthogonal", "#2a9191", "v"),
    "linformer": Look("Linformer", "#9562bb", "p"),
    "nystromformer": Look("Nystromformer", "#c95a8c", "P"),
}
# our backends, in whatever table; those in plain torch have a colour of their own
LOOKS |= dict.fromkeys(
    ("short", "volta", "long", "shared_bias", "ragged", "auto", "gather", "decode", "gather_cpp", "mma_sp", "staged", "fused"),
    SACCADE,
)
LOOKS["gather_torch"] = Look("saccade, plain torch", "#b9862f", "v")


def ink() -> str:
    """The colour of letters and axes in the variant being drawn."""
    return _setting("text.color")


def quiet() -> str:
    """The colour of what steps back: a footer, a line at 1."""
    return _setting("xtick.color")


def _setting(name: str) -> str:
    import matplotlib

    return str(matplotlib.rcParams[name])


def shade(look: Look, setting: int) -> str:
    """The colour of a bar: for a second or third setting of the same implementation it is nearer to the paper."""
    from matplotlib.colors import to_hex, to_rgb

    share = _SHADES[setting]
    return to_hex(
        [share * c + (1 - share) * p for c, p in zip(to_rgb(look.colour), to_rgb(_setting("figure.facecolor")), strict=True)]
    )


def save(path: Path, build: Callable[[], Any]) -> list[Path]:
    """Call `build` once for each variant and write its figure beside the CSV `path`, as `<name>.png` and `<name>.dark.png`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for theme in THEMES:
        with matplotlib.rc_context(_settings(theme)):
            figure = build()
            target = path.with_name(path.stem + theme.suffix)
            _write(figure, target)
            plt.close(figure)
        written.append(target)
    return written


def _write(figure: Any, target: Path) -> None:
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format="png")
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


def _settings(theme: Theme) -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor")
    quieter = ("xtick.color", "ytick.color", "axes.edgecolor")
    return {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
        "font.size": 9.5,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.labelsize": 9.5,
        "xtick.labelsize": 8.2,
        "ytick.labelsize": 8.2,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "legend.fontsize": 9.0,
        "legend.frameon": False,
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.7,
        "lines.markersize": 4.5,
        "hatch.color": theme.paper,
        **dict.fromkeys(inked, theme.ink),
        **dict.fromkeys(quieter, theme.quiet),
    }


def panels(rows: int, columns: int, height: float, width: float = WIDTH, **options: Any) -> tuple[Any, Any]:
    """A figure `height` inches high and its axes, always as a grid of two dimensions."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)


def head(figure: Any, title: str, facts: Sequence[str], columns: int = 0, legend: bool = True) -> None:
    """The title and the legend above all panels, and below them what the numbers are of; each label is listed once, in as many columns
    as fit unless `columns` says how many. Without `legend` the lines have their names at their ends."""
    found: dict[str, Any] = {}
    for axis in figure.axes if legend else ():
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = sorted(found, key=_rank)
    shown = figure.legend(
        [found[label] for label in labels], labels, loc="outside upper left", ncols=columns or _columns(labels), title=title, alignment="left",
        borderaxespad=0.2, borderpad=0.3, columnspacing=1.5, handlelength=2.5,
    )  # fmt: skip
    shown.get_title().set(fontsize=11.5, fontweight="bold")
    figure.supxlabel(" · ".join(fact for fact in facts if fact), x=0.01, ha="left", fontsize=8.5, color=quiet())


def _rank(label: str) -> int:
    """The place of an entry in every legend: ours, the peers as in `LOOKS`, what is no implementation."""
    names = [SACCADE.name, *(look.name for look in LOOKS.values())]
    fitting = [name for name in names if label == name or label.startswith((f"{name} ", f"{name},"))]
    return names.index(max(fitting, key=len)) if fitting else len(names)


def _columns(labels: list[str]) -> int:
    """Entries of the legend in one line: about 115 letters fit, and an entry's line or box takes the place of six."""
    longest = max(map(len, labels), default=0) + 6
    whole = sum(len(label) + 6 for label in labels)
    return max(1, len(labels) if whole <= 115 else 115 // longest)


def line(look: Look, setting: int = 0) -> dict[str, Any]:
    """Options of a line: its colour and marker, and for a second or third setting of the same implementation a dash and an empty
    marker."""
    paper = _setting("figure.facecolor")
    options = {"color": look.colour, "marker": look.marker, "linestyle": DASHES[setting], "markeredgewidth": 1.3}
    return options if setting == 0 else {**options, "markerfacecolor": paper}


def dot(look: Look, setting: int = 0) -> dict[str, Any]:
    """Options of a dot: its colour and marker, for a second or third setting of the same implementation paler inside."""
    inside = shade(look, setting)
    return {"color": look.colour, "marker": look.marker, "markersize": 6, "linestyle": "none", "markerfacecolor": inside}


def roof(axis: Any, height: float, left: float, right: float) -> None:
    """The time that moving the same bytes takes, as a line over the bars of one problem."""
    axis.hlines(height, left, right, colors=ink(), linestyles="solid", linewidth=1.6, label="roof: bytes moved", zorder=4)


def level(axis: Any, label: str | None = None) -> None:
    """The line where nothing is gained or lost."""
    axis.axhline(1, color=quiet(), linewidth=1.2, linestyle=DASHES[1], label=label, zorder=1.5)


def gain_colours() -> tuple[Any, Any]:
    """The colour map and norm of a map of gains, given as their base-2 logarithms: paper at 1, ours at four times as fast, torch's at
    half."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    ends = [shade(LOOKS["sdpa"], 1), _setting("figure.facecolor"), SACCADE.colour]
    return LinearSegmentedColormap.from_list("gains", ends), TwoSlopeNorm(0, vmin=-1, vmax=2)


def plain_numbers(axis: Any) -> None:
    """Times on a logarithmic axis as 0.2, 5 and 10, not as powers of ten."""
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
    axis.tick_params(axis="y", which="minor", labelsize=8.2)
    axis.grid(axis="y", which="minor", alpha=0.45)


def lengths_axis(axis: Any, label: str) -> None:
    """A logarithmic axis of lengths, each written out."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axis.set_xlabel(label)


def facts(row: dict[str, str], *more: str) -> list[str]:
    """The facts in the footer of a table: its name, the machine, more that all rows share, torch and the day."""
    return [row["table"], row["gpu"], *more, f"torch {row['torch']}", row["date"]]


def devices(rows: Sequence[dict[str, str]]) -> str:
    """The devices of some rows, for the line beneath a plot."""
    first, *others = dict.fromkeys(row["device"] for row in rows)
    return " and ".join((first, *(name.removeprefix("NVIDIA ") for name in others)))


def seeds(rows: Sequence[dict[str, str]]) -> str:
    """How many seeds a method of a size has, for the line beneath a plot; methods and sizes may differ in that."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        found.setdefault((row["method"], row["size"]), set()).add(row["seed"])
    fewest, most = (bound(map(len, found.values())) for bound in (min, max))
    if most == 1:
        return "one seed"
    return f"{most if fewest == most else f'{fewest} to {most}'} seeds, their mean and range"
