"""Rows of `encoders` that begin with strings: `SentenceTransformer.encode` and `CrossEncoder.predict`. Real text, random weights.

Backends: `stock` with its batch_size of 32; `stock_best` with the better of 128 and 512 in a short trial; `saccade` at its defaults. Results are held
against stock's before anything is timed. The note of `saccade` says what the host and the GPU take by themselves: the tokenizer's Rust code in one call
over all texts, and the batches of the pipeline, made ahead. It also says which share of another run was spent waiting for tokens and for results.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from encoder_text import drawn
from encoders import MINILM, Architecture
from rows import Row, Writer
from sentence_models import LONGEST, cross_encoder, sentence_transformer

import saccade
from saccade.encoders import pipeline
from saccade.testing.timing import Timing, kernel_time

ROUNDS, WINDOW = 2, 0.5  # seconds in which a short call is repeated
_LONG = 5.0  # seconds of a call that one round measures
COMPARED = 2048  # texts that are compared, and that a trial of batch sizes takes
_CHARACTERS = 300  # of the longest sentence: the mean is 20 tokens then
_LEAST = {"float32": 0.99999, "bfloat16": 0.999}  # cosine of embeddings
# root of the mean squared difference of scores, in standard deviations of stock's; other scores differ by 1.4. Scores in bfloat16 have 8 bits
_MOST = {"float32": 0.001, "bfloat16": 0.3}


@dataclass(frozen=True)
class Strings:
    """So many texts; pairs of them for `predict`."""

    count: int
    dtype: str
    pairs: bool = False
    architecture: Architecture = MINILM

    def __str__(self) -> str:
        return f"{self.architecture.name} {'predict' if self.pairs else 'encode'} from strings {self.count} {self.dtype}"

    def texts(self) -> list[Any]:
        """Sentences, or pairs of a sentence and two others."""
        number = 3 * self.count if self.pairs else self.count
        found = [x for x in drawn(number + number // 4 + 100, 0) if len(x) <= _CHARACTERS]
        found = (found * (1 + number // len(found)))[:number]
        if not self.pairs:
            return found
        return [[found[i], f"{found[i + 1]} {found[i + 2]}"] for i in range(0, number, 3)]

    def model(self, device: str) -> Any:
        """A model, the same weights each time."""
        make = cross_encoder if self.pairs else sentence_transformer
        return make(self.architecture, device, getattr(torch, self.dtype))


STRINGS = [
    *[Strings(count, dtype) for count in (2048, 100_000) for dtype in ("float32", "bfloat16")],
    *[Strings(10_000, dtype, pairs=True) for dtype in ("float32", "bfloat16")],
]


def measure(writer: Writer, case: Strings, device: str) -> str:
    """Write the rows of a case; a line about them."""
    texts, ours, theirs = case.texts(), case.model(device), case.model(device)
    few = texts[:COMPARED]
    handle = saccade.optimize(ours)
    method, stock = (getattr(x, "predict" if case.pairs else "encode") for x in (ours, theirs))
    best = min((128, 512), key=lambda size: min(_seconds(lambda: stock(few, batch_size=size), device) for _ in range(2)))
    _check(case, stock(few, batch_size=32), method(texts)[:COMPARED])
    calls = {
        "stock": lambda: stock(texts, batch_size=32),
        "stock_best": lambda: stock(texts, batch_size=best),
        "saccade": lambda: method(texts),
    }
    times = _in_turns(case, writer.part.calls(calls), device)
    rust, tokens = _rust_alone(ours, texts)
    notes = {"stock": "batches of 32", "stock_best": f"batches of {best}"}
    if "saccade" in times:
        notes["saccade"] = _parts(case, handle._strings[0], calls["saccade"], device, rust, times["saccade"].p50)
    problem = str(case).replace(str(case.count), f"texts={case.count} mean={tokens / len(texts):.0f}")
    for name, timing in times.items():
        note = f"{1e3 * case.count / timing.p50:.0f} texts/s; {notes[name]}"
        writer.add(Row("encoders", problem, name, "fwd", case.dtype, *timing, note=note))
    handle.restore()
    return f"{problem}: " + ", ".join(f"{name} {timing.p50:.2f} ms ({notes[name]})" for name, timing in times.items())


def _check(case: Strings, wanted: Any, found: Any) -> None:
    wanted, found = (torch.as_tensor(x).float() for x in (wanted, found))
    if case.pairs:
        difference = ((found - wanted).square().mean().sqrt() / wanted.std()).item()
        if not difference < _MOST[case.dtype]:
            raise SystemExit(
                f"saccade of {case}: scores differ from stock's by {difference:.4f} standard deviations; {_MOST[case.dtype]} are allowed"
            )
        return
    cosine = F.cosine_similarity(found, wanted).min().item()
    if not cosine > _LEAST[case.dtype]:
        raise SystemExit(
            f"saccade of {case}: an embedding has a cosine of {cosine:.6f} to stock's; at least {_LEAST[case.dtype]} is asked for"
        )


def _seconds(call: Callable[[], object], device: str) -> float:
    """The seconds of a call by the wall clock, until the device has nothing left to do."""
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _in_turns(case: Strings, calls: dict[str, Callable[[], object]], device: str) -> dict[str, Timing]:
    """Milliseconds of a call: median, least and most over the rounds. A call beyond WINDOW is made once a round, one beyond `_LONG` once."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for turn in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            if found[name] and found[name][0] > 1e3 * _LONG:
                continue
            taken = [_seconds(calls[name], device)]
            while sum(taken) < WINDOW:
                taken.append(_seconds(calls[name], device))
            found[name].append(1e3 * statistics.median(taken))
            print(f"  {case}, round {turn + 1} of {ROUNDS}: {name} {found[name][-1]:.1f} ms", flush=True)
    return {name: Timing(statistics.median(x), min(x), max(x)) for name, x in found.items()}


