"""Times the shapes of token tiles in CUDA C++ on this GPU, each direction alone in a CUDA graph with L2 flushed, beside the token tiles of Triton.

    python -m tools.tuner.tokens [--only fwd:256:32,bwd:256:32] [--rep 20]

Prints a line for each candidate, best first, with its largest difference from Triton's results as a share of their largest number.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.exact.ragged import config, launchers, token_launches
from saccade.exact.ragged.config import TokensSm90Config
from saccade.exact.varlen.args import VarlenArgs
from saccade.testing.timing import measure

HEADS, LONGEST = 12, 128
BATCHES, DIMS = (64, 256, 1024, 4096), (32, 64)
NAMES = {"fwd": "forward", "bwd": "backward"}


def candidates(direction: str, dim: int) -> Iterator[TokensSm90Config]:
    """Shapes whose registers hold the sums of products."""
    if direction == "bwd":
        yield from (TokensSm90Config(blocks) for blocks in ((3, 4, 5, 6) if dim == 32 else (2, 3, 4)))
        return
    for step in (32, 48, 64):
        yield from (TokensSm90Config(blocks, step) for blocks in ((4, 5, 6, 7) if dim == 32 else (3, 4, 5)))


def arguments(batch: int, dim: int) -> tuple[VarlenArgs, Tensor]:
    """Sequences of mean 20, with lengths as in text, and the gradient of out."""
    source = torch.Generator().manual_seed(0)
    lengths = (20 * torch.randn(batch, generator=source).mul(0.5).sub(0.125).exp()).round().clamp(1, LONGEST)
    ends = F.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    q, k, v, dout = (torch.randn(int(ends[-1]), HEADS, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return VarlenArgs(q, k, v, ends, ends, None, None, LONGEST, LONGEST, 0.0, 0, dim**-0.5), dout


def captured(call: Callable[[], tuple]) -> tuple[Callable[[], None], tuple]:
    """A graph of the call, and the tensors that it writes."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph.replay, results


def timed(direction: str, args: VarlenArgs, dout: Tensor, shape: TokensSm90Config | None, repeat_ms: int) -> tuple[float, tuple]:
    """Microseconds of a direction, and its results. shape: None for Triton's token tiles."""
    config.TOKENS_SM90 = dict.fromkeys(config.TOKENS_SM90, 0 if shape is None else 64)
    config.MOST_TOKENS_SM90 = token_launches.MOST_NUMBERS = 2**28
    config.FEWEST_TOKENS_SM90 = 0
    if shape is not None:
        config.TOKENS_SM90_CONFIGS[NAMES[direction], args.query.shape[2]] = shape
    call: Callable[[], tuple] = functools.partial(launchers.forward, args)
    if direction == "bwd":
        out, lse = launchers.forward(args)
        call = functools.partial(launchers.backward, args, dout, None, out, lse, bias_grad=False)
    replay, results = captured(call)
    spent = 1e3 * measure(replay, warmup_ms=5, repeat_ms=repeat_ms).p50
    return spent, results[: 2 if direction == "fwd" else 3]


def apart(found: tuple, expected: tuple) -> float:
    """The largest difference as a share of the largest number."""
    return max(((x.float() - y.float()).abs().max() / y.float().abs().max()).item() for x, y in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups as direction:sequences:D")
    parser.add_argument("--rep", type=int, default=20, help="milliseconds for each timing")
    given = parser.parse_args()
    groups = [f"{d}:{batch}:{dim}" for batch in BATCHES for dim in DIMS for d in NAMES]
    for group in given.only.split(",") if given.only else groups:
        direction, batch, dim = group.split(":")
        args, dout = arguments(int(batch), int(dim))
        triton, expected = timed(direction, args, dout, None, given.rep)
        print(f"{group}: {len(args.query)} tokens, Triton {triton:.1f} us", flush=True)
        rows = []
        for shape in candidates(direction, int(dim)):
            spent, found = timed(direction, args, dout, shape, given.rep)
            rows.append((spent, shape, apart(found, expected)))
        for spent, shape, difference in sorted(rows, key=lambda row: row[0]):
            print(f"  {spent:7.1f} us  {triton / spent:.2f}x  {shape}  apart {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
