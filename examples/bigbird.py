"""BigBird's blocks and N:M pruning together: of the tiles that a block pattern keeps, half of the scores (Dfss, appendix A.7).

    python examples/bigbird.py [--length 1024] [--out out]

Every block of 64 queries sees the blocks of a window around it, a few global blocks (which see everything themselves), and some at random.
`saccade.nm_sparse_attention(..., block_mask=...)` skips all other tiles and prunes the scores of these N:M. It prints the share of scores that are
left and the errors against dense attention and against the blocks alone, and draws the blocks.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

import saccade

BLOCK = 64


def bigbird_blocks(blocks: int, window: int, global_blocks: int, random_blocks: int, generator: torch.Generator) -> Tensor:
    """bool `[1, 1, blocks, blocks]`, True where a block of queries sees a block of keys.

    window: blocks on either side of the diagonal. global_blocks: the first ones, which see all and are seen by all.
    random_blocks: further blocks for each block of queries.
    """
    place = torch.arange(blocks)
    seen = (place - place[:, None]).abs() <= window
    seen |= (place < global_blocks) | (place[:, None] < global_blocks)
    # the largest of random numbers where nothing is seen yet
    drawn = torch.rand(blocks, blocks, generator=generator).masked_fill(seen, -1.0)
    best = drawn.topk(min(random_blocks, blocks), dim=-1)
    return seen.scatter(-1, best.indices, seen.gather(-1, best.indices) | (best.values >= 0))[None, None]


def compare(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, pattern: str) -> dict[str, float]:
    """Share of the scores that are left, and relative errors (Frobenius) of blocks, N:M and both, against dense attention."""
    whole = blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., : query.shape[2], : key.shape[2]]
    keep, group = map(int, pattern.split(":"))
    dense = saccade.attention(query, key, value)
    outputs = {
        "blocks": saccade.attention(query, key, value, whole),
        pattern: saccade.nm_sparse_attention(query, key, value, pattern=pattern),
        f"blocks and {pattern}": saccade.nm_sparse_attention(query, key, value, pattern=pattern, block_mask=blocks),
    }
    found = {f"error of {name}": ((out - dense).norm() / dense.norm()).item() for name, out in outputs.items()}
    alone = outputs["blocks"]
    found["error of pruning, given the blocks"] = ((outputs[f"blocks and {pattern}"] - alone).norm() / alone.norm()).item()
    return {"scores left": whole.float().mean().item() * keep / group, **found}


def draw(blocks: Tensor, path: Path) -> Path:
    """The blocks as a picture."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(4, 4), layout="constrained")
    axis.imshow(blocks[0, 0].numpy(), cmap="Blues", vmin=0, vmax=1.4)
    axis.set(xlabel=f"block of {BLOCK} keys", ylabel=f"block of {BLOCK} queries", title="tiles that are computed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args(arguments)
    if not re.fullmatch("[0-9]+:[0-9]+", given.pattern):
        parser.error(f"--pattern is {given.pattern!r}; it must be N:M, as 2:4")
    if given.length < 1:
        parser.error(f"--length is {given.length}; it must be positive")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {given.out}, where no folder can be made ({error.strerror})")
    generator = torch.Generator().manual_seed(0)
    blocks = bigbird_blocks(-(-given.length // BLOCK), 1, 1, 2, generator)
    query, key, value = (torch.randn(1, 4, given.length, 64, generator=generator) for _ in range(3))
    # neighbours resemble each other, as in a text; otherwise no window could be right
    topic = torch.randn(4, 64, given.length + 128, generator=generator)
    topic = torch.nn.functional.avg_pool1d(topic, 129, 1).mT[None] * 129**0.5
    query, key, value = (0.5 * x + 0.7 * topic for x in (query, key, value))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, number in compare(*(x.to(device) for x in (query, key, value, blocks)), given.pattern).items():
        print(f"{name:40s} {number:.3f}")
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return 0
    matplotlib.use("Agg")
    print(draw(blocks, given.out / "bigbird.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
