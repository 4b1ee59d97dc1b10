"""Models that keep their own forward and get another attention call: BERT and T5 on passages of real text, ViT, CLIP, SigLIP, DINOv2 and Swin on
images; forward, and steps of training with fused AdamW and dropout as configured. And torch's own `nn.TransformerEncoder` (`torch_encoder.py`).
Encoders of text after `saccade.optimize` are the table `encoders`.

`stock` is transformers with attn_implementation="sdpa", padded; `saccade` the same batches with "saccade"; `saccade_unpadded` the real
tokens of a batch in one row, told apart by cu_seq_lens_*, which is one line for a collator; `varlen_unpadded` and `fa4_unpadded` the
same through torch's varlen_attn and, if it is installed, FlashAttention-4, neither of which has dropout. `saccade_cls_only` computes
the pooled token alone in the last layer. All are bf16, weights too, which is the fastest setting of each.

Weights are random, in the real configurations: no weights are downloaded, and times do not depend on them. Text is Python's own
documentation (`encoder_text.py`). Before anything is timed, every implementation is held against the stock one on that very model and
those batches (`encoder_check.py`), and the table ends with an error where one differs. Times are by the wall clock, in turns with
stock: median, least and most over the rounds; batches lie on the device before. The note has items per second, the time that the kernels
alone take, which is less than the row's where the host is slower, and the share of the time that goes when attention is left out (a
call that hands on V, and its gradient to all three).
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from encoder_attention import NOTHING, peer_names, register_all
from encoder_check import Variant, over_budget
from encoder_text import passages
from encoders import (
    BERT,
    CLIP,
    DINO,
    SIGLIP,
    T5,
    VIT,
    Architecture,
    Batch,
    Encoder,
    compared,
    image_batch,
    text_batch,
    training_step,
)
from rows import Row, Writer
from swin_step import SWIN, measure_swin
from torch_encoder import NAME as TORCH_ENCODER
from torch_encoder import SIZES, measure_torch_encoder

from saccade.testing.timing import Timing, kernel_time, throughput_in_turns

DEVICE, DTYPE = "cuda", torch.bfloat16
NAMES = ("stock", "saccade", "saccade_unpadded", "varlen_unpadded", "fa4_unpadded", "saccade_cls_only")
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """A problem of the table. passages: the length to which texts are padded; 0 for images."""

    architecture: Architecture
    batch: int
    direction: str
    passages: int = 0
    feature: str = ""

    def batch_of(self) -> Batch:
        """The batch that one call computes."""
        if not self.architecture.is_text:
            return image_batch(self.architecture.sizes["image_size"], self.batch, DEVICE, DTYPE)
        normal = torch.randn(self.batch, generator=torch.Generator().manual_seed(0)) * 0.5
        lengths = (normal.exp() * 0.45 * self.passages).long().clamp(4, self.passages)
        return text_batch(passages(lengths.tolist()), DEVICE, self.passages)

    def __str__(self) -> str:
        return f"{self._named('')} {self.direction}"

    def described(self, batch: Batch) -> str:
        """The problem of its rows: model, batch and text."""
        if not self.architecture.is_text:
            return self._named("")
        places, real = batch.padded["input_ids"].numel(), int(batch.padded["attention_mask"].sum())
        items = len(batch.labels)
        return self._named(f" items={items} mean={real / items:.0f} padding={1 - real / places:.2f}")

    def _named(self, of_text: str) -> str:
        said = f"{self.architecture.name} B={self.batch}"
        said += f" passages S={self.passages}" if self.architecture.is_text else f" S={self.architecture.tokens}"
        return f"{said}{of_text} {self.feature}".rstrip()


def _cases() -> list[Case]:
    both = ("fwd", "fwd+bwd")
    return [
        *(Case(BERT, batch, direction, 512) for batch in (32, 256) for direction in both),
        *(Case(T5, 32, direction, 512) for direction in both),
        *(Case(VIT, batch, direction) for batch in (64, 256) for direction in both),
        *(Case(model, 64, "fwd+bwd") for model in (CLIP, SIGLIP, DINO)),
        *(Case(model, 256, "fwd", length, "cls_only") for model, length in ((BERT, 128), (VIT, 0))),
        *(Case(model, batch, "fwd", length, "compiled") for model, batch, length in ((BERT, 32, 128), (VIT, 64, 0))),
    ]  # fmt: skip


CASES = _cases()


def every_case() -> dict[str, Callable[[Writer, int], None]]:
    """Name -> what measures a case and writes its rows."""
    found: dict[str, Callable[[Writer, int], None]] = {str(case): functools.partial(_measured, case) for case in CASES}
    found[f"{SWIN} fwd+bwd"] = lambda writer, repeat_ms: measure_swin(writer, repeat_ms, ROUNDS, DEVICE, DTYPE)
    for tokens, batch in SIZES:
        found[f"{TORCH_ENCODER} B={batch} S={tokens}"] = functools.partial(_torch_encoder, (tokens, batch))
    return found


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case: without what its text turned out to be. One case of torch's own encoder has both directions."""
    problem = re.sub(r" items=[0-9]+ mean=[0-9]+ padding=[0-9.]+", "", row["problem"])
    return problem if problem.startswith(TORCH_ENCODER) else f"{problem} {row['direction']}"


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure every case."""
    register_all()
    cases = every_case()
    for name in writer.part.cases(cases):
        cases[name](writer, repeat_ms)


def _measured(case: Case, writer: Writer, repeat_ms: int) -> None:
    """Measure a case, or leave it where memory is too small."""
    try:
        said = _measure(writer, case, repeat_ms)
    except torch.OutOfMemoryError as error:
        said = f"{case} is left out: {str(error).splitlines()[0]}"
        writer.part.left.append(str(case))
    gc.collect()
    torch.cuda.empty_cache()
    print(said, flush=True)


def _torch_encoder(size: tuple[int, int], writer: Writer, repeat_ms: int) -> None:
    measure_torch_encoder(writer, repeat_ms, ROUNDS, DEVICE, DTYPE, (size,))


def _measure(writer: Writer, case: Case, repeat_ms: int) -> str:
    """Check and time a case, write its rows; the line to print."""
    batch = case.batch_of()
    problem = case.described(batch)
    variants, predicted = _variants(case, case.architecture.make(DEVICE, DTYPE))
    without = {name: variants.pop(name) for name in (NOTHING, f"{NOTHING}_packed") if name in variants}
    measured = writer.part.calls(variants)
    stock = variants["stock"]
    others = {name: variant for name, variant in variants.items() if name != "stock"}
    ratios = over_budget(stock, others, [batch], case.direction != "fwd")
    calls = {name: _call(case, variant, batch) for name, variant in {**measured, **without}.items()}
    times = throughput_in_turns(calls, DEVICE, ROUNDS, repeat_ms)
    busy = {name: kernel_time(calls[name], DEVICE) for name in measured}
    for name, variant in measured.items():
        bare = times.get(f"{NOTHING}_packed" if variant.packed else NOTHING)
        note = _note(
            len(batch.labels), times[name], busy[name], bare, case.feature, predicted if name == "saccade_cls_only" else None
        )
        row = Row("models", problem, name, case.direction, str(DTYPE).removeprefix("torch."), *times[name], note=note)
        row.error_ratio = ratios.get(name, "")
        writer.add(row)
    return f"{problem} {case.direction}: {compared({name: times[name] for name in measured})}"


def _variants(case: Case, encoder: Encoder) -> tuple[dict[str, Variant], float | None]:
    """Name -> variant, those without attention included; and the gain that the share of the last layer predicts for CLS only."""
    ours = encoder.under("saccade")
    found = {"stock": Variant(encoder), "saccade": Variant(ours)}
    if case.feature == "cls_only":
        from saccade.integrations.pooled import cls_only

        alone = encoder.under("saccade")
        tokens = case.passages or case.architecture.tokens
        (saved,) = cls_only(alone.model).saved(tokens).values()
        found["saccade_cls_only"] = Variant(alone)
        return found, 1 / (1 - saved / case.architecture.sizes["num_hidden_layers"])
    if case.feature == "compiled":
        return {name: Variant(torch.compile(variant.encoder)) for name, variant in found.items()}, None  # type: ignore[arg-type]
    bare = encoder.under(NOTHING)
    found[NOTHING] = Variant(bare)
    if case.architecture.packs:
        found |= {"saccade_unpadded": Variant(ours if case.direction == "fwd" else encoder.under("saccade"), True)}
        found[f"{NOTHING}_packed"] = Variant(bare if case.direction == "fwd" else encoder.under(NOTHING), True)
        if case.direction == "fwd":
            found |= {rows: Variant(encoder.under(attention), True) for rows, attention in peer_names(DEVICE).items()}
    return found, None


def _call(case: Case, variant: Variant, batch: Batch) -> Callable[[], object]:
    """The call that is timed."""
    inputs = variant.inputs(batch)
    if case.direction != "fwd":
        return training_step(variant.encoder, inputs, batch.labels)
    return functools.partial(_forward, variant.encoder, inputs)


@torch.inference_mode()
def _forward(encoder: Encoder, inputs: dict[str, Any]) -> None:
    encoder(inputs)


def _note(items: int, timing: Timing, busy: float | None, bare: Timing | None, feature: str, predicted: float | None) -> str:
    parts = [f"{1e3 * items / timing.p50:.0f} items/s"]
    if busy is not None:
        parts.append(f"kernels {busy:.4g} ms")
    if bare is not None:
        parts.append(f"attention {max(0.0, 1 - bare.p50 / timing.p50):.2f} of the time")
    if predicted is not None:
        parts.append(f"x{predicted:.3f} of saccade predicted")
    return "; ".join(parts + ([feature] if feature else []))
