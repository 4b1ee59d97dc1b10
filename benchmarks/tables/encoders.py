"""Whole text encoders as a user calls them, one line apart: `saccade.optimize(model)`. Real text, random weights.

Forward rows run a `SentenceTransformer` (encoder and pooling) from the tokenizer's padded tensors on the host to embeddings on the host, one pass over
a corpus sorted by length. Training rows run from a padded batch on the host to updated parameters: linear head, cross entropy, gradient clipping,
AdamW and dropout as configured. Problems name the dtype of the weights, or autocast.

Backends: `stock` is transformers with attn_implementation="sdpa"; `stock_captured` the same padded forward from CUDA graphs, one for each shape, widths
in steps of 16; `stock_compiled` the fastest of the ways of torch.compile that the note lists, four at 512 sentences; `varlen_unpadded` packs by hand and calls torch's varlen_attn, `varlen_captured` the same from CUDA graphs; `saccade` is stock after
`saccade.optimize`, and `saccade_plain` after `saccade.optimize(model, fuse=False)`. Training: `stock` and `saccade` call fused AdamW from Python,
outside of any graph; `stock_captured`, `saccade_captured` and `saccade_plain_captured` have the whole step in a graph (`handle.capture`), AdamW with
capturable=True.

Rows of strings (`--rows strings`) are those of `encoder_strings`: `encode` and `predict` from strings to results on the host. Rows of images (`--rows
images`) are those of `encoder_images`.

Before anything is timed, embeddings are held against stock's: the least cosine is 0.999 in 16 bits and 0.99999 in float32, or the table ends with an
error. Times are by the wall clock, in turns: median, least and most over the rounds. The note has sentences per second, the time of the kernels
alone, the graphs of `saccade` with their memory, and where the host time of a step in the user's loop goes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from encoder_attention import VARLEN_PEER, register_all
from encoder_captured import Captured, Padded, captured_forward, captured_step
from encoder_compiled import OF_SHAPES, WAYS, fastest
from encoder_images import IMAGES, Images
from encoder_images import measure as measure_images
from encoder_steps import Head, Step, host_split
from encoder_strings import STRINGS, Strings
from encoder_strings import measure as measure_strings
from encoder_text import drawn, passages
from encoders import BERT, MINILM, MODERN, XLMR, Architecture, compared
from parts import Part
from rows import Row, Writer
from sentence_models import batches_of, sentence_transformer
from torch import Tensor, nn

import saccade
from saccade.testing.timing import kernel_time, throughput_in_turns

DEVICE = "cuda"
ROUNDS = 3
SENTENCES = 2048
NAMES = (
    "stock", "stock_captured", "stock_compiled", "stock_best", "varlen_unpadded", "varlen_captured", "saccade", "saccade_plain", "saccade_captured",
    "saccade_plain_captured",
)  # fmt: skip
PASSAGES = (180, 512)  # tokens in the mean, and at most


@dataclass(frozen=True)
class Case:
    """dtype: of the weights, or "autocast": bfloat16 over float32 weights. passages: texts of some 180 tokens in place of sentences. peers: beside
    stock."""

    architecture: Architecture
    batch: int
    direction: str
    dtype: str = "bfloat16"
    passages: bool = False
    peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "passages" if self.passages else "sentences"
        return f"{self.architecture.name} B={self.batch} {kind} {self.direction} {self.dtype}"

    @property
    def texts(self) -> int:
        """The number of texts in one pass: a corpus that takes less than a minute at small batches."""
        return self.batch if self.direction != "fwd" else min(SENTENCES // (4 if self.passages else 1), 32 * self.batch)

    @property
    def longest(self) -> int:
        """Tokens at which a text is cut."""
        return PASSAGES[1] if self.passages else 128

    def batches(self) -> list[Padded]:
        """Padded batches on the host, as a tokenizer makes them."""
        if not self.passages:
            return batches_of(drawn(self.texts, 0), self.batch)
        made = torch.Generator().manual_seed(0)
        lengths = (torch.randn(self.texts, generator=made) * 0.5).exp().mul(PASSAGES[0] * 0.9).long().clamp(8, PASSAGES[1])
        rows = passages(lengths.sort(descending=True).values.tolist())
        found = []
        for start in range(0, len(rows), self.batch):
            part = rows[start : start + self.batch]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            ends = torch.tensor([len(row) for row in part])
            found.append({"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < ends[:, None]).long()})
        return found

    def model(self) -> Any:
        """The sentence transformer, the same weights for each variant."""
        dtype = torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)
        return sentence_transformer(self.architecture, DEVICE, dtype, self.longest)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast, if the case asks for it."""
        return torch.autocast("cuda", torch.bfloat16) if self.dtype == "autocast" else contextlib.nullcontext()


