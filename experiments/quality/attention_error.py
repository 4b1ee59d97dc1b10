"""How far pruned, low-rank and random-feature attention lie from dense attention on the activations of a pretrained encoder.

    python experiments/quality/attention_error.py [--out benchmarks/results/cpu] [--texts 16]        # a CPU, a minute

Q, K and V are those of every layer and head of all-MiniLM-L6-v2 (6 layers, 12 heads, D = 32), which runs densely on texts of 256
tokens. For each head of each text a mechanism computes O', and its error is `|O' - O| / |O|` over the whole `[256, 32]` matrix. One
row of `attention_error.csv` is a mechanism on a layer (or on all): quantiles of that error over heads and texts.

Nothing is trained for any mechanism, which is the point for those that may replace dense attention in a model as it is, and
a handicap for the others. Their settings are:

    window          the nearest keys on both sides, 128 in all where there are as many
    performer       orthogonal positive features, drawn for each head; m = d ln d = 111, and 512
    linformer       64 pooled keys and values; its projections are learned, here means of 4 keys, which its paper names too
    nystromformer   64 landmarks, means of 4 tokens, and its six iterations for the pseudo-inverse; without its learned convolution.
                    (An exact pseudo-inverse is worse: the small matrix is nearly singular, and what is exact there is large.)
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.cli.demo.encoder import Batch, Encoder
from saccade.cli.demo.sentences import sentences
from saccade.nm_sparse import analysis

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import machine as provenance
import plot_style as style
from approximations import Mechanism, dense, error, linformer, nystromformer, performer, pruned

LENGTH = 256
QUANTILES = {"low": 0.05, "first": 0.25, "median": 0.5, "third": 0.75, "high": 0.95}
_NAME = "saccade_activations"
Heads = tuple[Tensor, Tensor, Tensor]


class Capture:
    """Dense attention in plain torch, registered with transformers; it keeps Q (scaled by 1 / sqrt d), K and V of every layer."""

    def __init__(self) -> None:
        self.layers: list[Heads] = []

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object
    ) -> tuple[Tensor, None]:
        """The protocol of transformers; all texts are equally long, so there is no mask."""
        query = query * query.shape[-1] ** -0.5
        self.layers.append((query, key, value))
        return dense(query, key, value).transpose(1, 2).contiguous(), None


def activations(count: int, length: int = LENGTH) -> list[Heads]:
    """Q, K and V `[count, heads, length, D]` of each layer on `count` texts of `length` tokens of Python's language reference."""
    from transformers import AttentionInterface

    capture = Capture()
    AttentionInterface.register(_NAME, capture)
    encoder = Encoder(torch.device("cpu"), torch.float32)
    tokenizer = encoder.tokenizer
    stream: list[int] = []
    for text in sentences(4 * count * length // 20):
        stream += tokenizer(text, add_special_tokens=False)["input_ids"]
    body = length - 2
    if len(stream) < count * body:
        raise SystemExit(f"--texts is {count}; the reference has tokens for {len(stream) // body} texts")
    tokens = torch.tensor(stream[: count * body]).view(count, body)
    ends = [torch.full((count, 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    tokens = torch.cat((ends[0], tokens, ends[1]), 1)
    encoder.use(_NAME)
    encoder.embed([Batch(torch.arange(count), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})])
    return capture.layers


def near(scores: Tensor, density: float) -> Tensor:
    """The keys around the query of each row, `density` of all in rows that are not cut by an end."""
    length = scores.shape[-1]
    places = torch.arange(length)
    distance = places - places[:, None]
    half = round(density * length / 2)
    return ((distance >= -half) & (distance < half)).expand_as(scores)


def mechanisms(length: int = LENGTH, dim: int = 32) -> dict[tuple[str, str], Mechanism]:
    """By kind and parameter; for pruning the parameter is the density or the pattern."""
    few = round(dim * math.log(dim))
    found: dict[tuple[str, str], Mechanism] = {
        ("N:M", p): pruned(lambda s, p=p: analysis.kept_by_pattern(s, p)) for p in ("2:4", "1:2")
    }
    for density in (0.5, 0.2, 0.05):
        found["top-K", f"{density:g}"] = pruned(lambda s, d=density: analysis.kept_by_top_k(s, d))
    for density in (0.63, 0.5):
        found["fixed", f"{density:g}"] = pruned(lambda s, d=density: analysis.kept_by_truncation(s, d))
    found["window", "0.5"] = pruned(lambda s: near(s, 0.5))
    found |= {("performer", str(m)): performer(m) for m in (few, 512)}
    found["linformer", str(length // 4)] = linformer(length // 4)
    found["nystromformer", str(length // 4)] = nystromformer(length // 4)
    return found


def quantiles(values: Tensor) -> dict[str, float]:
    """The five numbers of a box, and the mean."""
    found = torch.quantile(values.flatten().double(), torch.tensor(list(QUANTILES.values()), dtype=torch.float64))
    return {**dict(zip(QUANTILES, found.tolist(), strict=True)), "mean": values.mean().item()}


def measure(layers: list[Heads]) -> list[dict[str, object]]:
    """A row for each mechanism and layer, and one for all layers together."""
    texts, heads, length, dim = layers[0][0].shape
    where = provenance.machine()
    where |= {"texts": texts, "heads": heads, "length": length, "dim": dim}
    expected = [dense(*layer) for layer in layers]
    rows: list[dict[str, object]] = []
    for (kind, parameter), attend in mechanisms(length, dim).items():
        errors = [error(attend(*layer), whole) for layer, whole in zip(layers, expected, strict=True)]
        for layer, values in [("all", torch.stack(errors)), *((str(i), x) for i, x in enumerate(errors))]:
            rows.append({"kind": kind, "parameter": parameter, "layer": layer, **quantiles(values), **where})
        print(f"{kind:14s}{parameter:>5s}  median error {rows[-len(layers) - 1]['median']:.3f}", flush=True)
    return rows


def write(rows: list[dict[str, object]], path: Path) -> Path:
    """Write rows as a CSV, in a folder that is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return path


def draw(rows: list[dict], path: Path) -> list[Path]:
    """A box for each mechanism over all layers: `.png` and `.dark.png` beside the CSV."""
    return style.save(path, lambda: _figure(rows))


def box(axis: Any, place: float, row: dict, colour: str, width: float = 0.6) -> None:
    """A box of the quantiles of a row, with whiskers from 5 to 95 %."""
    ends = ("low", "first", "median", "third", "high")
    low, first, median, third, high = (float(row[name]) for name in ends)
    stats = [{"whislo": low, "q1": first, "med": median, "q3": third, "whishi": high}]
    line = {"color": colour, "linewidth": 1.3}
    filled = {"facecolor": colour, "edgecolor": colour, "alpha": 0.45}
    axis.bxp(
        stats, positions=[place], widths=width, showfliers=False, patch_artist=True, manage_ticks=False,
        boxprops=filled, whiskerprops=line, capprops=line, medianprops={"color": style.ink(), "linewidth": 1.5},
    )  # fmt: skip


def _figure(rows: list[dict]) -> Any:
    figure, axes = style.panels(1, 1, 4.0)
    axis, shown = axes[0, 0], [row for row in rows if row["layer"] == "all"]
    names = {"fixed": "first keys", "window": "window"}
    labels = []
    for place, row in enumerate(shown):
        look = style.SACCADE if row["kind"] == "N:M" else style.LOOKS[row["kind"]]
        box(axis, place, row, look.colour)
        labels.append(f"{names.get(row['kind'], look.name)}\n{row['parameter']}")
    axis.set_xticks(range(len(labels)), labels)
    axis.tick_params(axis="x", labelsize=7.2)
    axis.set_yscale("log")
    style.plain_numbers(axis)
    axis.set_ylabel("|O' - O| / |O|")
    first = shown[0]
    style.head(
        figure, "Error of attention in a pretrained encoder, nothing trained",
        [
            "attention_error", f"all-MiniLM-L6-v2, 6 layers, {first['heads']} heads, D = {first['dim']}",
            f"{first['texts']} texts of {first['length']} tokens", "CPU, float32", first["date"],
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
    path = write(rows, given.out / "attention_error.csv")
    print(path)
    print(*draw(rows, path), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
