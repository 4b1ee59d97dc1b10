"""Rows of `encoders` for towers of images: a batch of pixels on the host to pooled vectors on the host. Random pixels, random weights.

`stock` is transformers with attn_implementation="sdpa"; `stock_captured` the same from one CUDA graph; `stock_compiled` the same by
torch.compile(mode="reduce-overhead"), which fuses and captures; `saccade` is stock after `saccade.optimize`. Vectors are held against stock's first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from encoder_captured import Captured
from encoders import CLIP_B, VIT, Architecture, compared
from parts import Part
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.testing.timing import kernel_time, throughput_in_turns

ROUNDS, LEAST = 5, 0.999  # rounds; the least cosine to stock's vectors


@dataclass(frozen=True)
class Images:
    """One batch of images. compiled: whether torch.compile is a peer, which takes half a minute."""

    architecture: Architecture
    batch: int
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.architecture.name} B={self.batch} images fwd bfloat16"

    def pixels(self) -> Tensor:
        """The batch on the host, as a processor makes it."""
        size = self.architecture.sizes["image_size"]
        return torch.randn(self.batch, 3, size, size, generator=torch.Generator().manual_seed(0)).bfloat16()


IMAGES = [Images(model, batch, batch == 8) for model in (VIT, CLIP_B) for batch in (1, 8, 64)]


def measure(writer: Writer, case: Images, device: str, repeat_ms: int) -> str:
    """Write the rows of a case; a line about them."""
    pixels = case.pixels()
    calls, notes, handle = _calls(case, pixels, device, writer.part)
    found = {name: call() for name, call in calls.items()}
    for name, vectors in found.items():
        cosine = F.cosine_similarity(vectors, found["stock"]).min().item()
        if not cosine > LEAST:
            raise SystemExit(f"{name} of {case}: a vector has a cosine of {cosine:.6f} to stock's; at least {LEAST} is asked for")
    times = throughput_in_turns(writer.part.calls(calls), device, ROUNDS, repeat_ms)
    problem = f"{case.architecture.name} B={case.batch} images tokens={case.architecture.tokens}"
    for name, timing in times.items():
        busy = kernel_time(calls[name], device)
        note = [
            f"{1e3 * case.batch / timing.p50:.0f} images/s",
            *([f"kernels {busy:.4g} ms"] if busy else []),
            *notes.get(name, ()),
        ]
        writer.add(Row("encoders", problem, name, "fwd", "bfloat16", *timing, note="; ".join(note)))
    handle.restore()
    return f"{problem}: {compared(times)}"


def _calls(
    case: Images, pixels: Tensor, device: str, part: Part
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, list[str]], Any]:
    ours, theirs = (case.architecture.make(device, torch.bfloat16).model for _ in range(2))
    handle = saccade.optimize(ours)

    def on_host(embed: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[], Tensor]:
        @torch.inference_mode()
        def call() -> Tensor:
            return embed({"pixel_values": pixels}).float().cpu()

        return call

    def stock(batch: dict[str, Tensor], model: Any = theirs) -> Tensor:
        return model(pixel_values=batch["pixel_values"].to(device, non_blocking=True)).last_hidden_state[:, 0]

    calls = {"stock": on_host(stock), "saccade": on_host(lambda batch: ours(**batch).last_hidden_state[:, 0])}
    notes: dict[str, list[str]] = {}
    if torch.device(device).type == "cuda":
        with torch.inference_mode():
            calls["stock_captured"] = on_host(Captured(stock, {"pixel_values": pixels}, device, 2))
        if case.compiled and part.has("stock_compiled"):
            faster = torch.compile(case.architecture.make(device, torch.bfloat16).model, mode="reduce-overhead")
            calls["stock_compiled"] = on_host(lambda batch: stock(batch, faster))
            began = time.monotonic()
            for _ in range(3):
                calls["stock_compiled"]()
            notes["stock_compiled"] = [f"compiled in {time.monotonic() - began:.0f} s"]
    return calls, notes, handle
