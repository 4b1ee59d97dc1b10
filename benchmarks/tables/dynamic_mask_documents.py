"""Documents that lie one behind another in a row of a million tokens, against one document of the same length.

The row is cut into 100 documents of 10,000 tokens, and into 100 whose ends are drawn at random; each cut is given as `document_ids` and as
`cu_seqlens`. One document is given without either, and as `document_ids` that are all 0, so that what the documents cost can be told from
what their argument costs. Queries of a document have fewer keys at its beginning, so its notes have the pairs of queries and keys that a call
computes, over all heads, and its time over that of one document without arguments, scaled by the pairs: at most 1.10 is asked for.

Times are of the public function, selection included: forward without gradient, backward alone, and both. Calls take turns as in
`nm_fused`. `roof_ms` has the pairs at the 790 TFLOP/s of `dynamic_mask_length`.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rows import Row, Writer
from steps import step
from tables.nm_fused import in_turn
from torch import Tensor

import saccade
from saccade.testing.timing import Timing

DEVICE, BACKEND = "cuda", "gather"
PEAK_TFLOPS = 790.0
MOST = 1.10  # time of a call over that of one document with as many pairs
BEFORE = "one document"  # what the others are measured against
FACTORS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # products of a direction over those of forward


@dataclass(frozen=True)
class Setting:
    """A row of tokens and how many documents it is cut into."""

    length: int = 1_000_000
    documents: int = 100
    keep: int = 1024
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128

    def __str__(self) -> str:
        sizes = f"B=1 H={self.heads} Hkv={self.kv_heads} Tq={self.length} Tk={self.length} D={self.dim} keep={self.keep}"
        return f"{sizes} bf16"


@dataclass(frozen=True)
class Case:
    """A cut of the row, by the ends of its documents, and how it is given: "document_ids", "cu_seqlens" or "" for not at all."""

    name: str
    ends: tuple[int, ...]
    given: str = ""

    def pairs(self, setting: Setting) -> int:
        """Queries of all heads times the keys that each keeps."""
        lengths = (end - begin for begin, end in itertools.pairwise((0, *self.ends)))
        return setting.heads * sum(kept_pairs(length, setting.keep) for length in lengths)

    def arguments(self) -> dict[str, Tensor]:
        """The arguments that the call is given."""
        offsets = torch.tensor((0, *self.ends), device=DEVICE)
        if self.given == "document_ids":
            number = torch.arange(len(self.ends), device=DEVICE)
            return {"document_ids": number.repeat_interleave(offsets.diff())[None]}
        return {"cu_seqlens": offsets} if self.given == "cu_seqlens" else {}

    def __str__(self) -> str:
        return f"{self.name}, {self.given}" if self.given else self.name


SETTING = Setting()


def kept_pairs(length: int, keep: int) -> int:
    """Pairs of one head in a document: a query keeps all keys up to its own until those are `keep`."""
    growing = min(length, keep)
    return growing * (growing + 1) // 2 + (length - growing) * keep


def cases(setting: Setting) -> list[Case]:
    """The cuts, in the order of the rows."""
    n, count = setting.length, setting.documents
    equal = tuple(n * i // count for i in range(1, count + 1))
    places = torch.randperm(n - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    drawn = (*places.sort().values.tolist(), n)
    cuts = {f"{count} equal documents": equal, f"{count} documents of random lengths": drawn}
    ways = ("document_ids", "cu_seqlens")
    several = [Case(name, ends, way) for name, ends in cuts.items() for way in ways]
    return [Case(BEFORE, (n,)), Case(BEFORE, (n,), "document_ids"), *several]


def run(writer: Writer, repeat_ms: int) -> None:
    """Every cut in turn, one direction after another."""
    setting, found = SETTING, cases(SETTING)
    leaves, dout = _leaves(setting)
    calls = {str(case): _call(setting, case, leaves) for case in found}
    for direction in FACTORS:
        steps = {name: step(call, direction, leaves, dout) for name, call in calls.items()}
        times = in_turn(steps, repeat_ms)
        del steps  # of backward they hold the output of every call
        gc.collect()
        for case in found:
            writer.add(_row(setting, case, direction, times))
            print(f"{direction} {case}: {times[str(case)].p50:.3f} ms, {note(setting, case, times)}", flush=True)


def _leaves(setting: Setting) -> tuple[list[Tensor], Tensor]:
    """query, key, value and scores; and the gradient of the output."""
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    made = [torch.randn(1, setting.length, h, setting.dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for h in heads]
    scores = torch.randn(1, setting.kv_heads, setting.length, device=DEVICE)
    return [x.requires_grad_() for x in (*made[:3], scores)], made[3]


def _call(setting: Setting, case: Case, leaves: list[Tensor]) -> Callable[[], Tensor]:
    """The public function on this cut; its arguments are made here, once."""
    return functools.partial(
        saccade.dynamic_mask_attention, *leaves, keep=setting.keep, enable_gqa=True, backend=BACKEND, **case.arguments()
    )


def over_one(setting: Setting, case: Case, times: dict[str, Timing]) -> float:
    """The time of a case over that of one document, each over its pairs."""
    before = next(other for other in cases(setting) if str(other) == BEFORE)
    return (times[str(case)].p50 / case.pairs(setting)) / (times[BEFORE].p50 / before.pairs(setting))


def note(setting: Setting, case: Case, times: dict[str, Timing]) -> str:
    """The pairs, and what they cost beside those of one document."""
    ratio = over_one(setting, case, times)
    verdict = f"{'within' if ratio <= MOST else 'over'} {MOST:.2f}"
    return f"{case.pairs(setting)} pairs, {ratio:.3f} of one document of as many pairs, {verdict}"


def _row(setting: Setting, case: Case, direction: str, times: dict[str, Timing]) -> Row:
    timing = times[str(case)]
    flops = FACTORS[direction] * 4.0 * setting.dim * case.pairs(setting)
    return Row(
        "dynamic_mask_documents", f"dynamic_mask({setting} {case})", "gather", direction, "bf16", *timing, roof_ms=flops / PEAK_TFLOPS / 1e9,
        tflops=flops / timing.p50 / 1e9, note=note(setting, case, times),
    )  # fmt: skip
