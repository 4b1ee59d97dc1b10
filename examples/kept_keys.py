"""The keys that a dynamic mask keeps, and for how long: one picture, on any machine.

    python examples/kept_keys.py [--scores random|local|heavy-hitter] [--length 512] [--keep 64] [--out out]

The causal dynamic mask is one interval of query positions a key, `j <= i < expiry_j` (`saccade.expiry`). The picture shows each key
as a horizontal line over its interval, below it the number of keys that each position keeps, and how long keys live.

    random        independent scores: what a head keeps before it has learned anything
    local         scores that rise with the position, with noise: close to a sliding window
    heavy-hitter  a few keys far above the rest: kept to the end, the others share what is left
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import saccade


def random_scores(length: int, keep: int, generator: torch.Generator) -> Tensor:
    """Independent normal scores, `[T]`."""
    return torch.randn(length, generator=generator)


def local_scores(length: int, keep: int, generator: torch.Generator) -> Tensor:
    """Position over w, plus noise: a key lives about w positions, some twice as long, some not at all; `[T]`."""
    return torch.arange(length) / keep + 0.3 * torch.randn(length, generator=generator)


def heavy_hitter_scores(length: int, keep: int, generator: torch.Generator) -> Tensor:
    """Local scores, and keep / 2 keys (fewer if T is small) at random places above all of them; `[T]`."""
    scores = local_scores(length, keep, generator)
    chosen = torch.randperm(length, generator=generator)[: min(keep // 2, length // 4)]
    scores[chosen] += length / keep + 2.0
    return scores


SCORES = {"random": random_scores, "local": local_scores, "heavy-hitter": heavy_hitter_scores}


def lifetimes(expiry: Tensor) -> Tensor:
    """Positions that keep each key, `[T]` from `expiry [T]`; 0 for a key that nobody keeps."""
    return expiry - torch.arange(len(expiry), dtype=expiry.dtype)


def kept_at(expiry: Tensor) -> Tensor:
    """Keys that each position keeps, `[T]`: those born so far less those expired."""
    length = len(expiry)
    born = (lifetimes(expiry) > 0).long()
    died = torch.bincount(expiry[born.bool()].long(), minlength=length + 1)[:length]
    return born.cumsum(0) - died.cumsum(0)


def draw(scores: Tensor, keep: int, name: str, path: Path) -> Path:
    """The picture for `scores [T]`, as a PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    expiry = saccade.expiry(scores[None, None], keep)[0, 0]
    figure = plt.figure(figsize=(9, 8.5), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(5, 1.2, 1.6))
    intervals = figure.add_subplot(grid[0])
    _intervals(intervals, figure, scores, expiry)
    _counts(figure.add_subplot(grid[1], sharex=intervals), kept_at(expiry), keep)
    _histogram(figure.add_subplot(grid[2]), lifetimes(expiry))
    for axis in figure.axes[:1] + figure.axes[2:]:  # not the colour bar
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"dynamic mask with {name} scores: w = {keep} of n = {len(scores)} keys")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _intervals(axis, figure, scores: Tensor, expiry: Tensor) -> None:
    from matplotlib.collections import LineCollection

    length = len(expiry)
    alive = torch.nonzero(lifetimes(expiry))[:, 0]
    # from j to expiry_j: the last position that keeps j ends there
    lines = [((j, j), (int(expiry[j]), j)) for j in alive.tolist()]
    # each line as thick as a key is high, so that dense places do not hide others
    drawn = LineCollection(lines, linewidths=max(0.4, 300 / length), cmap="viridis", capstyle="butt")
    drawn.set_array(scores[alive].numpy())
    axis.add_collection(drawn)
    axis.plot((0, length), (0, length), color="black", linewidth=0.6, alpha=0.4)
    axis.set(xlim=(0, length), ylim=(length, 0), ylabel="key position")
    axis.tick_params(labelbottom=False)
    figure.colorbar(drawn, ax=axis, label="score", pad=0.01)


def _counts(axis, kept: Tensor, keep: int) -> None:
    axis.fill_between(range(len(kept)), kept.tolist(), step="post", color="#2b6cb0", alpha=0.6, linewidth=0)
    axis.axhline(keep, color="black", linewidth=0.8, linestyle="--")
    axis.set(xlabel="query position", ylabel="keys kept", ylim=(0, 1.15 * keep))


def _histogram(axis, lives: Tensor) -> None:
    never = int((lives == 0).sum())
    alive = lives[lives > 0]
    axis.hist(alive.tolist(), bins=min(60, len(lives)), color="#2b6cb0", alpha=0.8)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set(xlabel="life time, in positions (the end of the sequence cuts it)", ylabel="keys (log)")
    median = alive.float().median().item()
    axis.set_title(f"{len(alive)} keys kept at some time, median life {median:.0f}; {never} never", fontsize=9, loc="right")


def main(arguments: list[str]) -> int:
    """Parse the command line and draw; an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", choices=list(SCORES), default="random")
    parser.add_argument("--length", type=int, default=512, help="n, number of keys")
    parser.add_argument("--keep", type=int, default=64, help="w, keys that each position keeps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the PNG")
    options = parser.parse_args(arguments)
    if options.length < 1 or options.keep < 1:
        print(f"--length is {options.length} and --keep {options.keep}; both must be at least 1", file=sys.stderr)
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {options.out}, where no folder can be made ({error.strerror})")
    scores = SCORES[options.scores](options.length, options.keep, torch.Generator().manual_seed(options.seed))
    print(draw(scores, options.keep, options.scores, options.out / f"kept_keys_{options.scores}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