PEERS = ("stock_captured", "varlen_unpadded")
CASES = [
    *[
        Case(MINILM, batch, "fwd", peers=(*PEERS, "stock_compiled") if batch in (32, 512) else PEERS)
        for batch in (1, 8, 32, 128, 512, 2048)
    ],
    *[Case(BERT, batch, "fwd", peers=PEERS) for batch in (1, 8, 32, 128, 512, 2048)],
    *[Case(XLMR, batch, "fwd", peers=PEERS) for batch in (32, 512)],
    *[Case(MINILM, batch, "fwd", dtype, peers=("stock_captured",)) for dtype in ("float32", "autocast") for batch in (32, 512)],
    *[Case(BERT, batch, "fwd", passages=True, peers=PEERS) for batch in (8, 32, 256)],
    *[Case(MODERN, batch, "fwd", passages=True, peers=(*PEERS, "varlen_captured")) for batch in (32, 256)],
    *[Case(model, batch, "fwd+bwd", peers=("stock_captured",)) for model in (MINILM, BERT) for batch in (16, 64, 256)],
    *[Case(MINILM, 64, "fwd+bwd", dtype) for dtype in ("float32", "autocast")],
    Case(BERT, 32, "fwd+bwd", passages=True, peers=("stock_captured",)),
]


def every_case() -> list[Case | Images | Strings]:
    """The rows of the table: text, images, strings."""
    return [*CASES, *IMAGES, *STRINGS]


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case: without what its texts turned out to be."""
    problem, strings = re.subn(r"texts=([0-9]+) mean=[0-9]+", r"\1", row["problem"])
    kind = re.match(r".* (sentences|passages|images)\b", problem)
    return problem if strings or not kind else f"{kind[0]} {row['direction']} {row['dtype']}"


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure every case."""
    register_all()
    for case in writer.part.cases(every_case()):
        if isinstance(case, Strings):
            said = measure_strings(writer, case, DEVICE)
        elif isinstance(case, Images):
            said = measure_images(writer, case, DEVICE, repeat_ms)
        else:
            said = (_measure_forward if case.direction == "fwd" else _measure_training)(writer, case, repeat_ms)
        gc.collect()
        torch.cuda.empty_cache()
        print(said, flush=True)


def _measure_forward(writer: Writer, case: Case, repeat_ms: int) -> str:
    batches = case.batches()
    calls, handles, notes = _forward_calls(case, batches, writer.part)
    _check(case, {name: call() for name, call in calls.items()})
    times = throughput_in_turns(writer.part.calls(calls), DEVICE, ROUNDS, repeat_ms)
    said = _write(writer, case, batches, times, calls, handles, notes)
    for one in handles.values():
        one.restore()
    return said


def _measure_training(writer: Writer, case: Case, repeat_ms: int) -> str:
    batches, calls = case.batches(), {}
    handles, loops = {}, {}
    for name in filter(writer.part.has, ("stock", "saccade", "saccade_captured", "saccade_plain_captured", *case.peers)):
        model = Head(case.model()[0].auto_model, name.startswith("saccade"))
        if model.is_ours:
            handles[name] = saccade.optimize(model, fuse="plain" not in name)
        step: Any = Step(model, case.precision, "captured" in name)
        if "captured" not in name:
            loops[name] = step
        if model.is_ours and "captured" in name:
            step = handles[name].capture(step)
        elif name == "stock_captured":
            step = captured_step(step, batches[0], DEVICE)
        calls[name] = lambda step=step: step(batches[0])
        for _ in range(4):
            calls[name]()
    times = throughput_in_turns(calls, DEVICE, ROUNDS, repeat_ms)
    splits = {name: host_split(step, batches[0]) for name, step in loops.items()}
    said = _write(writer, case, batches, times, calls, handles, splits)
    for handle in handles.values():
        handle.restore()
    return said


def _write(
    writer: Writer,
    case: Case,
    batches: list[Padded],
    times: dict[str, Any],
    calls: dict[str, Any],
    handles: dict[str, Any],
    notes: dict[str, str],
) -> str:
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    places = sum(batch["attention_mask"].numel() for batch in batches)
    problem = f"{case.architecture.name} B={case.batch} {'passages' if case.passages else 'sentences'}={case.texts}"
    problem += f" mean={real / case.texts:.0f} padding={1 - real / places:.2f}"
    problem += f" {case.dtype}" if case.dtype != "bfloat16" else ""
    for name, timing in times.items():
        busy = kernel_time(calls[name], DEVICE)
        note = [f"{1e3 * case.texts / timing.p50:.0f} texts/s"] + ([f"kernels {busy:.4g} ms"] if busy else [])
        note += [notes[name]] if name in notes else []
        if name in handles:
            graphs = handles[name].served[0].graphs.values()
            fusion = handles[name].served[0].fusion
            note += [f"compiled in {fusion.seconds:.0f} s"] if fusion is not None else []
            note.append(f"{len(graphs)} graphs, {sum(g.bytes for g in graphs) / 2**20:.0f} MiB")
        writer.add(Row("encoders", problem, name, case.direction, case.dtype, *timing, note="; ".join(note)))
    return f"{problem} {case.direction}: {compared(times)}"


