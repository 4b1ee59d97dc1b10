"""Window attention with a bias of relative positions, as in Swin, and the gradient of that bias: it learns where to look.

    python examples/swin_bias.py [--steps 150] [--windows 64] [--shift 2 -1] [--device cuda]

Each window has 7 x 7 tokens of random numbers. The target is the token that lies --shift (rows, columns) away, or 0 outside the window. Only the
relative position determines that token, so everything that can be learned is in the bias: one number for each of the 13 x 13 offsets and each head,
as the mask of `saccade.attention`, `[1, H, 49, 49]`, shared by all windows. On a GPU its gradient is summed on the chip in a fixed order.

First the output and the gradient of the bias are compared with torch's function; then it learns, prints which offset each head looks at, and
times forward plus backward in turns with torch's function.
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

import saccade
from saccade.engine.prepare import wait_for_known_calls

SIDE, DIM = 7, 32
TOKENS, OFFSETS = SIDE * SIDE, (2 * SIDE - 1) ** 2
_torch_attention = F.scaled_dot_product_attention


def offset_index() -> Tensor:
    """For each pair of tokens (query, key) the place of their offset in a table of (2 SIDE - 1)^2 rows, int64 `[49, 49]`."""
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    place = torch.stack((row.flatten(), column.flatten()))
    apart = place[:, None, :] - place[:, :, None] + SIDE - 1  # key less query, from 0 on
    return apart[0] * (2 * SIDE - 1) + apart[1]


def shifted(x: Tensor, rows: int, columns: int) -> Tensor:
    """The token that lies so far away, of `[B, 49, C]`; 0 outside the window."""
    grid = F.pad(x.unflatten(1, (SIDE, SIDE)), (0, 0, SIDE, SIDE, SIDE, SIDE))
    return grid[:, SIDE + rows : 2 * SIDE + rows, SIDE + columns : 2 * SIDE + columns].flatten(1, 2)


class WindowAttention(nn.Module):
    """softmax(Q K^T / sqrt(D) + bias) V in each window; Q and K are parts of the tokens, V the tokens themselves."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Parameter(torch.zeros(OFFSETS, heads))
        self.register_buffer("index", offset_index(), persistent=False)

    def bias(self) -> Tensor:
        """`[1, H, 49, 49]`."""
        return self.table[self.index].permute(2, 0, 1).unsqueeze(0).contiguous()

    def forward(self, x: Tensor, attend: Callable[..., Tensor] = saccade.attention) -> Tensor:
        """`[B, 49, H * D]`."""
        value = x.unflatten(-1, (self.heads, DIM)).transpose(1, 2)
        query = key = 0.3 * value  # small scores: content says little here
        return attend(query, key, value, self.bias().to(x.dtype)).transpose(1, 2).flatten(2)

    def looks_at(self) -> list[tuple[int, int]]:
        """The offset (rows, columns) of the largest bias of each head."""
        best = self.table.detach().argmax(0).tolist()
        return [(i // (2 * SIDE - 1) - SIDE + 1, i % (2 * SIDE - 1) - SIDE + 1) for i in best]


def differences(layer: WindowAttention, x: Tensor) -> dict[str, float]:
    """Relative difference to torch's function of the output and of the gradient of the bias, at a bias of random numbers."""
    before = layer.table.detach().clone()
    with torch.no_grad():
        layer.table.normal_()
    found = []
    # torch's function fails in backward on a GPU if only its attn_mask needs a gradient
    x = x.detach().requires_grad_()
    for attend in (saccade.attention, _torch_attention):
        out = layer(x, attend)
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        (gradient,) = torch.autograd.grad((out.float() * weights).sum(), layer.table)
        found.append({"output": out.detach().double(), "gradient of the bias": gradient.double()})
    with torch.no_grad():
        layer.table.copy_(before)
    ours, theirs = found
    return {name: ((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in ours}


def learn(layer: WindowAttention, x: Tensor, wanted: Tensor, steps: int, console: Console) -> list[float]:
    """Train the bias; the losses."""
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
    losses = []
    for _ in track(range(steps), "learning the bias", console=console, transient=True):
        optimiser.zero_grad()
        loss = F.mse_loss(layer(x).float(), wanted.float())
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def timed(layer: WindowAttention, x: Tensor, rounds: int) -> dict[str, float]:
    """Median milliseconds of forward plus backward, in turns."""
    times: dict[str, list[float]] = {"torch": [], "saccade": []}
    x = x.detach().requires_grad_()
    for turn in range(3 + rounds):
        for name, attend in (("torch", _torch_attention), ("saccade", saccade.attention)):
            begin = time.perf_counter()
            gradients = torch.autograd.grad(layer(x, attend).float().sum(), (x, layer.table))
            gradients[0].flatten()[0].item()  # a number on the host: the device has finished
            if turn >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--windows", type=int, default=16384 if gpu else 64)  # those of 256 images in Swin-T's first stage
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--shift", type=int, nargs=2, default=(2, -1), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--rounds", type=int, default=10, help="of the timing")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if gpu else "float32")
    options = parser.parse_args(arguments)
    for name in ("steps", "windows", "heads", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if max(map(abs, options.shift)) >= SIDE:
        parser.error(f"--shift is {options.shift[0]} {options.shift[1]}; each must be from {1 - SIDE} to {SIDE - 1}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compare, learn, time and print; an exit code."""
    options, console = options_of(arguments), Console()
    console.print(
        f"Learning for {options.steps} steps, then timing {options.rounds} rounds on {options.device}. The defaults of a CPU take some 10 s on two cores."
    )
    torch.manual_seed(0)
    x = torch.randn(options.windows, TOKENS, options.heads * DIM).to(options.device, getattr(torch, options.dtype))
    layer = WindowAttention(options.heads).to(options.device)
    apart, allowed = differences(layer, x), 1e-4 if options.dtype == "float32" else 0.05
    for name, value in apart.items():
        if not value < allowed:
            print(f"{name} differs from torch's by {value:.2g}; wanted < {allowed}", file=sys.stderr)
            return 1
    losses = learn(layer, x, shifted(x, *options.shift), options.steps, console)
    found = layer.looks_at()
    wait_for_known_calls(options.device)  # compiled on a machine's first use, some 20 s
    times = timed(layer, x, options.rounds)
    console.print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {options.steps} steps")
    table = Table(title=f"{options.windows} windows of {TOKENS} tokens, D = {DIM}, {options.dtype}", title_justify="left")
    for column in ("", "ms, forward and backward", "times torch"):
        table.add_column(column, justify="right" if column else "left")
    for name, milliseconds in times.items():
        table.add_row(name, f"{milliseconds:.2f}", f"{times['torch'] / milliseconds:.2f}")
    console.print(table)
    console.print(f"wanted is the token {tuple(options.shift)} away; the heads look at {found}", highlight=False)
    if any(offset != tuple(options.shift) for offset in found) or losses[-1] > losses[0] / 2:
        print(f"--steps is {options.steps}, with which it is not learned; give more", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
