"""Measures how pruned attention changes a pretrained encoder without any training: all-MiniLM-L6-v2 on real sentences and
paragraphs.

    python experiments/quality/minilm.py [--out benchmarks/results/cpu] [--sentences 240]        # a CPU, minutes

Every attention layer is pruned: N:M by `attn_implementation="saccade_nm"`, alone and with keys that are never pruned (N:M + dense:
`dense_first`, `dense_recent`), beside the largest K of each row (top-K) and the first keys of each row (fixed) over densities. This
encoder sees both ways, so that recent keys are those before a token and its own group, and none of those after it. One row of `nm_quality_minilm.csv` is one way of pruning:

    quality_<p>    Q^p of Dfss, Eq. 2: the kept share of the dense model's A^p, mean over layers, heads and rows, at several p
    mean_cosine, least_cosine    between the dense and the pruned embedding of a text
    spearman       rank correlation of the cosines of all pairs of texts, dense against pruned
    nearest        share of texts whose nearest other text stays the same

The picture repeats the argument of the paper's Fig. 13: take the p at which Q^p orders top-K and fixed as their agreement with
dense does; N:M should then lie on the same line. (The paper has F1 of BERT-large on SQuAD there, and p = 6.5.)
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.cli.demo.encoder import Batch, Encoder
from saccade.cli.demo.sentences import sentences
from saccade.integrations.transformers import register_nm_sparse
from saccade.nm_sparse import analysis

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plot_style as style
from machine import machine

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.63, 0.75, 0.9)
PATTERNS = ("1:2", "2:4", "4:8", "1:4", "2:8", "3:4", "1:8")
# (dense_first, dense_recent) beside some of the patterns
DENSE_PATTERNS, DENSE_KEYS = ("1:2", "2:4", "1:4"), ((4, 0), (0, 16), (4, 16), (4, 32))
EXPONENTS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.5, 8.0, 10.0)
Keeps = Callable[[Tensor], Tensor]
_NAME = "saccade_quality"


@dataclass(frozen=True)
class Way:
    """A way of pruning: its kind and parameter, what it keeps of scores, and the attention that transformers runs."""

    kind: str
    parameter: str
    keeps: Keeps
    attention: str


@dataclass(frozen=True)
class Agreement:
    """The agreement of pruned embeddings with dense ones; the columns above."""

    mean_cosine: float
    least_cosine: float
    spearman: float
    nearest: float


class Probe:
    """Attention in plain torch, registered with transformers: it prunes by `keeps`, and passes every layer's scores to `sees`."""

    def __init__(self) -> None:
        self.keeps: Keeps | None = None
        self.sees: Callable[[Tensor], None] | None = None

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object
    ) -> tuple[Tensor, None]:
        """The protocol of transformers; texts are batched without padding, so there is no mask."""
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if self.sees is not None:
            self.sees(scores)
        if self.keeps is not None:
            scores = scores.masked_fill(~self.keeps(scores), float("-inf"))
        return (torch.softmax(scores, -1) @ value).transpose(1, 2).contiguous(), None


def ways() -> list[Way]:
    """All ways of pruning that are compared."""
    found = [Way("N:M", p, lambda s, p=p: analysis.kept_by_pattern(s, p), _attention(p)) for p in PATTERNS]
    for p, dense in itertools.product(DENSE_PATTERNS, DENSE_KEYS):
        keeps = functools.partial(analysis.kept_by_pattern, pattern=p, dense_first=dense[0], dense_recent=dense[1])
        found.append(Way("N:M + dense", f"{p} first {dense[0]} recent {dense[1]}", keeps, _attention(p, *dense)))
    for kind, keep in (("top-K", analysis.kept_by_top_k), ("fixed", first_keys)):
        found += [Way(kind, f"{d:g}", lambda s, d=d, keep=keep: keep(s, d), _NAME) for d in DENSITIES]
    return found