def _check(case: Case, found: dict[str, Any]) -> None:
    least = 0.99999 if case.dtype == "float32" else 0.999
    for name, embeddings in found.items():
        cosine = F.cosine_similarity(embeddings, found["stock"]).min().item()
        if not cosine > least:
            raise SystemExit(
                f"{name} of {case}: an embedding has a cosine of {cosine:.6f} to stock's; at least {least} is asked for"
            )


def _forward_calls(
    case: Case, batches: list[Padded], part: Part
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Any], dict[str, str]]:
    """The calls that are compared, by backend, the handles of ours, and what the notes say of others."""
    ours, plain, theirs = case.model(), case.model(), case.model()
    handles = {"saccade": saccade.optimize(ours), "saccade_plain": saccade.optimize(plain, fuse=False)}
    embeds: dict[str, Callable[[Padded], Tensor]] = {
        "stock": lambda batch: theirs(_there(batch))["sentence_embedding"],
        "saccade": lambda batch: ours(dict(batch))["sentence_embedding"],
        "saccade_plain": lambda batch: plain(dict(batch))["sentence_embedding"],
    }
    notes: dict[str, str] = {}
    for name in filter(part.has, case.peers):
        if name == "stock_compiled":
            with case.precision():
                ways = WAYS if case.batch == 512 else OF_SHAPES
                compiled = fastest(functools.partial(_compiled, case), batches, torch.cuda.synchronize, ways)
            notes[name] = compiled.note
            if compiled.embed is None:
                print(f"  stock_compiled: {compiled.note}")
            else:
                embeds[name] = compiled.embed
            continue
        model = case.model()
        if name == "stock_captured":
            embeds[name] = captured_forward(lambda batch, model=model: model(batch)["sentence_embedding"], DEVICE)
        else:
            model[0].auto_model.set_attn_implementation(VARLEN_PEER)
            embeds[name] = lambda batch, model=model: _embedded(case, model[0].auto_model, *_as_packed(case, batch))
            if name == "varlen_captured":
                embeds[name] = _captured_packed(case, model[0].auto_model)

    def call(embed: Callable[[Padded], Tensor]) -> Callable[[], Tensor]:
        @torch.inference_mode()
        def run() -> Tensor:
            with case.precision():
                return torch.cat([embed(batch) for batch in batches]).float().cpu()

        return run

    return {name: call(embed) for name, embed in embeds.items()}, handles, notes


def _compiled(case: Case, options: dict[str, Any]) -> Callable[[Padded], Tensor]:
    """Stock with a compiled encoder. `nn.Module.compile` would do nothing: sentence-transformers calls the encoder's forward by its name."""
    model = case.model()
    encoder = model[0].auto_model
    encoder.forward = torch.compile(encoder.forward, **options)
    return lambda batch: model(_there(batch))["sentence_embedding"]


def _there(batch: Padded) -> Padded:
    return {name: x.to(DEVICE, non_blocking=True) for name, x in batch.items()}


def _as_packed(case: Case, batch: Padded) -> tuple[Padded, int]:
    """The real tokens of a batch in one row, their positions and the ends of the sequences, on the device; and its width."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    places = mask.flatten().nonzero().squeeze(1)
    ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).int().to(DEVICE, non_blocking=True)
    positions = places % ids.shape[1] + (1 if case.architecture.kind == "XLMRoberta" else 0)  # behind the padding id, 0
    row, positions = (x[None].to(DEVICE, non_blocking=True) for x in (ids.flatten()[places], positions))
    return {"input_ids": row, "position_ids": positions, "ends": ends}, ids.shape[1]


def _embedded(case: Case, model: nn.Module, packed: Padded, width: int) -> Tensor:
    """One row of real tokens through torch's varlen_attn, pooled from there."""
    given, ends = dict(packed), packed["ends"]
    del given["ends"]
    borders = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": width, "max_length_k": width}
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        model.pooler = None  # it would read the first token of the row
    rows = model(**given, **borders).last_hidden_state[0]
    if pooler is not None:
        model.pooler = pooler
    if case.architecture.pool == "first":
        return rows.index_select(0, ends[:-1])
    return torch.segment_reduce(rows.float(), "mean", offsets=ends, axis=0, unsafe=True)


def _captured_packed(case: Case, model: nn.Module) -> Callable[[Padded], Tensor]:
    """The same from a CUDA graph for each number of tokens and sequences and each width."""
    graphs: dict[tuple[int, ...], Captured] = {}

    def call(batch: Padded) -> Tensor:
        packed, width = _as_packed(case, batch)
        key = (packed["input_ids"].shape[1], packed["ends"].shape[0], width)
        if key not in graphs:
            graphs[key] = Captured(lambda given: _embedded(case, model, given, width), packed, DEVICE, 2)
        return graphs[key](packed).clone()

    return call
