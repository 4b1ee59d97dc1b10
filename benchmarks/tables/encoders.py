"""Whole text encoders as a user calls them, one line apart: `saccade.optimize(model)`. MiniLM and BERT-base on real text, random weights.

Forward rows run from the tokenizer's padded tensors on the host to embeddings on the host, one pass over a corpus sorted by length. Training rows run
from a padded batch on the host to updated parameters: linear head, cross entropy, gradient clipping, fused AdamW and dropout as configured, called in
Python outside of any graph. `stock` is transformers with attn_implementation="sdpa"; `varlen_unpadded` packs each batch by hand and calls torch's
varlen_attn, forward alone, as it has no dropout; `saccade` is stock after `saccade.optimize`. Problems name the dtype of the weights, or autocast.

Before anything is timed, embeddings are held against stock's: the least cosine is 0.999 in 16 bits and 0.99999 in float32, or the table ends with an
error. Times are by the wall clock, in turns: median, least and most over the rounds. The note has sentences per second, the time of the kernels
alone, and the graphs of `saccade` with their memory.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from encoder_attention import PACKED_PEER, register_all
from encoder_text import drawn, rows_of
from encoders import BERT, MINILM, Architecture, Encoder
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.testing.timing import kernel_time, throughput_in_turns

DEVICE = "cuda"
ROUNDS = 3
SENTENCES, LONGEST = 2048, 128
Padded = tuple[Tensor, Tensor]  # ids and mask, `[B, T]` on the host


@dataclass(frozen=True)
class Case:
    """dtype: of the weights, or "autocast": bfloat16 over float32 weights."""

    architecture: Architecture
    batch: int
    direction: str
    dtype: str = "bfloat16"

    @property
    def sentences(self) -> int:
        """Of one pass: a corpus that takes no minute at small batches."""
        return self.batch if self.direction != "fwd" else min(SENTENCES, 64 * self.batch)

    def batches(self) -> list[Padded]:
        """Padded batches on the host, as a tokenizer makes them."""
        rows = rows_of(drawn(self.sentences, 0), LONGEST)
        if self.direction == "fwd":
            rows.sort(key=len, reverse=True)
        found = []
        for start in range(0, len(rows), self.batch):
            part = rows[start : start + self.batch]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            lengths = torch.tensor([len(row) for row in part])
            found.append((ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()))
        return found

    def encoder(self) -> Encoder:
        """The encoder, the same weights for each variant."""
        dtype = torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)
        return self.architecture.make(DEVICE, dtype)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast, if the case asks for it."""
        return torch.autocast("cuda", torch.bfloat16) if self.dtype == "autocast" else contextlib.nullcontext()