def _attention(pattern: str, dense_first: int = 0, dense_recent: int = 0) -> str:
    """The name under which transformers finds a pattern."""
    return f"saccade_nm_{pattern.replace(':', '_')}_{dense_first}_{dense_recent}"


def register_patterns() -> None:
    """Register every N:M of `ways`."""
    for pattern, dense in (*((p, (0, 0)) for p in PATTERNS), *itertools.product(DENSE_PATTERNS, DENSE_KEYS)):
        options = {"dense_first": dense[0], "dense_recent": dense[1]}
        register_nm_sparse(_attention(pattern, *dense), pattern=pattern, backend="reference", **options)


def first_keys(scores: Tensor, density: float) -> Tensor:
    """The first keys of every row, at least one."""
    return analysis.kept_by_truncation(scores, min(1.0, max(density, 1 / scores.shape[-1])))


def texts(count: int) -> list[str]:
    """`count` sentences of Python's language reference, and a quarter as many paragraphs of four of them."""
    single = sentences(count)
    return single + [" ".join(single[i : i + 4]) for i in range(0, len(single) - 3, 4)]


def batches_without_padding(encoder: Encoder, given: list[str]) -> list[Batch]:
    """Texts grouped by their number of tokens."""
    ids = [encoder.tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in given]
    found = []
    for length in sorted({len(x) for x in ids}):
        rows = [i for i, x in enumerate(ids) if len(x) == length]
        tokens = torch.tensor([ids[i] for i in rows])
        found.append(Batch(torch.tensor(rows), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}))
    return found


def agreement(dense: Tensor, pruned: Tensor) -> Agreement:
    """The agreement of two sets of unit vectors `[texts, E]`."""
    cosine = (dense * pruned).sum(-1)
    theirs, ours = dense @ dense.T, pruned @ pruned.T
    pairs = torch.triu_indices(*theirs.shape, 1)
    diagonal = torch.eye(len(dense), dtype=torch.bool)
    best = [x.masked_fill(diagonal, -1.0).argmax(-1) for x in (theirs, ours)]
    return Agreement(
        cosine.mean().item(), cosine.min().item(), spearman(theirs[tuple(pairs)], ours[tuple(pairs)]),
        (best[0] == best[1]).double().mean().item(),
    )  # fmt: skip


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    return torch.corrcoef(torch.stack([_ranks(z) for z in (x, y)]))[0, 1].item()


def _ranks(x: Tensor) -> Tensor:
    _, which, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[which]


def qualities(encoder: Encoder, batches: list[Batch], probe: Probe, compared: list[Way]) -> list[list[float]]:
    """For each way its Q^p at each of `EXPONENTS` and, last, its density, on the scores of the dense model."""
    sums, rows = torch.zeros(len(compared), len(EXPONENTS) + 1, dtype=torch.float64), 0

    def see(scores: Tensor) -> None:
        nonlocal rows
        count = scores.shape[0] * scores.shape[1] * scores.shape[2]
        rows += count
        kept = torch.stack([way.keeps(scores) for way in compared]).flatten(1, -2).float()
        sums[:, -1] += kept.mean(-1).sum(-1).double()
        for j, p in enumerate(EXPONENTS):
            # `analysis.quality` for all ways at once: A^p does not depend on them
            powers = torch.softmax(p * scores, -1).flatten(0, -2)
            sums[:, j] += torch.einsum("wrk,rk->w", kept, powers).double()

    probe.keeps, probe.sees = None, see
    encoder.use(_NAME)
    encoder.embed(batches)
    probe.sees = None
    return (sums / rows).tolist()


