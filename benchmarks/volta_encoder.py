"""One encoder layer, forward, around each attention (SparkAttention, Fig. 12): hidden size 2,048, D = 64 and 128, 16,384 tokens.

The layer is that of the original transformer: attention and a feed-forward layer of 4 times the hidden size, each with a residual
and a norm behind it, no dropout. As in the paper, only the attention inside PyTorch's layer is replaced.
"""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
import volta_common
from peers import peers
from rows import Row, Writer
from torch import Tensor, nn
from volta_common import LENGTHS, emulated, unfused

import saccade
from saccade.testing.timing import measure

# average and largest speed-up of a layer over PyTorch's JIT on a V100 (paper 001, 4.2.4)
PAPER = (1.80, 2.46)
SIZES = [(n, dim) for dim in (64, 128) for n in LENGTHS]


class Layer(nn.Module):
    """Post-norm encoder layer around a given attention."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        width = heads * dim
        self.heads, self.dim = heads, dim
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, attend) -> Tensor:
        """`[B, n, E]`."""
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, self.dim)).permute(2, 0, 3, 1, 4).unbind(0)
        x = self.norm1(x + self.merge(attend(query, key, value).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.relu(self.up(x))))


@torch.inference_mode()
def run(writer: Writer, repeat_ms: int, backend: str) -> None:
    """Each size, every attention; then the average speed-up beside the paper's."""
    attentions = {
        "volta": lambda q, k, v: saccade.attention(q, k, v, backend=backend),
        "unfused": lambda q, k, v: unfused(q, k, v, is_causal=False),
        "sdpa_efficient": peers(with_fa4=False)["sdpa_efficient"],
    }
    ratios: list[float] = []
    for length, dim in SIZES:
        batch, heads = max(1, volta_common.TOKENS // length), volta_common.HIDDEN // dim
        problem = f"encoder_layer(B={batch} H={heads} T={length} D={dim} FF={4 * heads * dim} fp16)"
        layer = Layer(heads, dim).to(volta_common.DEVICE).half().eval()
        x = torch.randn(batch, length, heads * dim, device=volta_common.DEVICE).half()
        times: dict[str, float] = {}
        for name, attend in attentions.items():
            note = "; ".join(filter(None, ("encoder layer", emulated() if name == "volta" else "")))
            try:
                timing = measure(
                    lambda attend=attend, x=x, layer=layer: layer(x, attend), volta_common.DEVICE, repeat_ms=repeat_ms
                )
            except (RuntimeError, saccade.SaccadeError) as error:  # out of memory, or a peer that refuses
                print(f"  {name} does not run {problem}: {str(error).splitlines()[0][:90]}")
                continue
            times[name] = timing.p50
            writer.add(Row("volta", problem, name, "fwd", "fp16", *timing, note=note))
            gc.collect()
        print(f"{problem}: {'  '.join(f'{name} {ms:.3f} ms' for name, ms in times.items())} {emulated()}", flush=True)
        if {"volta", "unfused"} <= times.keys():
            ratios.append(times["unfused"] / times["volta"])
    ours = f"x{sum(ratios) / len(ratios):.2f} (up to x{max(ratios):.2f})" if ratios else "none"
    print(f"encoder layer over unfused: {ours} {emulated()}; the paper on a V100, over its JIT: x{PAPER[0]} (up to x{PAPER[1]})")
