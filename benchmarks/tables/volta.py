"""SparkAttention's grid (paper 001, Fig. 10 and 11): hidden size 2,048, D = 64 and 128, n = 512 to 16,384 with 16,384 tokens, dropout 0.1.

For owners of a V100, T4 or RTX 20. Forward and backward of `backend="volta"`, of the unfused float16 pipeline (the paper's PyTorch_FP16:
product, softmax, dropout, product) and of SDPA's memory-efficient kernel, which the paper left out and which is what torch runs there.
TFLOP/s count 4 B H n^2 D forward and 2.5 times that backward, half if causal, as the paper does. The paper prints no figures but averages,
which are printed below ours. On any other GPU the compiler emulates the instruction: rows are noted "emulated: not a speed".
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peers import peers
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.hardware import arch_of
from saccade.testing.timing import Timing, measure

DEVICE, BACKEND = "cuda", "volta"
HIDDEN, TOKENS, DROPOUT = 2048, 16384, 0.1
# average and largest speed-up over the unfused pipeline on a V100, float32 sums forward (paper 001, 4.2.1 and 4.2.2)
PAPER = {"fwd": (4.44, 9.17), "bwd": (3.44, 7.91)}


@dataclass(frozen=True)
class Setting:
    """One problem of the grid."""

    length: int
    dim: int
    is_causal: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, n, D."""
        return max(1, TOKENS // self.length), HIDDEN // self.dim, self.length, self.dim

    def __str__(self) -> str:
        batch, heads, length, dim = self.shape
        causal = " causal" if self.is_causal else ""
        return f"attention(B={batch} H={heads} Tq={length} Tk={length} D={dim} fp16{causal} dropout={DROPOUT:g})"


SETTINGS = [
    Setting(n, dim, causal) for dim in (64, 128) for causal in (False, True) for n in (512, 1024, 2048, 4096, 8192, 16384)
]


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting, all backends; then the average speed-ups beside the paper's."""
    note = "" if torch.device(DEVICE).type == "cuda" and arch_of(_device()) in (70, 75) else "emulated: not a speed"
    gains: dict[str, list[float]] = {"fwd": [], "bwd": []}
    for setting in SETTINGS:
        found: dict[str, dict[str, float]] = {}
        for name, call in backends(setting).items():
            try:
                found[name] = _record(writer, setting, name, call, repeat_ms, note if name == "volta" else "")
            except (RuntimeError, saccade.SaccadeError) as error:  # out of memory, or a peer that refuses
                print(f"  {name} does not run {setting}: {str(error).splitlines()[0][:90]}")
            gc.collect()
        print(_line(setting, found), note, flush=True)
        if {"volta", "unfused"} <= found.keys():
            for direction, ratios in gains.items():
                ratios.append(found["unfused"][direction] / found["volta"][direction])
    for direction, ratios in gains.items():
        average, most = PAPER[direction]
        ours = f"x{sum(ratios) / len(ratios):.2f} (up to x{max(ratios):.2f})" if ratios else "none"
        print(f"{direction} over unfused: {ours} {note}; the paper on a V100: x{average} (up to x{most})")


def backends(setting: Setting) -> dict[str, Callable[..., Tensor]]:
    """Name -> call on query, key, value."""
    efficient = peers(with_fa4=False)["sdpa_efficient"]
    return {
        "volta": lambda q, k, v: saccade.attention(q, k, v, None, DROPOUT, setting.is_causal, backend=BACKEND),
        "unfused": functools.partial(unfused, is_causal=setting.is_causal),
        "sdpa_efficient": functools.partial(efficient, dropout_p=DROPOUT, is_causal=setting.is_causal),
    }


def unfused(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """The scores in memory, several times over."""
    scores = (query * query.shape[3] ** -0.5) @ key.mT
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return F.dropout(scores.softmax(-1), DROPOUT) @ value


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _record(
    writer: Writer, setting: Setting, name: str, call: Callable[..., Tensor], repeat_ms: int, note: str
) -> dict[str, float]:
    """Milliseconds by direction."""
    batch, heads, length, dim = setting.shape
    *leaves, dout = (torch.randn(batch, length, heads, dim, device=DEVICE).half().transpose(1, 2) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    with torch.no_grad():
        forward = measure(lambda: call(*leaves), DEVICE, repeat_ms=repeat_ms)
    out = call(*leaves)
    backward = measure(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), DEVICE, repeat_ms=repeat_ms)
    flops = 4.0 * batch * heads * length**2 * dim / (2 if setting.is_causal else 1)
    timings: dict[str, tuple[Timing, float]] = {"fwd": (forward, flops), "bwd": (backward, 2.5 * flops)}
    for direction, (timing, work) in timings.items():
        tflops = work / timing.p50 / 1e9
        writer.add(Row("volta", str(setting), name, direction, "fp16", *timing, tflops=tflops, note=note))
    return {direction: timing.p50 for direction, (timing, _) in timings.items()}


def _line(setting: Setting, found: dict[str, dict[str, float]]) -> str:
    times = "  ".join(f"{name} {t['fwd']:.3f} + {t['bwd']:.3f} ms" for name, t in found.items())
    return f"{setting}: {times}"
