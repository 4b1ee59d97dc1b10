"""A training step of a vision transformer written for torch, and the same step, unchanged, inside `saccade.replace_sdpa()`.

    python examples/vit_step.py [--batch 8] [--size 64] [--patch 16] [--width 96] [--layers 2] [--heads 3] [--dtype bfloat16]

The model is a plain ViT of `nn.TransformerEncoderLayer`, which calls torch's `scaled_dot_product_attention` in training. First loss and
gradients of both steps are compared, then they are timed in turns. On a CPU both run torch's kernel, and the times are equal. The
defaults are ViT-B/16 on 64 images of 224 on a GPU, and a small model on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
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

CLASSES = 100
TORCH, OURS = "torch", "saccade.replace_sdpa()"


class ViT(nn.Module):
    """Patches and a class token through pre-norm layers; a linear head reads the class token."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """`[B, 3, size, size]` to logits `[B, classes]`."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(images), -1, -1), patches), 1) + self.places
        return self.head(self.layers(x)[:, 0]).float()


def attention_of(name: str) -> contextlib.AbstractContextManager[object]:
    """The context in which a step runs."""
    return saccade.replace_sdpa() if name == OURS else contextlib.nullcontext()


def gradients(model: ViT, images: Tensor, labels: Tensor, name: str) -> list[Tensor]:
    """The loss and its gradient for every weight."""
    with attention_of(name):
        loss = F.cross_entropy(model(images), labels)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The relative difference of all tensors together, by root mean square."""
    apart = sum((a.double() - b.double()).square().sum().item() for a, b in zip(ours, theirs, strict=True))
    return (apart / sum(b.double().square().sum().item() for b in theirs)) ** 0.5


def timed(steps: dict[str, Callable[[], float]], rounds: int, console: Console) -> dict[str, float]:
    """Median milliseconds of each step; they take turns, after one round that compiles."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in track(range(1 + rounds), "timing steps", console=console, transient=True):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    on_gpu = {"batch": 64, "size": 224, "patch": 16, "width": 768, "layers": 12, "heads": 12, "rounds": 10}
    sizes = on_gpu if gpu else {"batch": 8, "size": 64, "patch": 16, "width": 96, "layers": 2, "heads": 3, "rounds": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16" if gpu else "float32")
    options = parser.parse_args(arguments)
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    for name, of in (("size", "patch"), ("width", "heads")):
        if getattr(options, name) % getattr(options, of):
            parser.error(f"--{name} is {getattr(options, name)}; it must be a multiple of --{of}, {getattr(options, of)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compare, time and print; an exit code."""
    options, console = options_of(arguments), Console()
    console.print(
        f"Comparing one step of both, then timing {options.rounds} of each on {options.device}. The defaults of a CPU take some 10 s on two cores."
    )
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    model = ViT(options.size, options.patch, options.width, options.layers, options.heads).to(options.device, dtype)
    images = torch.randn(options.batch, 3, options.size, options.size, device=options.device, dtype=dtype)
    labels = torch.randint(CLASSES, (options.batch,), device=options.device)
    apart = difference(*(gradients(model, images, labels, name) for name in (OURS, TORCH)))
    allowed = 1e-4 if dtype == torch.float32 else 0.1
    if not apart < allowed:
        print(f"loss and gradients differ from torch's by {apart:.2g}; wanted < {allowed}", file=sys.stderr)
        return 1
    wait_for_known_calls(options.device)  # compiled on a machine's first use, some 20 s
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(name: str) -> float:
        with attention_of(name):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
        return loss.item()  # a number on the host: the device has finished

    times = timed({name: lambda name=name: step(name) for name in (TORCH, OURS)}, options.rounds, console)  # type: ignore[misc]
    tokens = model.places.shape[1]
    title = (
        f"step of a ViT: {options.batch} images of {tokens} tokens, {options.layers} layers; loss and gradients {apart:.0e} apart"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "ms a step", "images/s", "times torch"):
        table.add_column(column, justify="right" if column else "left")
    for name, milliseconds in times.items():
        table.add_row(
            name, f"{milliseconds:.2f}", f"{1e3 * options.batch / milliseconds:,.0f}", f"{times[TORCH] / milliseconds:.2f}"
        )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
