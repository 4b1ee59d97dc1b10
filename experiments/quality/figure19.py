"""Pictures of attention weights, dense beside pruned 1:2 and 2:4, in the first layer of a pretrained encoder (Dfss, Fig. 19).

    python experiments/quality/figure19.py [--out benchmarks/results/cpu]        # a CPU, seconds

The paper shows a layer of BERT-large, trained under each setting, on a text of SQuAD. Here the weights of all-MiniLM-L6-v2 are the same in the
three pictures and were not tuned; the text is the first of those of attention_error.py. A row of `nm_figure19.csv` is one attention and query:

    weights    of the keys in their order, in the head shown
    kept       Q^1, the share of the dense weights that is kept, mean over the heads of the layer
    raised     a kept weight over its dense weight, mean over the heads (the paper's appendix A.8 says that it is a little larger)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from attention_error import activations, write
from torch import Tensor

from saccade.nm_sparse import analysis

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import machine as provenance
import plot_style as style

HEAD, LENGTH = 0, 64  # 64 keys are about as many as a picture of this size can show


def measure(query: Tensor, key: Tensor) -> list[dict[str, object]]:
    """A row for each attention and query; query and key are `[heads, length, D]`, scaled."""
    scores = query @ key.mT
    dense = torch.softmax(scores, -1)
    rows: list[dict[str, object]] = []
    for name in ("dense", "1:2", "2:4"):
        kept = torch.ones_like(scores, dtype=torch.bool) if name == "dense" else analysis.kept_by_pattern(scores, name)
        weights = torch.softmax(scores.masked_fill(~kept, float("-inf")), -1)
        share = (dense * kept).sum(-1)
        raised = (weights / dense).where(kept, 0.0).sum(-1) / kept.sum(-1)
        for i, line in enumerate(weights[HEAD].tolist()):
            row: dict[str, object] = {"attention": name, "head": HEAD, "query": i}
            row |= {"kept": share[:, i].mean().item(), "raised": raised[:, i].mean().item()}
            rows.append({**row, "weights": " ".join(f"{x:.3g}" for x in line), **provenance.machine()})
    return rows


def pictures(rows: list[dict]) -> dict[str, Tensor]:
    """Attention -> weights `[queries, keys]`."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        found.setdefault(row["attention"], []).append([float(x) for x in row["weights"].split()])
    return {name: torch.tensor(weights) for name, weights in found.items()}


def draw(rows: list[dict], path: Path) -> list[Path]:
    """A picture for each attention: `.png` and `.dark.png` beside the CSV."""
    return style.save(path, lambda: _figure(rows))


def _figure(rows: list[dict]) -> Any:
    found = pictures(rows)
    largest = max(weights.max().item() for weights in found.values())
    figure, axes = style.panels(1, len(found), 4.2, sharey=True)
    for axis, (name, weights) in zip(axes[0], found.items(), strict=True):
        # square roots, so that small weights are seen beside the largest
        axis.imshow(weights.sqrt(), cmap="magma", vmin=0.0, vmax=largest**0.5, interpolation="nearest")
        axis.grid(False)
        axis.set_title(name)
        axis.set_xlabel("key")
    axes[0, 0].set_ylabel("query")
    first = rows[0]
    said = [
        "nm_figure19",
        f"all-MiniLM-L6-v2, first layer, head {first['head']}",
        f"square roots, black 0, white {largest:.2f}",
        "CPU, float32",
    ]
    style.head(figure, "Attention weights, dense and pruned", [*said, str(first["date"])], legend=False)
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"))
    given = parser.parse_args(arguments)
    with torch.inference_mode():
        query, key, _ = activations(1, LENGTH)[0]
        rows = measure(query[0], key[0])
    path = write(rows, given.out / "nm_figure19.csv")
    for name in ("1:2", "2:4"):
        mine = [row for row in rows if row["attention"] == name]
        kept, raised = (sum(float(str(row[c])) for row in mine) / len(mine) for c in ("kept", "raised"))
        print(f"{name}: {kept:.3f} of the weights kept, each {raised:.3f} times its dense weight")
    print(path, *draw(rows, path), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
