"""The encoder of Dfss (its Fig. 14 to 16): four layers of pre-norm attention and feed-forward, with random weights, around any
attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from nm_common import SHORT
from torch import Tensor, nn

DEVICE = "cuda"
LAYERS, TOKENS, DIM = 4, 32768, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """V in place of attention, to see what the rest takes."""
    return value


@dataclass(frozen=True)
class Shape:
    """heads of 64 and the width inside the feed-forward layer."""

    length: int
    heads: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        sizes = f"B={TOKENS // self.length} H={self.heads} T={self.length} D={DIM} FF={self.hidden}"
        return f"encoder({LAYERS} layers {sizes} {SHORT[self.dtype]})"


class Layer(nn.Module):
    """Pre-norm encoder layer around a given attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.heads * DIM
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, shape.hidden), nn.Linear(shape.hidden, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """`[B, T, E]`."""
        qkv = self.project(self.norm1(x)).unflatten(-1, (3, self.heads, DIM)).permute(2, 0, 3, 1, 4)
        heads = attend(*qkv.unbind(0))
        x = x + self.merge(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def encoder(shape: Shape) -> tuple[list[Layer], Tensor]:
    """The layers with random weights, and tokens `[B, T, E]`."""
    layers = [Layer(shape).to(DEVICE, shape.dtype).eval() for _ in range(LAYERS)]
    return layers, torch.randn(TOKENS // shape.length, shape.length, shape.heads * DIM, device=DEVICE, dtype=shape.dtype)


def through(layers: list[Layer], x: Tensor, attend: Attend) -> Tensor:
    """Tokens after all layers."""
    for layer in layers:
        x = layer(x, attend)
    return x