CASES = [
    *[Case(model, batch, "fwd") for model in (MINILM, BERT) for batch in (8, 32, 128, 512, 2048)],
    *[Case(MINILM, batch, "fwd", dtype) for dtype in ("float32", "autocast") for batch in (32, 512)],
    *[Case(model, batch, "fwd+bwd") for model in (MINILM, BERT) for batch in (16, 64, 256)],
    *[Case(MINILM, 64, "fwd+bwd", dtype) for dtype in ("float32", "autocast")],
]


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure every case."""
    register_all()
    began = time.monotonic()
    for number, case in enumerate(CASES, 1):
        said = _measure(writer, case, repeat_ms)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"[{number}/{len(CASES)}, {time.monotonic() - began:.0f} s] {said}", flush=True)


def _measure(writer: Writer, case: Case, repeat_ms: int) -> str:
    batches = case.batches()
    stock = case.encoder()
    variants = {"stock": stock, "saccade": case.encoder()}
    if case.direction == "fwd" and case.dtype == "bfloat16":
        variants["varlen_unpadded"] = stock.under(PACKED_PEER)
    handle = saccade.optimize(variants["saccade"].model)
    calls = {name: _call(case, name, encoder, batches) for name, encoder in variants.items()}
    if case.direction == "fwd":
        _check(case, {name: call() for name, call in calls.items()})
    times = throughput_in_turns(calls, DEVICE, ROUNDS, repeat_ms)
    real = sum(int(mask.sum()) for _, mask in batches)
    places = sum(mask.numel() for _, mask in batches)
    problem = f"{case.architecture.name} B={case.batch} sentences={case.sentences} mean={real / case.sentences:.0f}"
    problem += f" padding={1 - real / places:.2f}" + (f" {case.dtype}" if case.dtype != "bfloat16" else "")
    for name, timing in times.items():
        busy = kernel_time(calls[name], DEVICE)
        note = [f"{1e3 * case.sentences / timing.p50:.0f} sentences/s"] + ([f"kernels {busy:.4g} ms"] if busy else [])
        if name == "saccade":
            graphs = handle.served[0].graphs.values()
            note.append(f"{len(graphs)} graphs, {sum(g.bytes for g in graphs) / 2**20:.0f} MiB")
        writer.add(Row("encoders", problem, name, case.direction, case.dtype, *timing, note="; ".join(note)))
    handle.restore()
    gains = ", ".join(f"{name} x{times['stock'].p50 / t.p50:.2f}" for name, t in times.items() if name != "stock")
    return f"{problem} {case.direction} {case.dtype}: stock {times['stock'].p50:.2f} ms, {gains}"


def _check(case: Case, found: dict[str, Any]) -> None:
    least = 0.99999 if case.dtype == "float32" else 0.999
    for name, embeddings in found.items():
        cosine = F.cosine_similarity(embeddings, found["stock"]).min().item()
        if not cosine > least:
            raise SystemExit(
                f"{name} of {case}: an embedding has a cosine of {cosine:.6f} to stock's; at least {least} is asked for"
            )


def _call(case: Case, name: str, encoder: Encoder, batches: list[Padded]) -> Callable[[], Any]:
    """What is timed."""
    if case.direction != "fwd":
        return _training_step(case, name, encoder, batches[0])
    hidden = _packed_hidden if name == "varlen_unpadded" else _ours if name == "saccade" else _stock

    @torch.inference_mode()
    def embed() -> Tensor:
        outs = []
        with case.precision():
            for ids, mask in batches:
                there = mask.to(DEVICE, non_blocking=True)
                rows = hidden(encoder, ids, mask, there).float() * there[..., None]
                outs.append(rows.sum(1) / there.sum(1, keepdim=True))
        return torch.cat(outs).cpu()

    return embed


def _stock(encoder: Encoder, ids: Tensor, mask: Tensor, there: Tensor) -> Tensor:
    return encoder.model(input_ids=ids.to(DEVICE, non_blocking=True), attention_mask=there).last_hidden_state


def _ours(encoder: Encoder, ids: Tensor, mask: Tensor, there: Tensor) -> Tensor:
    return encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state


def _packed_hidden(encoder: Encoder, ids: Tensor, mask: Tensor, there: Tensor) -> Tensor:
    """One row of real tokens through torch's varlen_attn, and back into the padded batch."""
    places = mask.flatten().nonzero().squeeze(1)
    ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).int().to(DEVICE, non_blocking=True)
    given = {
        "input_ids": ids.flatten()[places][None].to(DEVICE, non_blocking=True),
        "position_ids": (places % ids.shape[1])[None].to(DEVICE, non_blocking=True),
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": ids.shape[1], "max_length_k": ids.shape[1],
    }  # fmt: skip
    rows = encoder.model(**given).last_hidden_state[0]
    padded = rows.new_zeros((ids.numel(), rows.shape[1]))
    return padded.index_copy(0, places.to(DEVICE, non_blocking=True), rows).view(*ids.shape, -1)


def _training_step(case: Case, name: str, encoder: Encoder, batch: Padded) -> Callable[[], None]:
    labels = torch.arange(case.batch, device=DEVICE) % encoder.head.out_features
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=True)
    encoder.train()
    ids, mask = batch

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with case.precision():
            given = (ids, mask) if name == "saccade" else (ids.to(DEVICE), mask.to(DEVICE))
            hidden = encoder.model(input_ids=given[0], attention_mask=given[1]).last_hidden_state
            loss = F.cross_entropy(encoder.head(hidden[:, 0]).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimiser.step()

    return step
