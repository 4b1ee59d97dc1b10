"""The quality Q^p of pruned attention on the activations of a pretrained encoder, beside its closed forms (Dfss, Fig. 12).

    python experiments/quality/figure12.py [--out benchmarks/results/cpu] [--texts 16]        # a CPU, two minutes

Q^p (Eq. 2) is the kept share of A^p, mean over the rows of one head of one text; a row of `nm_figure12.csv` has quantiles of it over
layers, heads and texts, for one pattern, density and p. `theory` is the closed form of Proposition 4.2, which takes the scores of
a row for independent normal numbers of the standard deviation `sigma`: here the mean over all rows. The paper has BERT-large on
SQuAD and says sigma is about 1. `normal` is what such independent numbers give in as short rows, so that it differs from theory by
the length alone; `first_key` is the share of rows whose largest score is that of the first key. The encoder and its texts are those
of attention_error.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_error import Heads, activations, box, quantiles, write
from torch import Tensor

from saccade.nm_sparse import analysis

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import machine as provenance
import plot_style as style

EXPONENTS = (0.5, 1.0, 2.0, 7.0)
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.63, 0.8)
Theory = Callable[[float], float]  # of p * sigma


def ways() -> list[tuple[str, str, Callable[[Tensor], Tensor], Theory]]:
    """Kind, parameter, what is kept of scores, and the closed form; of 2:4 the paper has a lower bound alone."""
    found: list[tuple[str, str, Callable[[Tensor], Tensor], Theory]] = [
        ("N:M", p, lambda s, p=p: analysis.kept_by_pattern(s, p), analysis.one_of_two_quality) for p in ("1:2", "2:4")
    ]
    for d in DENSITIES:
        found += [
            ("top-K", f"{d:g}", lambda s, d=d: analysis.kept_by_top_k(s, d), lambda x, d=d: analysis.top_k_quality(x, d)),
            ("fixed", f"{d:g}", lambda s, d=d: analysis.kept_by_truncation(s, d), lambda x, d=d: analysis.fixed_quality(d)),
        ]
    return found


def deviation(scores: list[Tensor]) -> float:
    """The standard deviation of a row of scores, mean over all rows."""
    return torch.stack([s.std(-1).mean() for s in scores]).mean().item()


def normal_quality(keeps: Callable[[Tensor], Tensor], sigma: float, length: int, p: float) -> float:
    """Q^p of a pattern on independent normal scores, 2,000 rows of `length`."""
    scores = sigma * torch.randn(1, 2000, length, generator=torch.Generator().manual_seed(0))
    return analysis.quality(scores, keeps(scores), p).item()


def measure(layers: list[Heads]) -> list[dict[str, object]]:
    """A row for each way and p."""
    scores = [query @ key.mT for query, key, _ in layers]
    texts, heads, length, dim = layers[0][1].shape
    sigma = deviation(scores)
    first_key = torch.stack([(s.argmax(-1) == 0).float().mean() for s in scores]).mean().item()
    where = provenance.machine()
    where |= {"texts": texts, "layers": len(layers), "heads": heads, "length": length, "dim": dim}
    powers = {p: [torch.softmax(p * s, -1) for s in scores] for p in EXPONENTS}
    rows: list[dict[str, object]] = []
    for kind, parameter, keeps, theory in ways():
        kept = [keeps(s) for s in scores]
        density = torch.stack([k.float().mean() for k in kept]).mean().item()
        for p in EXPONENTS:
            # `analysis.quality` with A^p made once for all ways
            found = torch.stack([(a * k).sum(-1).mean(-1) for a, k in zip(powers[p], kept, strict=True)])
            row = {"kind": kind, "parameter": parameter, "density": density, "p": p, **quantiles(found)}
            row |= {"theory": theory(p * sigma), "normal": normal_quality(keeps, sigma, length, p), "sigma": sigma}
            rows.append({**row, "first_key": first_key, **where})
    return rows


def draw(rows: list[dict], path: Path) -> list[Path]:
    """A panel for each p, boxes over density: `.png` and `.dark.png` beside the CSV."""
    return style.save(path, lambda: _figure(rows))


def _figure(rows: list[dict]) -> Any:
    exponents = sorted({float(row["p"]) for row in rows})
    figure, axes = style.panels(1, len(exponents), 3.7, sharey=True)
    for axis, p in zip(axes[0], exponents, strict=True):
        mine = [row for row in rows if float(row["p"]) == p]
        for kind in ("top-K", "fixed"):
            look, points = style.LOOKS[kind], [row for row in mine if row["kind"] == kind]
            places = [float(row["density"]) for row in points]
            label = f"{look.name}, the first keys" if kind == "fixed" else look.name
            axis.plot(places, [float(row["theory"]) for row in points], color=look.colour, label=label)
            for place, row in zip(places, points, strict=True):
                box(axis, place, row, look.colour, 0.03)
        for place, row in zip((0.46, 0.54), (row for row in mine if row["kind"] == "N:M"), strict=True):
            box(axis, place, row, style.SACCADE.colour, 0.04)
            options = {"textcoords": "offset points", "ha": "right" if place < 0.5 else "left", "fontsize": 7.5}
            axis.annotate(row["parameter"], (place, float(row["low"])), (3 if place < 0.5 else -3, -11), **options)
            name = f"{style.SACCADE.name} N:M"
        axis.hlines(float(row["theory"]), 0.42, 0.58, colors=style.SACCADE.colour, label=name)
        axis.set_xlim(-0.03, 0.87)
        axis.set_title(f"p = {p:g}")
        axis.set_xlabel("density")
    axes[0, 0].set_ylabel("quality $Q^p$")
    first = rows[0]
    style.head(
        figure, "Quality of pruned attention, boxes: measured, lines: closed forms",
        [
            "nm_figure12", f"all-MiniLM-L6-v2, {first['layers']} layers, {first['heads']} heads, D = {first['dim']}",
            f"{first['texts']} texts of {first['length']} tokens", "CPU, float32", str(first["date"]),
        ],
    )  # fmt: skip
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"))
    parser.add_argument("--texts", type=int, default=16)
    given = parser.parse_args(arguments)
    with torch.inference_mode():
        rows = measure(activations(given.texts))
    path = write(rows, given.out / "nm_figure12.csv")
    for row in rows:
        if row["kind"] == "N:M" or row["parameter"] in ("0.02", "0.05", "0.63"):
            print(
                f"{row['kind']:6s}{row['parameter']:>5s}  p = {row['p']:g}  median {row['median']:.3f}, theory {row['theory']:.3f}"
            )
    print(path)
    print(*draw(rows, path), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
