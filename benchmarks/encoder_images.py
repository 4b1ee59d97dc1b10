"""Rows of `encoders` for towers of images: a batch of pixels on the host to pooled vectors on the host. Random pixels, random weights.

`stock` is transformers with attn_implementation="sdpa"; `stock_captured` the same from one CUDA graph; `stock_compiled` the same by
torch.compile(mode="reduce-overhead"), which fuses and captures; `saccade` is stock after `saccade.optimize`, and `saccade_plain` after
`saccade.optimize(model, fuse=False)`. Vectors are held against stock's first.

transformers 5.17 builds a mask of ones whenever a stream captures or torch.compile traces, which costs a ViT 2.4 times its kernels' time. Later releases
do not, so stock's captured and compiled rows go without that mask.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from encoder_captured import Captured
from encoders import CLIP_B, VIT, Architecture, compared
from parts import Part
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.testing.timing import kernel_time, throughput_in_turns

Calls = dict[str, Callable[[], Tensor]]
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
    plain, _ = _ours(case, pixels, device, fuse=False)
    fused, note = _ours(case, pixels, device, fuse=True)
    with _without_mask_of_ones():
        return _measured(writer, case, {"saccade": fused, "saccade_plain": plain}, {"saccade": [note]}, device, repeat_ms)


def _measured(writer: Writer, case: Images, ours: Calls, notes: dict[str, list[str]], device: str, repeat_ms: int) -> str:
    theirs, more = _stock(case, case.pixels(), device, writer.part)
    notes = notes | more
    calls = {"stock": theirs.pop("stock"), **ours, **theirs}
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
    return f"{problem}: {compared(times)}"


def _on_host(embed: Callable[[dict[str, Tensor]], Tensor], pixels: Tensor) -> Callable[[], Tensor]:
    @torch.inference_mode()
    def call() -> Tensor:
        return embed({"pixel_values": pixels}).float().cpu()

    return call


def _ours(case: Images, pixels: Tensor, device: str, fuse: bool) -> tuple[Callable[[], Tensor], str]:
    """An optimised model, called once so that it has its graph, and a note on its layers."""
    model = case.architecture.make(device, torch.bfloat16).model
    (one,) = saccade.optimize(model, fuse=fuse).served
    call = _on_host(lambda batch: model(**batch).last_hidden_state[:, 0], pixels)
    call()
    return call, f"compiled in {one.fusion.seconds:.0f} s" if one.fusion is not None else ""


def _stock(case: Images, pixels: Tensor, device: str, part: Part) -> tuple[Calls, dict[str, list[str]]]:
    def stock(batch: dict[str, Tensor], model: Any) -> Tensor:
        return model(pixel_values=batch["pixel_values"].to(device, non_blocking=True)).last_hidden_state[:, 0]

    theirs = case.architecture.make(device, torch.bfloat16).model
    eager = functools.partial(stock, model=theirs)
    calls, notes = {"stock": _on_host(eager, pixels)}, {}
    if torch.device(device).type == "cuda":
        with torch.inference_mode():
            calls["stock_captured"] = _on_host(Captured(eager, {"pixel_values": pixels}, device, 2), pixels)
        if case.compiled and part.has("stock_compiled"):
            faster = torch.compile(case.architecture.make(device, torch.bfloat16).model, mode="reduce-overhead")
            calls["stock_compiled"] = _on_host(functools.partial(stock, model=faster), pixels)
            began = time.monotonic()
            for _ in range(3):
                calls["stock_compiled"]()
            notes["stock_compiled"] = [f"compiled in {time.monotonic() - began:.0f} s"]
    return calls, notes


@contextlib.contextmanager
def _without_mask_of_ones() -> Iterator[None]:
    """Models of transformers see no tracing, for which some releases build a mask although there is no padding."""
    from transformers import masking_utils

    with patch.object(masking_utils, "is_tracing", lambda *_: False):
        yield
