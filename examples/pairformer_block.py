"""A block of a structure model on a pair representation: triangle attention by stock torch, and by `saccade.nn.TriangleAttention`, forward and training step.

    python examples/pairformer_block.py [--tokens 384] [--width 128] [--heads 4] [--dim 32] [--dtype bfloat16]

The block is that of AlphaFold 3's Pairformer on pairs: triangle multiplication outgoing and incoming, triangle attention around the starting and
the ending node, a transition. A third of the tokens is padding, which a mask hides. In triangle attention the N rows of N tokens share a bias
`[1, H, N, N]`: torch's function gets the sum of bias and mask for every row, `[N, H, N, N]`, while `saccade.attention` takes both separately.

First outputs and gradients of both are compared at real pairs, then they are timed in turns. On a CPU both run torch's kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

if __name__ == "__main__":  # threads that wait for each other sleep: on busy cores, spinning takes ten times as long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from saccade.nn import TriangleAttention

STOCK, OURS = "torch", "saccade"


class StockTriangleAttention(nn.Module):
    """The same by torch's function, with the same names of parameters."""

    def __init__(self, width: int, dim: int, heads: int, starting: bool) -> None:
        super().__init__()
        self.heads, self.starting = heads, starting
        self.layer_norm, self.linear = nn.LayerNorm(width), nn.Linear(width, heads, bias=False)
        parts = {f"linear_{name}": nn.Linear(width, dim * heads, bias=name == "g") for name in "qkvg"}
        self.mha = nn.ModuleDict(parts | {"linear_o": nn.Linear(dim * heads, width)})

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """`[N, N, C]`, mask bool `[N, N]`."""
        if not self.starting:
            z, mask = z.transpose(0, 1), mask.transpose(0, 1)
        x = self.layer_norm(z)
        query, key, value = (self.mha[f"linear_{n}"](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in "qkv")
        hidden = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, torch.finfo(x.dtype).min)
        bias = self.linear(x).permute(2, 0, 1) + hidden[:, None, None]  # [N, H, N, N]
        heads = F.scaled_dot_product_attention(query, key, value, bias).transpose(1, 2).flatten(2)
        out = self.mha["linear_o"](heads * torch.sigmoid(self.mha["linear_g"](x)))
        return out if self.starting else out.transpose(0, 1)


class TriangleMultiplication(nn.Module):
    """Pairs from the products of two edges of each triangle."""

    def __init__(self, width: int, outgoing: bool) -> None:
        super().__init__()
        self.outgoing, self.norm_in, self.norm_out = outgoing, nn.LayerNorm(width), nn.LayerNorm(width)
        self.edges, self.gates = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out, self.gate = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """`[N, N, C]`."""
        x = self.norm_in(z)
        a, b = (self.edges(x) * torch.sigmoid(self.gates(x)) * mask[..., None]).chunk(2, -1)
        product = torch.einsum("ikc,jkc->ijc" if self.outgoing else "kic,kjc->ijc", a, b)
        return self.out(self.norm_out(product)) * torch.sigmoid(self.gate(x))


class Block(nn.Module):
    """z plus the five updates, one after another. attention: makes the module of triangle attention, of width, dim, heads and starting."""

    def __init__(self, width: int, dim: int, heads: int, attention: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.outgoing, self.incoming = TriangleMultiplication(width, True), TriangleMultiplication(width, False)
        self.starting, self.ending = (attention(width, dim, heads, starting) for starting in (True, False))
        self.transition = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """`[N, N, C]`, mask bool `[N, N]`: pairs of real tokens."""
        for update in (self.outgoing, self.incoming, self.starting, self.ending):
            z = z + update(z, mask)
        return z + self.transition(z)


def blocks(width: int, dim: int, heads: int) -> dict[str, Block]:
    """Both blocks, with the same weights."""
    made = {OURS: Block(width, dim, heads, TriangleAttention), STOCK: Block(width, dim, heads, StockTriangleAttention)}
    made[STOCK].load_state_dict(made[OURS].state_dict())
    return made


def loss_of(block: Block, z: Tensor, mask: Tensor) -> Tensor:
    """The mean square of the output at real pairs."""
    return block(z, mask)[mask].float().square().mean()


def difference(made: dict[str, Block], z: Tensor, mask: Tensor) -> float:
    """The largest relative difference of a gradient, or of the loss."""
    found = []
    for block in made.values():
        loss, parameters = loss_of(block, z, mask), dict(sorted(block.named_parameters()))
        found.append([loss, *torch.autograd.grad(loss, list(parameters.values()))])
    return max(((x - y).float().norm() / y.float().norm().clamp(min=1e-6)).item() for x, y in zip(*found, strict=True))


def timed(made: dict[str, Block], z: Tensor, mask: Tensor, rounds: int, console: Console) -> dict[tuple[str, str], float]:
    """Median milliseconds by block and direction, in turns."""
    times: dict[tuple[str, str], list[float]] = {}
    for turn in track(range(2 + rounds), "timing", console=console, transient=True):
        for name, block in made.items():
            for direction in ("forward", "training step"):
                begin = time.perf_counter()
                with torch.set_grad_enabled(direction != "forward"):
                    loss = loss_of(block, z, mask)
                if direction != "forward":
                    loss.backward()
                    block.zero_grad()
                loss.item()  # waits for the device
                if z.is_cuda:
                    torch.cuda.synchronize()
                if turn >= 2:
                    times.setdefault((name, direction), []).append(1e3 * (time.perf_counter() - begin))
    return {key: statistics.median(values) for key, values in times.items()}


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    for name, on_gpu, on_cpu in (("tokens", 384, 32), ("width", 128, 32), ("heads", 4, 2), ("dim", 32, 16), ("rounds", 10, 3)):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if gpu else "float32")
    options = parser.parse_args(arguments)
    for name in ("tokens", "width", "heads", "dim", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compare, time and print; an exit code."""
    options, console = options_of(arguments), Console()
    console.print(
        f"Comparing both blocks, then timing {options.rounds} rounds on {options.device}. The defaults of a CPU take some 10 s on two cores."
    )
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    made = {name: block.to(options.device, dtype) for name, block in blocks(options.width, options.dim, options.heads).items()}
    z = torch.randn(options.tokens, options.tokens, options.width).to(options.device, dtype)
    real = torch.arange(options.tokens, device=options.device) < -(-2 * options.tokens // 3)
    mask = real[:, None] & real
    apart, allowed = difference(made, z, mask), 1e-4 if dtype == torch.float32 else 0.1
    if not apart < allowed:
        print(f"the blocks differ by {apart:.2g}; wanted < {allowed}", file=sys.stderr)
        return 1
    times = timed(made, z, mask, options.rounds, console)
    table = Table(
        title=f"{options.tokens} tokens, C = {options.width}, {options.heads} heads of {options.dim}, {options.dtype}",
        title_justify="left",
    )
    for column in ("", "ms, forward", "times stock", "ms, step", "times stock"):
        table.add_column(column, justify="right" if column else "left")
    for name in made:
        cells = [f"{x:.2f}" for d in ("forward", "training step") for x in (times[name, d], times[STOCK, d] / times[name, d])]
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"loss and gradients differ by at most {apart:.1e}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
