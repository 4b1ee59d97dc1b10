"""The paper's 4-layer encoder end to end (Dfss, Fig. 14 to 16): heads 4 and 8 of 64, n = 512 to 4,096, feed-forward 256 to 1,024,
bf16.

Inference, batch 32,768 / n. Dense twice: torch's default SDPA, and unfused as in the paper; ours twice: staged, and fused
(`nm_sparse_attention`). `note` holds the peak memory, and the share of the time that is not attention (from the same model with
attention left out).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from nm_common import device_time, peak_bytes, staged, unfused
from rows import Row, Writer
from torch import Tensor, nn

import saccade

LAYERS, TOKENS, DIM = 4, 32768, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
ATTENTION: dict[str, Attend] = {
    "none": lambda q, k, v: v,
    "unfused": unfused,
    "sdpa": F.scaled_dot_product_attention,
    "staged 2:4": lambda q, k, v: staged(q, k, v, "2:4"),
    "fused 2:4": lambda q, k, v: saccade.nm_sparse_attention(q, k, v, pattern="2:4"),
    "fused 1:2": lambda q, k, v: saccade.nm_sparse_attention(q, k, v, pattern="1:2"),
}


@dataclass(frozen=True)
class Shape:
    """heads of 64 and the width inside the feed-forward layer."""

    length: int
    heads: int
    hidden: int

    def __str__(self) -> str:
        batch = TOKENS // self.length
        return f"encoder({LAYERS} layers B={batch} H={self.heads} T={self.length} D={DIM} FF={self.hidden} bf16)"


SHAPES = [Shape(n, h, f) for h in (4, 8) for n in (512, 1024, 2048, 4096) for f in (256, 512, 1024)]


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


@torch.inference_mode()
def run(writer: Writer, repeat_ms: int) -> None:
    """Each shape, every attention."""
    for shape in SHAPES:
        layers = [Layer(shape).cuda().bfloat16().eval() for _ in range(LAYERS)]
        x = torch.randn(TOKENS // shape.length, shape.length, shape.heads * DIM, device="cuda", dtype=torch.bfloat16)
        times, peaks = {}, {}
        for name, attend in ATTENTION.items():

            def call(attend: Attend = attend, x: Tensor = x, layers: list[Layer] = layers) -> Tensor:
                for layer in layers:
                    x = layer(x, attend)
                return x

            timing, peaks[name] = device_time(call, repeat_ms), peak_bytes(call) / 2**20
            times[name] = timing.p50
            note = f"peak {peaks[name]:.1f} MiB, without attention {times['none'] / times[name]:.3f}"
            writer.add(Row("nm_end_to_end", str(shape), name, "fwd", "bf16", *timing, note=note))
        gains = "  ".join(f"{name} x{times['unfused'] / times[name]:.2f}" for name in ATTENTION)
        print(
            f"{shape}: unfused {times['unfused']:.3f} ms  {gains}  memory x{peaks['unfused'] / peaks['staged 2:4']:.2f}",
            flush=True,
        )
