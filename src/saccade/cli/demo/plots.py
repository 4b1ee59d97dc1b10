"""The demo's pictures, drawn with matplotlib without a display."""

from __future__ import annotations

from pathlib import Path

import torch

from saccade.cli.demo import benchmark, cls_only, dynamic, unpadded
from saccade.cli.demo.embedding import OURS, TORCH, Outcome
from saccade.cli.device import describe

_TORCH, _OURS = "#8c8c8c", "#1f6fb2"


def save(
    out: Path,
    device: torch.device,
    outcomes: list[Outcome],
    unpadded_rows: list[unpadded.Row],
    dynamic_rows: list[dynamic.Row],
    measured: tuple[benchmark.Sizes, torch.dtype, list[benchmark.Row]],
    cls_rows: list[cls_only.Row],
) -> list[Path]:
    """Write the PNG files and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    return [
        _embedding(out / "embeddings.png", describe(device), outcomes),
        _unpadded(out / "unpadded.png", describe(device), unpadded_rows),
        _dynamic(out / "dynamic_mask.png", describe(device), dynamic_rows),
        _attention(out / "attention.png", describe(device), device.type == "cpu", *measured),
        _cls(out / "cls_only.png", describe(device), cls_rows),
    ]


def _figure(columns: int, width: float):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, 4.2), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes[0]


def _finish(figure, path: Path, title: str, device_name: str) -> Path:
    import matplotlib.pyplot as plt

    figure.suptitle(f"{title}\n{device_name}", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _bars(axis, labels: list[str], series: dict[str, list[float]], colours: list[str], text: str) -> None:
    """Grouped bars with their values above them."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(labels))]
        bars = axis.bar(places, values, width, label=name, color=colours[i])
        axis.bar_label(bars, fmt=text, fontsize=7, padding=2)
    axis.set_xticks(range(len(labels)), labels)
    if len(labels) == 1:
        # otherwise a single pair of bars would fill the whole picture
        axis.set_xlim(-1.2, 1.2)
    axis.margins(y=0.2)
    axis.legend(frameon=False, loc="upper left", ncols=2)


def _embedding(path: Path, device_name: str, outcomes: list[Outcome]) -> Path:
    figure, (left, right) = _figure(2, 10)
    labels = [str(o.dtype).removeprefix("torch.") for o in outcomes]
    series = {name: [o.milliseconds[name] for o in outcomes] for name in (TORCH, OURS)}
    _bars(left, labels, series, [_TORCH, _OURS], "%.0f")
    left.set(title="time for all sentences", ylabel="milliseconds (median)", xlabel="dtype")
    right.grid(axis="x", alpha=0.3)
    for outcome, label in zip(outcomes, labels, strict=True):
        documents = outcome.vectors[TORCH]
        pairs = torch.triu_indices(len(documents), len(documents), 1)[:, ::7]
        theirs, ours = ((outcome.vectors[n] @ outcome.vectors[n].T)[tuple(pairs)] for n in (TORCH, OURS))
        name = f"{label}: embeddings {_differ(outcome.difference)}"
        right.scatter(theirs, ours, s=1, alpha=0.4, label=name, rasterized=True)
    right.axline((0, 0), slope=1, color="black", linewidth=0.6)
    right.set(title="cosine of pairs of sentences", xlabel="with torch's attention", ylabel="with saccade")
    right.legend(frameon=False, markerscale=6, fontsize=8)
    return _finish(figure, path, "all-MiniLM-L6-v2 with torch's attention and with saccade", device_name)


def _differ(difference: float) -> str:
    return f"differ by at most {difference:.0e}" if difference > 0 else "equal bit for bit"


def _unpadded(path: Path, device_name: str, rows: list[unpadded.Row]) -> Path:
    figure, (axis,) = _figure(1, 7)
    series = {name: [row.milliseconds[name] for row in rows] for name in (unpadded.PADDED, unpadded.UNPADDED)}
    labels = [f"{row.feeding}\n{row.padding:.0%} padding, {row.gain:.2f}x" for row in rows]
    _bars(axis, labels, series, [_TORCH, _OURS], "%.0f")
    axis.set(ylabel="milliseconds (median)", xlabel=f"{rows[0].sentences} sentences, {rows[0].tokens:,} tokens")
    return _finish(figure, path, "Sentence embeddings, padded and without padding: the same vectors", device_name)


def _dynamic(path: Path, device_name: str, rows: list[dynamic.Row]) -> Path:
    figure, (axis,) = _figure(1, 7)
    series = {
        "torch, all keys": [row.torch_ms for row in rows],
        f"saccade, {rows[0].keep} keys": [row.saccade_ms for row in rows],
    }
    _bars(axis, [f"{row.length:,}\n{row.gain:.2f}x" for row in rows], series, [_TORCH, _OURS], "%.3g")
    axis.set(ylabel="milliseconds (median)", xlabel="tokens, and how many times as fast")
    return _finish(figure, path, "Dynamic masks against torch's causal attention, forward", device_name)


def _attention(
    path: Path, device_name: str, on_cpu: bool, sizes: benchmark.Sizes, dtype: torch.dtype, rows: list[benchmark.Row]
) -> Path:
    directions = list(dict.fromkeys(row.direction for row in rows))
    figure, axes = _figure(len(directions), 15)
    for axis, direction in zip(axes, directions, strict=True):
        chosen = [row for row in rows if row.direction == direction]
        series = {"torch": [row.torch_ms for row in chosen], "saccade": [row.saccade_ms for row in chosen]}
        _bars(axis, [row.label.replace(" ", "\n") for row in chosen], series, [_TORCH, _OURS], "%.2g")
        axis.set(title={"fwd": "forward", "fwd+bwd": "forward + backward"}[direction], ylabel="milliseconds (median, log scale)")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("keys S; queries: S, or 1 (q=1)")
    name = str(dtype).removeprefix("torch.")
    both = "; without a GPU saccade calls torch's kernel" if on_cpu else ""
    return _finish(figure, path, f"Attention through the public function: {sizes}, {name}{both}", device_name)


def _cls(path: Path, device_name: str, rows: list[cls_only.Row]) -> Path:
    figure, axes = _figure(2, 10)
    for axis, direction, title in zip(axes, ("fwd", "fwd+bwd"), ("forward", "forward + backward"), strict=True):
        chosen = [row for row in rows if row.direction == direction]
        series = {"whole last layer": [r.whole_ms for r in chosen], "CLS-only last layer": [r.cls_ms for r in chosen]}
        labels = [f"{r.layers}\n{r.speedup:.2f}x" for r in chosen]
        _bars(axis, labels, series, [_TORCH, _OURS], "%.3g")
        axis.set(title=title, xlabel="layers of the encoder, and the speed-up", ylabel="milliseconds (median)")
    return _finish(figure, path, "saccade.nn.encoder.Encoder when only the CLS token is read", device_name)
