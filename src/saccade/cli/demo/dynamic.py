"""Dynamic masks against torch's dense attention over the length: causal, each query keeps its best-scored keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

import saccade
from saccade.engine.torch_sdpa import torch_attention
from saccade.errors import SaccadeError
from saccade.testing.timing import take_turns

_HEADS, _DIM = 8, 64
_CHECKED = 384  # tokens of the comparison with torch's function under the mask, whose scores are all formed


@dataclass(frozen=True)
class Row:
    """One length: median milliseconds of forward, by torch over all keys and by saccade over the kept ones, selection included."""

    length: int
    keep: int
    torch_ms: float
    saccade_ms: float

    @property
    def gain(self) -> float:
        """How many times as fast saccade is."""
        return self.torch_ms / self.saccade_ms


def run(console: Console, device: torch.device, quick: bool) -> list[Row]:
    """Compare with torch's function under the same mask, then measure each length and print."""
    apart = difference(device)
    if not apart < 1e-4:
        raise SaccadeError(
            f"dynamic masks differ from torch's function under the mask of the kept keys by {apart:.1e}, wanted is less than 1e-4; "
            "run `saccade verify --op dynamic_mask_attention`"
        )
    on_gpu = device.type == "cuda"
    lengths, keep = ((8192, 32768, 131072), 1024) if on_gpu else ((2048, 4096, 8192), 256)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows = []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(lengths))
        for length in lengths:
            progress.update(task, description=f"dynamic masks, {length:,} tokens")
            times = take_turns(_calls(length, keep, device, dtype), device, 1 if quick else 3)
            rows.append(Row(length, keep, times["torch"], times["saccade"]))
            progress.advance(task)
    console.print(_table(rows, dtype))
    console.print(f"Over the same kept keys, torch's function under their mask is {apart:.0e} away ({_CHECKED} tokens, float32).")
    return rows


def difference(device: torch.device) -> float:
    """Largest difference to torch's function under the mask of the kept keys, in float32."""
    query, key, value, scores = _inputs(_CHECKED, device, torch.float32)
    ours = saccade.dynamic_mask_attention(query, key, value, scores, keep=64)
    position = torch.arange(_CHECKED, device=device)
    kept = (position <= position[:, None]) & (position[:, None] < saccade.expiry(scores, 64)[:, :, None])  # [B, H, query, key]
    bias = scores[:, :, None].masked_fill(~kept, float("-inf"))
    # double, since torch's function may multiply in TF32 on a GPU
    theirs = torch_attention(query.double(), key.double(), value.double(), attn_mask=bias.double())
    assert isinstance(ours, Tensor), "the log-sum-exp was not asked for"
    return float((ours - theirs).abs().max())


def _inputs(length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, _HEADS, length, _DIM)
    query, key, value = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(3))
    return query, key, value, torch.randn(shape[:3], device=device, generator=generator)


def _calls(length: int, keep: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    query, key, value, scores = _inputs(length, device, dtype)
    return {
        "torch": lambda: torch_attention(query, key, value, is_causal=True),
        "saccade": lambda: saccade.dynamic_mask_attention(query, key, value, scores, keep=keep),
    }


def _table(rows: list[Row], dtype: torch.dtype) -> Table:
    name = str(dtype).removeprefix("torch.")
    title = f"dynamic_mask_attention, causal, keep={rows[0].keep}, against torch over all keys: B=1, H={_HEADS}, D={_DIM}, {name}, forward"
    table = Table(title=title, title_justify="left")
    for column in ("tokens", "torch ms", "saccade ms", "torch / saccade"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(f"{row.length:,}", f"{row.torch_ms:.1f}", f"{row.saccade_ms:.1f}", f"{row.gain:.2f}")
    return table
