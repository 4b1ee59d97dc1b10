"""A quick benchmark of attention against torch's function on this device, through the public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import saccade
from saccade.engine.torch_sdpa import torch_attention
from saccade.testing.timing import take_turns


@dataclass(frozen=True)
class Row:
    """One problem and direction: median milliseconds of torch and of saccade."""

    tokens: int
    queries: int
    direction: str
    torch_ms: float
    saccade_ms: float

    @property
    def label(self) -> str:
        """The problem as an axis label."""
        return f"S={self.tokens}" + (" q=1" if self.queries == 1 else "")


@dataclass(frozen=True)
class Sizes:
    """The settings that all rows share."""

    batch: int
    heads: int = 8
    head_dim: int = 64

    def __str__(self) -> str:
        return f"B={self.batch}, H={self.heads}, D={self.head_dim}"


def run(console: Console, device: torch.device, repeats: int) -> tuple[Sizes, torch.dtype, list[Row]]:
    """Measure every row with a progress bar and print them as a table."""
    on_gpu = device.type == "cuda"
    sizes, dtype = Sizes(batch=1024 if on_gpu else 16), torch.bfloat16 if on_gpu else torch.float32
    problems = [(s, q, d) for d in ("fwd", "fwd+bwd") for s in (16, 32, 64, 128) for q in (s, 1)]
    rows = []
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("attention", total=len(problems))
        for tokens, queries, direction in problems:
            calls = _calls(sizes, tokens, queries, direction, device, dtype)
            times = take_turns(calls, device, repeats, warm_up=3)
            rows.append(Row(tokens, queries, direction, times["torch"], times["saccade"]))
            progress.update(task, advance=1, description=f"{rows[-1].label} {direction}")
    console.print(_table(sizes, dtype, rows))
    return sizes, dtype, rows


def _calls(
    sizes: Sizes, tokens: int, queries: int, direction: str, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    backward = direction != "fwd"
    generator = torch.Generator(device).manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        shape = (sizes.batch, sizes.heads, length, sizes.head_dim)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_(backward)

    inputs, dout = (draw(queries), draw(tokens), draw(tokens)), draw(queries).detach()

    def call(function: Callable[..., torch.Tensor]) -> object:
        out = function(*inputs)
        return torch.autograd.grad(out, inputs, dout) if backward else out

    return {
        "torch": lambda: call(torch_attention),
        "saccade": lambda: call(saccade.attention),
    }


def _table(sizes: Sizes, dtype: torch.dtype, rows: list[Row]) -> Table:
    name = str(dtype).removeprefix("torch.")
    table = Table(title=f"attention against torch's function, {sizes}, {name}", title_justify="left")
    for column in ("problem", "direction", "torch ms", "saccade ms", "torch / saccade"):
        table.add_column(column, justify="left" if column in ("problem", "direction") else "right")
    for row in rows:
        ratio = row.torch_ms / row.saccade_ms
        table.add_row(row.label, row.direction, f"{row.torch_ms:.3f}", f"{row.saccade_ms:.3f}", f"{ratio:.2f}")
    return table