def measure(count: int) -> list[dict[str, object]]:
    """A row for each way of pruning."""
    from transformers import AttentionInterface

    probe = Probe()
    AttentionInterface.register(_NAME, probe)
    register_patterns()
    encoder = Encoder(torch.device("cpu"), torch.float32)
    batches, compared, rows = batches_without_padding(encoder, texts(count)), ways(), []
    encoder.use("sdpa")
    dense = encoder.embed(batches)
    found = qualities(encoder, batches, probe, compared)
    for way, (*quality, density) in zip(compared, found, strict=True):
        probe.keeps = way.keeps
        encoder.use(way.attention)
        result = asdict(agreement(dense, encoder.embed(batches)))
        named = {f"quality_{p:g}": q for p, q in zip(EXPONENTS, quality, strict=True)}
        rows.append({"kind": way.kind, "parameter": way.parameter, "density": density, **result, **named})
        print(
            f"{way.kind:12s}{way.parameter:>24s}  density {density:.3f}  " + "  ".join(f"{k} {v:.4f}" for k, v in result.items()),
            flush=True,
        )
    return rows


def anchored(rows: list[dict]) -> float:
    """The p at which Q^p orders top-K and fixed best as their mean cosine does."""
    anchors = [row for row in rows if not row["kind"].startswith("N:M")]
    agree = torch.tensor([float(row["mean_cosine"]) for row in anchors])
    return max(EXPONENTS, key=lambda p: spearman(torch.tensor([float(row[f"quality_{p:g}"]) for row in anchors]), agree))


def write(rows: list[dict[str, object]], path: Path) -> Path:
    """Write rows as a CSV, in a folder that is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return path


def draw(rows: list[dict], path: Path) -> list[Path]:
    """Agreement against density: `.png` and `.dark.png` beside the CSV."""
    return style.save(path, lambda: _figure(rows))


def _figure(rows: list[dict]) -> Any:
    figure, axes = style.panels(1, 1, 4.2)
    axis = axes[0, 0]
    found = {
        kind: sorted(
            (float(row["density"]), float(row["mean_cosine"]), str(row["parameter"])) for row in rows if row["kind"] == kind
        )
        for kind in ("top-K", "fixed", "N:M", "N:M + dense")
    }
    for kind, more in (("top-K", ""), ("fixed", ", the first keys")):
        places = [point[:2] for point in found[kind]]
        axis.plot(*zip(*places, strict=True), **style.line(style.LOOKS[kind]), label=style.LOOKS[kind].name + more)
    near: dict[float, list[tuple[float, float, str]]] = {}
    for x, y, name in found["N:M"]:
        axis.plot(x, y, **style.dot(style.SACCADE), label=f"{style.SACCADE.name} N:M", zorder=4)
        near.setdefault(round(x, 1), []).append((x, y, name))
    for points in near.values():  # patterns that keep about one share have one label, below them
        lowest = min(y for _, y, _ in points)
        names = ", ".join(name for _, _, name in points)
        axis.annotate(names, (points[0][0], lowest), (0, -15), textcoords="offset points", ha="center", fontsize=8.5)
    for x, y, _ in found["N:M + dense"]:  # without names: the table has them
        look = style.dot(style.SACCADE) | {"markerfacecolor": "none"}
        axis.plot(x, y, **look, label="N:M with keys never pruned", zorder=3)
    axis.set(ylim=(None, 1.02), xlabel="share of the scores that is kept", ylabel="mean cosine with dense embeddings")
    style.head(
        figure, "Embeddings of a pruned encoder, without training",
        ["nm_quality_minilm", "all-MiniLM-L6-v2, every attention layer pruned", "CPU, float32"],
    )  # fmt: skip
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"))
    parser.add_argument("--sentences", type=int, default=240)
    given = parser.parse_args(arguments)
    rows = [row | machine() for row in measure(given.sentences)]
    path = write(rows, given.out / "nm_quality_minilm.csv")
    p = anchored(rows)
    column, agree = f"quality_{p:g}", [float(row["mean_cosine"]) for row in rows]
    order = spearman(torch.tensor([float(row[column]) for row in rows]), torch.tensor(agree))
    by_density = spearman(torch.tensor([float(row["density"]) for row in rows]), torch.tensor(agree))
    print(
        f"p = {p:g}: Q^p orders all {len(rows)} ways with a rank correlation of {order:.3f}, density alone with {by_density:.3f}"
    )
    print(path)
    print(*draw(rows, path), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
