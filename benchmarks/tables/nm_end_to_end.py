"""The paper's 4-layer encoder end to end (Dfss, Fig. 14 to 16): heads 4 and 8 of 64, n = 512 to 4,096, feed-forward 256 to 1,024,
bf16.

Inference, batch 32,768 / n. Dense twice: torch's default SDPA, and unfused as in the paper; ours twice: staged, and fused
(`nm_sparse_attention`). `note` holds the peak memory, and the share of the time that is not attention (from the same model with
attention left out).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from nm_common import device_time, peak_bytes, staged, unfused
from nm_encoder import Attend, Shape, encoder, nothing, through
from rows import Row, Writer

import saccade

ATTENTION: dict[str, Attend] = {
    "none": nothing,
    "unfused": unfused,
    "sdpa": F.scaled_dot_product_attention,
    "staged 2:4": lambda q, k, v: staged(q, k, v, "2:4"),
    "fused 2:4": lambda q, k, v: saccade.nm_sparse_attention(q, k, v, pattern="2:4"),
    "fused 1:2": lambda q, k, v: saccade.nm_sparse_attention(q, k, v, pattern="1:2"),
}
SHAPES = [Shape(n, h, f) for h in (4, 8) for n in (512, 1024, 2048, 4096) for f in (256, 512, 1024)]


def every_case() -> list[Shape]:
    """The rows of the table."""
    return SHAPES


@torch.inference_mode()
def run(writer: Writer, repeat_ms: int) -> None:
    """Each shape, every attention."""
    for shape in writer.part.cases(every_case()):
        layers, x = encoder(shape)
        times, peaks = {}, {}
        for name, attend in ATTENTION.items():
            call = functools.partial(through, layers, x, attend)
            timing, peaks[name] = device_time(call, repeat_ms), peak_bytes(call) / 2**20
            times[name] = timing.p50
            note = f"peak {peaks[name]:.1f} MiB, without attention {times['none'] / times[name]:.3f}"
            writer.add(Row("nm_end_to_end", str(shape), name, "fwd", "bf16", *timing, note=note))
        gains = "  ".join(f"{name} x{times['unfused'] / times[name]:.2f}" for name in ATTENTION)
        print(
            f"{shape}: unfused {times['unfused']:.3f} ms  {gains}  memory x{peaks['unfused'] / peaks['staged 2:4']:.2f}",
            flush=True,
        )