def _rust_alone(model: Any, texts: list[Any]) -> tuple[float, int]:
    """(milliseconds of one call of the tokenizer's Rust code over all texts, the tokens that it finds)."""
    rust = copy.deepcopy(model.tokenizer._tokenizer)
    rust.no_padding()
    rust.enable_truncation(LONGEST)
    given = [tuple(x) for x in texts] if isinstance(texts[0], list) else texts
    taken = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        found = rust.encode_batch_fast(given)
        taken.append(time.perf_counter() - began)
    return 1e3 * min(taken), sum(map(len, found))


def _parts(case: Strings, strings: Any, call: Callable[[], object], device: str, rust: float, wall: float) -> str:
    """The times that host and device take by themselves, and the waits of a run."""
    alone = _device_alone(case, strings, call, device)
    waits = {"tokens": 0.0, "results": 0.0}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args)
            finally:
                waits[name] += time.perf_counter() - began

        return run

    def watched(chunks: Iterable[Any]) -> Iterator[Any]:
        following = timed("tokens", iter(chunks).__next__)
        while True:
            try:
                yield following()
            except StopIteration:
                return

    batches, results = pipeline.batches, pipeline.Results
    with (
        patch.object(pipeline, "batches", lambda chunks, bound: batches(watched(chunks), bound)),
        patch.object(results, "add", timed("results", results.add)),
        patch.object(results, "finish", timed("results", results.finish)),
    ):
        whole = _seconds(call, device)
    busy = kernel_time(call, device)
    note = [f"Rust alone {rust:.4g} ms", f"{'GPU' if device == 'cuda' else 'device'} alone {alone:.4g} ms"]
    note += [f"kernels {busy:.4g} ms"] if busy else []
    note.append(f"{wall / max(rust, alone):.2f} of the larger")
    return "; ".join([*note, *(f"waits for {name} {taken / whole:.2f}" for name, taken in waits.items())])


def _device_alone(case: Strings, strings: Any, call: Callable[[], object], device: str) -> float:
    """Milliseconds of the batches of a call, made ahead: packed ones of `encode`, chunks of tokens of `predict`."""
    where, name = (strings, "_scores") if case.pairs else (pipeline, "embed")
    work, seen = getattr(where, name), []

    def recorded(*args: Any) -> Any:
        seen.append(args)
        return work(*args)

    with patch.object(where, name, recorded):
        call()
    if not seen:
        raise SystemExit(f"saccade of {case}: no batch went through {name}: {strings.explain()}")

    @torch.inference_mode()
    def again() -> None:
        for args in seen:
            work(*args)

    return 1e3 * min(_seconds(again, device) for _ in range(1 + ROUNDS))
