"""Shows how much the last layer saves when only the CLS token is read (paper 002), and that padding cannot leak. Runs on any
device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import saccade
from saccade.engine.torch_sdpa import torch_attention
from saccade.nn.encoder import Encoder, EncoderLayer
from saccade.testing.timing import take_turns

_WIDTH, _HEADS, _TOKENS = 384, 12, 128  # the sizes of MiniLM


@dataclass(frozen=True)
class Row:
    """An encoder of `layers` layers: median milliseconds of the whole encoder and of its CLS-only form."""

    layers: int
    direction: str
    whole_ms: float
    cls_ms: float
    difference: float

    @property
    def speedup(self) -> float:
        """How many times as fast the CLS-only form is."""
        return self.whole_ms / self.cls_ms


def run(console: Console, device: torch.device, repeats: int) -> list[Row]:
    """Measure encoders of 1, 2, 4 and 6 layers and print them; then feed NaN into the padding."""
    rows = []
    with console.status("measuring the CLS-only last layer"):
        for layers in (1, 2, 4, 6):
            rows += _measure(layers, device, repeats)
    console.print(_table(rows))
    console.print(padding_sentence(device))
    return rows


def _measure(layers: int, device: torch.device, repeats: int) -> list[Row]:
    torch.manual_seed(0)
    layer = EncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", norm_first=True, device=device)
    encoder = Encoder(layer, layers)
    batch = 256 if device.type == "cuda" else 2
    x = torch.randn(batch, _TOKENS, _WIDTH, device=device)
    lengths = torch.randint(_TOKENS // 4, _TOKENS + 1, (batch,), device=device)
    with torch.no_grad():
        difference = float((encoder(x, lengths, cls_only=True) - encoder(x, lengths)[:, :1]).abs().max())

    def call(cls_only: bool, backward: bool) -> Callable[[], object]:
        def forward_only() -> Tensor:
            with torch.no_grad():
                return encoder(x, lengths, cls_only=cls_only)[:, :1]

        def both() -> object:
            return torch.autograd.grad(encoder(x, lengths, cls_only=cls_only)[:, :1].sum(), list(encoder.parameters()))

        return both if backward else forward_only

    rows = []
    for direction, backward in (("fwd", False), ("fwd+bwd", True)):
        times = take_turns({"whole": call(False, backward), "cls": call(True, backward)}, device, repeats)
        rows.append(Row(layers, direction, times["whole"], times["cls"], difference))
    return rows


def _table(rows: list[Row]) -> Table:
    title = (
        f"saccade.nn.encoder.Encoder when only the CLS token is read: S={_TOKENS} with lengths, E={_WIDTH}, H={_HEADS}, float32"
    )
    table = Table(title=title, title_justify="left")
    for column in ("layers", "direction", "whole ms", "cls_only ms", "speed-up", "largest difference"):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda r: (r.direction, r.layers)):
        table.add_row(
            str(row.layers),
            row.direction,
            f"{row.whole_ms:.1f}",
            f"{row.cls_ms:.1f}",
            f"{row.speedup:.2f}",
            f"{row.difference:.1e}",
        )
    return table


def padding_sentence(device: torch.device) -> str:
    """Put NaN into padded keys and report the result of each function."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (torch.randn(4, 8, 64, 64, device=device, generator=generator) for _ in range(3))
    lengths = torch.tensor([64, 1, 17, 40], device=device)
    real = (torch.arange(64, device=device) < lengths[:, None])[:, None, :]  # [B, 1, Tk]
    dirty_key, dirty_value = (x.masked_fill(~real[..., None], float("nan")) for x in (key, value))
    theirs = torch_attention(query, dirty_key, dirty_value, attn_mask=real[:, :, None])
    ours = saccade.attention(query, dirty_key, dirty_value, lengths=lengths)
    clean = saccade.attention(query, key, value, lengths=lengths)
    unchanged = isinstance(ours, Tensor) and isinstance(clean, Tensor) and torch.equal(ours, clean)
    return (
        f"NaN in the padded keys: torch's function with a mask gives {int(theirs.isnan().sum()):,} NaN of {theirs.numel():,} outputs; "
        f"saccade with lengths gives {'the same bits as with clean padding' if unchanged else 'a changed result'}"
    )
