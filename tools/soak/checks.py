"""How the cases of each operation are run and judged: several of one stack at once, one result list for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.dynamic_mask.testing import check as dynamic_mask
from saccade.dynamic_mask.testing.inputs import joined, make_dynamic_mask
from saccade.dynamic_mask.testing.ranking import kept_by_counting
from saccade.exact.testing import check as exact
from saccade.exact.testing import varlen_check as varlen
from saccade.nm_sparse.testing import check as nm_sparse
from saccade.nm_sparse.testing.inputs import make_nm_sparse
from saccade.testing.inputs import make
from saccade.testing.judge import Result
from tools.soak.cache import check_cache
from tools.soak.layouts import arrangement, rearranged, with_lengths
from tools.soak.replay import ReadsOffsets, captured_packed, replayed

Judged = list[list[Result] | None]


class Setting(NamedTuple):
    """How the cases of a stack are run, apart from their numbers. way: "plain", "stream" (one of its own) or "graph" (captured and replayed). places:
    the seed of where their tensors lie."""

    dtype: torch.dtype
    device: torch.device
    backend: str
    seeds: tuple[int, ...]
    way: str
    places: str

    def draws(self, operation: str) -> list[Random]:
        """Random numbers for the data of each case."""
        return [Random(f"{seed} {operation}") for seed in self.seeds]

    @property
    def source(self) -> torch.Generator | None:
        """The generator that draws the data on a GPU, else None."""
        return torch.Generator(self.device) if self.device.type == "cuda" else None


def _attention(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    case, inputs = cases[0], _placed(make, cases[0], setting, draws)
    run = replayed(exact.public_call(case, setting.backend, lse), setting.way)
    return [*exact.check_calls(case, inputs, run, setting.backend, setting.seeds, lse)]


def _placed(made: Callable[..., Any], case: Any, setting: Setting, draws: list[Random]) -> list[Any]:
    """The inputs of each case of a stack, made by `made` and then laid out elsewhere."""
    dtype, device, source = setting.dtype, setting.device, setting.source
    plain = [made(case, dtype, device, seed, source=source) for seed in setting.seeds]
    return [rearranged(with_lengths(x, draw, case.kv_len), Random(setting.places)) for x, draw in zip(plain, draws, strict=True)]


def _varlen(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    dtype, device, backend, seeds, way, places = setting
    source, longest = setting.source, (max(cases[0].q_lengths), max(cases[0].keys))  # of all of them
    problems = [varlen.padded(case, dtype, device, seed, longest, source) for case, seed in zip(cases, seeds, strict=True)]
    graphed = captured_packed if way == "graph" else None
    return varlen.check_calls(cases, problems, backend, seeds, lse, lambda: arrangement(Random(places)), graphed)


def _nm_sparse(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    case, inputs = cases[0], _placed(make_nm_sparse, cases[0], setting, draws)
    run = replayed(nm_sparse.public_call(case, setting.backend, lse), setting.way)
    return [*nm_sparse.check_calls(case, inputs, run, setting.backend, setting.seeds, lse)]


def _dynamic_mask(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    case, inputs = cases[0], _placed(make_dynamic_mask, cases[0], setting, draws)
    if setting.backend == "auto" and any(y.stride(-1) != 1 for y in (inputs[0].query, inputs[0].key, inputs[0].value)):
        setting = setting._replace(way="plain")  # plain torch takes them, which reads numbers
    run: Callable[[Any], Any] = dynamic_mask.public_call(case, setting.backend, lse)
    if case.documents and case.batch == 1 and Random(setting.places).random() < 0.5:
        run = _ByOffsets(case, setting.backend, lse)
    return [*dynamic_mask.check_calls(case, inputs, replayed(run, setting.way), lse)]


class _ByOffsets(ReadsOffsets):
    """The public function with `cu_seqlens` in place of document_ids, of one batch row."""

    def __init__(self, case: Any, backend: str, lse: bool) -> None:
        self.case, self.backend, self.lse = case, backend, lse
        self.known: dict[Tensor, Tensor] = {}

    def read_again(self, x: Any) -> None:
        """Write the offsets of documents that are other ones now where a captured call reads them."""
        if x.document_ids in self.known:
            self.known[x.document_ids].copy_(self._offsets(x.document_ids))

    def _offsets(self, document_ids: Tensor) -> Tensor:
        counts = torch.bincount(document_ids[0].long(), minlength=4)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

    def __call__(self, x: Any) -> tuple[Tensor, Tensor | None]:
        # made once: counting waits for the device, which a call that is captured may not
        ends = self.known.get(x.document_ids)
        if ends is None:
            ends = self.known[x.document_ids] = self._offsets(x.document_ids)
        case = self.case
        result = saccade.dynamic_mask_attention(
            x.query, x.key, x.value, x.key_scores, keep=case.keep, is_causal=case.is_causal, lengths=x.lengths, cu_seqlens=ends,
            sinks=case.sinks, window=case.window, add_scores=case.add_scores, enable_gqa=case.heads != case.kv_heads,
            return_lse=self.lse, backend=self.backend,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result, None)


def _cache(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    ((case,), (seed,)) = cases, setting.seeds
    return [check_cache(case, setting.dtype, setting.device, setting.backend, seed)]


def _expiry(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    """`expiry` keeps exactly the keys that counting keeps: it is a matter of ranks, so there is no budget."""
    case, dtype, device, source = cases[0], setting.dtype, setting.device, setting.source
    made = [make_dynamic_mask(case, dtype, device, seed, source) for seed in setting.seeds]
    calls = [with_lengths(x, draw, case.kv_len) for x, draw in zip(made, draws, strict=True)]
    tables = [
        saccade.expiry(
            x.key_scores, case.keep, lengths=x.lengths, document_ids=x.document_ids, sinks=case.sinks, window=case.window
        )
        for x in calls
    ]
    results = {
        i: [_kept_otherwise((), f"shape {list(t.shape)}, {t.dtype}")]
        for i, (t, x) in enumerate(zip(tables, calls, strict=True))
        if t.shape != x.key_scores.shape or t.dtype != torch.int32
    }
    like = [i for i in range(len(calls)) if i not in results]
    if like:
        results |= zip(like, _ranked(case, [calls[i] for i in like], torch.cat([tables[i] for i in like])), strict=True)
    return [results[i] for i in range(len(calls))]


def _ranked(case: Any, calls: list[Any], table: Tensor) -> list[list[Result]]:
    """Judge the tables of some calls, joined in their first dimension."""
    whole, x = joined(case, calls)
    wanted = kept_by_counting(x.key_scores, case.keep, case.q_len, True, x.lengths, x.document_ids, case.sinks, case.window)
    at = torch.arange(case.kv_len, device=table.device)
    found = (at <= at[:, None]) & (at[:, None] < table[:, :, None, :])
    if x.lengths is not None:
        # a padded key is in nobody's interval, so this changes nothing where the table is right
        wanted = wanted & (at < x.lengths[:, None, None, None])
    differing = (found != wanted).unflatten(0, (whole.calls, case.batch))
    wrong = differing.flatten(1).any(1).tolist()
    return [
        [_kept_otherwise(tuple(differing[i].nonzero()[0].tolist()), "not the keys that counting keeps")]
        if wrong[i]
        else [Result("expiry", 0.0, 0.0, 0.0, 0.0, True)]
        for i in range(whole.calls)
    ]


def _kept_otherwise(where: tuple[int, ...], reason: str) -> Result:
    return Result("expiry", math.inf, 0.0, math.inf, math.inf, False, where, reason)


CHECKS: dict[str, Callable[[list[Any], Setting, bool, list[Random]], Judged]] = {
    "attention": _attention,
    "attention_qkvpacked": _attention,
    "attention_varlen": _varlen,
    "dynamic_mask_attention": _dynamic_mask,
    "dynamic_mask_cache": _cache,
    "expiry": _expiry,
    "nm_sparse_attention": _nm_sparse,
}
