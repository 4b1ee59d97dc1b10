"""The last layer for the CLS token alone, in encoders of 1 to 12 layers: forward and training steps, beside what the share of the last
layer predicts (paper 002, which recommends it in its introduction and gives no number).

BERT-base on 256 running texts of 128 tokens and ViT-B/16 on 128 images (197 tokens), as transformers makes them, with random weights
and 1 to 12 of their layers, bf16. `stock` is attn_implementation="sdpa", `saccade` ours; with `_cls_only` after
`saccade.integrations.pooled.cls_only`, by which the last layer makes keys and values of all tokens and everything else of one. A
training step has forward, backward, dropout as configured, and fused AdamW.

The note of a `_cls_only` row has its gain over the same attention without it, and two predictions. One is by multiplications: if the
last of L equal layers does without a share s of its own (`ClsOnly.saved`), 1 / (1 - s / L). The other is by time: layers take
the slope of a straight line through the times of all depths, so that embeddings, the head and the optimiser are not taken for
layers, and s of one layer's time is saved. Norms, activations and launches are in neither share s.

Before anything is timed, each variant is held against the stock one on the first 32 items (`encoder_check.py`), gradients too, and
the table ends with an error where one differs. Times are by the wall clock, in turns: median, least and most over the rounds.
"""

from __future__ import annotations

import functools
import gc
import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from encoder_attention import register_all
from encoder_check import Variant, over_budget
from encoder_text import passages
from encoders import BERT, VIT, Architecture, Batch, Encoder, image_batch, text_batch, training_step
from rows import Row, Writer
from torch import Tensor

from saccade.integrations.pooled import cls_only
from saccade.testing.timing import Timing, throughput_in_turns

DEVICE, DTYPE = "cuda", torch.bfloat16
ROUNDS = 5
DEPTHS = tuple(range(1, 13))
CHECKED = 32  # items that are compared with stock
ATTENTIONS = {"stock": "sdpa", "saccade": "saccade"}


@dataclass(frozen=True)
class Model:
    """An encoder, and what one call computes. tokens: of each text, or as many as the image has."""

    architecture: Architecture
    batch: int
    tokens: int

    def inputs(self, items: int) -> Batch:
        """The first of the batch."""
        if self.architecture.is_text:
            return text_batch(passages([self.tokens] * items), DEVICE)
        return image_batch(self.architecture.sizes["image_size"], items, DEVICE, DTYPE)

    def of_depth(self, depth: int) -> Architecture:
        """The encoder with so many layers."""
        return replace(self.architecture, sizes={**self.architecture.sizes, "num_hidden_layers": depth})

    def described(self, depth: int) -> str:
        """The problem of its rows."""
        return f"{self.architecture.name} L={depth} B={self.batch} S={self.tokens}"


MODELS = [Model(BERT, 256, 128), Model(VIT, 128, VIT.tokens)]


@dataclass(frozen=True)
class Case:
    """All depths of a model in one direction, since a prediction needs all."""

    model: Model
    direction: str

    def __str__(self) -> str:
        return case_of({"problem": self.model.described(1), "direction": self.direction})


def every_case() -> list[Case]:
    """The parts of the table."""
    return [Case(model, direction) for model in MODELS for direction in ("fwd", "fwd+bwd")]


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case: its problem at any depth, and its direction."""
    return f"{re.sub(r' L=[0-9]+', '', row['problem'])} {row['direction']}"


def run(writer: Writer, repeat_ms: int) -> None:
    """Every model and direction: all depths are checked and timed, then their rows are written."""
    register_all()
    for case in writer.part.cases(every_case()):
        found = {depth: measure(case.model, depth, case.direction, repeat_ms) for depth in DEPTHS}
        _write(writer, case.model, case.direction, found)


@dataclass(frozen=True)
class Measured:
    """One depth: times and errors by backend, and the share of the last layer's multiplications that is saved."""

    times: dict[str, Timing]
    ratios: dict[str, float]
    saved: float


def measure(model: Model, depth: int, direction: str, repeat_ms: int) -> Measured:
    """Check and time the four variants of one depth."""
    encoder = model.of_depth(depth).make(DEVICE, DTYPE)
    variants, saved = {}, 0.0
    for name, attention in ATTENTIONS.items():
        variants[name], alone = Variant(encoder.under(attention)), encoder.under(attention)
        (saved,) = cls_only(alone.model).saved(model.tokens).values()
        variants[f"{name}_cls_only"] = Variant(alone)
    others = {name: variant for name, variant in variants.items() if name != "stock"}
    ratios = over_budget(variants["stock"], others, [model.inputs(min(CHECKED, model.batch))], direction != "fwd")
    batch = model.inputs(model.batch)
    calls = {name: _call(variant, batch, direction) for name, variant in variants.items()}
    times = throughput_in_turns(calls, DEVICE, ROUNDS, repeat_ms)
    del encoder, variants, others, calls
    gc.collect()
    torch.cuda.empty_cache()
    return Measured(times, ratios, saved)


def _call(variant: Variant, batch: Batch, direction: str) -> Callable[[], object]:
    if direction != "fwd":
        return training_step(variant.encoder, batch.padded, batch.labels)
    return functools.partial(_forward, variant.encoder, batch)


@torch.inference_mode()
def _forward(encoder: Encoder, batch: Batch) -> Tensor:
    return encoder(batch.padded)


def by_multiplications(saved: float, depth: int) -> float:
    """The gain where the last of `depth` equal layers does without a share `saved` of its work."""
    return 1 / (1 - saved / depth)


def by_time(saved: float, times: dict[int, float]) -> dict[int, float]:
    """The same by depth, where a layer takes the slope of the line through `times`, the milliseconds of each depth; NaN where the times scatter so
    much that the saved part of a layer would take longer than the whole encoder."""
    slope, _ = statistics.linear_regression(list(times), list(times.values()))
    left = {depth: 1 - saved * slope / time for depth, time in times.items()}
    return {depth: 1 / share if share > 0 else math.nan for depth, share in left.items()}


def _write(writer: Writer, model: Model, direction: str, found: dict[int, Measured]) -> None:
    timed = {
        name: by_time(found[DEPTHS[0]].saved, {depth: one.times[name].p50 for depth, one in found.items()}) for name in ATTENTIONS
    }
    for depth, one in found.items():
        for name, timing in one.times.items():
            note = f"{1e3 * model.batch / timing.p50:.0f} items/s"
            whole = name.removesuffix("_cls_only")
            if whole != name:
                note += (
                    f"; x{one.times[whole].p50 / timing.p50:.3f} of {whole}, x{by_multiplications(one.saved, depth):.3f} predicted "
                    f"by multiplications, x{timed[whole][depth]:.3f} by time"
                )
                print(f"{model.described(depth)} {direction} {name}: {timing.p50:.3f} ms, {note}", flush=True)
            row = Row(
                "pooled_depth", model.described(depth), name, direction, str(DTYPE).removeprefix("torch."), *timing, note=note
            )
            row.error_ratio = one.ratios.get(name, "")
            writer.add(row)
