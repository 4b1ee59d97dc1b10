"""The part of attention that N:M pruning keeps: two pictures, on any machine.

    python examples/pruned_attention.py [--length 64] [--sigma 1.0] [--out out]

    quality.png   quality Q^p against density for top-K, a fixed pattern, 1:2 and 2:4 (and other N:M), measured on scores and as the
                  closed forms say, for several p (Fig. 12 of the Dfss paper, on normal scores in place of a model's)
    maps.png      one head's attention weights: dense, 1:2, 2:4, and what each loses (Fig. 19)

The scores are those of random queries and keys with a little locality; a model's own can be drawn by calling `draw_quality` and
`draw_maps` on them.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from saccade.nm_sparse import analysis

DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.63, 0.75, 0.9, 1.0)
PATTERNS = ("1:2", "2:4", "1:4", "2:8", "4:8", "3:4")


def example_scores(length: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Scaled scores `[T, T]` of standard deviation about sigma, somewhat larger near the diagonal."""
    query, key = (torch.randn(length, 64, generator=generator) for _ in range(2))
    position = torch.arange(length)
    near = torch.exp(-(position - position[:, None]).abs() / 4.0)
    return sigma * (query @ key.T / 8.0 + near)


def pruned_weights(scores: Tensor, pattern: str | None) -> Tensor:
    """Softmax of `scores [T, T]` over what the pattern keeps; over everything for None."""
    if pattern is None:
        return torch.softmax(scores, -1)
    return torch.softmax(scores.masked_fill(~analysis.kept_by_pattern(scores, pattern), float("-inf")), -1)


def measured(scores: Tensor, p: float) -> dict[str, list[tuple[float, float]]]:
    """(density, quality) of each way of pruning `scores [T, T]`."""
    ways = {"top-K": analysis.kept_by_top_k, "fixed": analysis.kept_by_truncation}
    found = {name: [(s, analysis.quality(scores, keep(scores, s), p).item()) for s in DENSITIES] for name, keep in ways.items()}
    for pattern in PATTERNS:
        kept = analysis.kept_by_pattern(scores, pattern)
        found[pattern] = [(kept.double().mean().item(), analysis.quality(scores, kept, p).item())]
    return found


def draw_quality(scores: Tensor, exponents: tuple[float, ...], path: Path) -> Path:
    """Quality against density of `scores [T, T]`, one panel for each p, as a PNG at `path`;

    Lines are the closed forms, which hold for long rows of normal scores (dotted: 1:2); dots are measured.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(exponents), figsize=(4 * len(exponents), 3.6), sharey=True, squeeze=False)
    sigma = scores[scores > float("-inf")].std().item()
    for panel, p in zip(axes[0], exponents, strict=True):
        lines = {"top-K": lambda s, p=p: analysis.top_k_quality(p * sigma, s), "fixed": analysis.fixed_quality}
        for index, (name, points) in enumerate(measured(scores, p).items()):
            color = f"C{index}"
            panel.plot(*zip(*points, strict=True), "o", color=color, markersize=5, label=name)
            if name in lines:
                panel.plot(DENSITIES, [lines[name](s) for s in DENSITIES], color=color, linewidth=1)
        panel.axhline(analysis.one_of_two_quality(p * sigma), color="C2", linewidth=1, linestyle=":")
        panel.set(title=f"p = {p:g}", xlabel="density")
    axes[0][0].set_ylabel("quality")
    axes[0][-1].legend(fontsize=7)
    return _save(figure, path)


def draw_maps(scores: Tensor, path: Path) -> Path:
    """Weights of `scores [T, T]` dense and pruned, and below them what pruning changes, as a PNG at `path`."""
    from matplotlib import pyplot as plt

    dense, patterns = pruned_weights(scores, None), ("1:2", "2:4")
    most = max((pruned_weights(scores, pattern) - dense).abs().max().item() for pattern in patterns)
    figure, axes = plt.subplots(2, 3, figsize=(9, 6.2))
    for column, pattern in enumerate((None, *patterns)):
        weights = pruned_weights(scores, pattern)
        axes[0][column].imshow(weights.numpy(), cmap="viridis", vmin=0, vmax=dense.max().item())
        axes[0][column].set_title(pattern or "dense")
        axes[1][column].imshow((weights - dense).numpy(), cmap="coolwarm", vmin=-most, vmax=most)
        axes[1][column].set_title(f"{pattern} less dense")
    axes[1][0].set_axis_off()
    for panel in axes.flat:
        panel.set(xlabel="key", ylabel="query")
    return _save(figure, path)


def _save(figure, path: Path) -> Path:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Draw both pictures; 0 if they came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args(arguments)
    if not (given.sigma > 0 and math.isfinite(given.sigma)):
        parser.error(f"--sigma is {given.sigma}; it must be positive, and a finite number")
    if given.length < 2:
        parser.error(f"--length is {given.length}; it must be at least 2")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {given.out}, where no folder can be made ({error.strerror})")
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no pictures: pip install matplotlib", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    scores = example_scores(given.length, given.sigma, torch.Generator().manual_seed(0))
    print(draw_quality(scores, (1.0, 2.0, 4.0), given.out / "quality.png"))
    print(draw_maps(scores, given.out / "maps.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
