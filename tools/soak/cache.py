"""A `DynamicMaskCache` through a random life, judged against the plain definition over the whole history of each row.

The history is kept here, row by row, as the calls say it should grow; which keys a token keeps is found by brute force over all of it, and
what it attends to by float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.dynamic_mask.backends import DECODING
from saccade.dynamic_mask.decode.backend import MAX_DECODE_TOKENS
from saccade.dynamic_mask.reference import kept
from saccade.testing.judge import Result, judge

# what a call does with its tokens: all are real, or as many as `lengths` says, first or last; or they are drafts, of which some may stay
APPEND, RIGHT, LEFT, DRAFT = "append", "right", "left", "draft"
RESET, TAKE = "reset", "take_rows"


class Step(NamedTuple):
    """One call of a cache. tokens: how many it is given, 0 for `RESET` and `TAKE`."""

    kind: str
    tokens: int = 0


@dataclass(frozen=True)
class CacheCase:
    """A life of a cache: B rows, and steps that append tokens, propose some, empty rows or reorder them."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    keep: int
    steps: tuple[Step, ...]
    sinks: int = 0
    window: int = 0
    add_scores: bool = True
    ties: bool = False


@dataclass
class _Row:
    """All tokens of one row: keys and values `[Hkv, n, D]`, scores `[Hkv, n]`."""

    key: Tensor
    value: Tensor
    scores: Tensor

    def joined(self, new: _Row) -> _Row:
        return _Row(*(torch.cat((a, b), 1) for a, b in zip(self.tensors(), new.tensors(), strict=True)))

    def cut(self, first: int, stop: int) -> _Row:
        return _Row(*(x[:, first:stop] for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.key, self.value, self.scores


@dataclass
class _Judged:
    """Rows of outputs, `[n, D]`: of the cache, in float64, and with the roundings that cannot be avoided."""

    found: list[Tensor] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)
    rounded: list[Tensor] = field(default_factory=list)
    magnitude: float = 0.0


class _Life:
    """A cache beside its history."""

    def __init__(self, case: CacheCase, dtype: torch.dtype, device: torch.device, backend: str, seed: int) -> None:
        self.case, self.dtype, self.device, self.backend = case, dtype, device, backend
        self.draw, self.source = Random(seed), torch.Generator().manual_seed(seed)
        self.cache = saccade.DynamicMaskCache(case.keep, sinks=case.sinks, window=case.window)
        self.rows = [self._empty() for _ in range(case.batch)]
        self.judged = _Judged()

    def _empty(self) -> _Row:
        shape = (self.case.kv_heads, 0, self.case.head_dim)
        none = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return _Row(none, none, torch.zeros(shape[:2], device=self.device))

    def take(self, step: Step) -> None:
        """Do a step to the cache and to the history."""
        if step.kind == RESET:
            chosen = None if self.draw.random() < 0.3 else [i for i in range(len(self.rows)) if self.draw.random() < 0.5]
            self.cache.reset(chosen)
            for i in range(len(self.rows)) if chosen is None else chosen:
                self.rows[i] = self._empty()
        elif step.kind == TAKE:
            rows = [self.draw.randrange(len(self.rows)) for _ in range(self.draw.randint(1, len(self.rows) + 1))]
            self.cache.take_rows(rows)
            if self.cache.seen is not None:  # an empty cache has no rows yet
                self.rows = [self.rows[i] for i in rows]
        else:
            self._attend(step)

    def _attend(self, step: Step) -> None:
        query, key, value, scores = self._tokens(step.tokens)
        real = [range(step.tokens)] * len(self.rows)
        options: dict = {}
        if step.kind in (RIGHT, LEFT):
            counts = [self.draw.randint(0, step.tokens) for _ in self.rows]
            options = {"lengths": torch.tensor(counts, device=self.device), "padding_side": step.kind}
            real = [range(n) if step.kind == RIGHT else range(step.tokens - n, step.tokens) for n in counts]
            for x in (query, key, value, scores):
                for b, places in enumerate(real):
                    outside = [i for i in range(step.tokens) if i not in places]
                    x[b][:, outside] = math.nan  # padding may hold anything
        if step.kind == DRAFT:
            options = {"commit": False}
        gqa = self.case.heads != self.case.kv_heads
        out = self.cache.attend(
            query, key, value, scores, enable_gqa=gqa, add_scores=self.case.add_scores, backend=self._backend(step), **options
        )
        grown = [row.joined(_Row(*(x[b][:, list(real[b])] for x in (key, value, scores)))) for b, row in enumerate(self.rows)]
        for b, row in enumerate(grown):
            self._compare(out[b][:, list(real[b])], query[b][:, list(real[b])], row)
        if step.kind == DRAFT:
            grown = self._commit(step.tokens, grown)
        self.rows = grown

    def _commit(self, tokens: int, grown: list[_Row]) -> list[_Row]:
        """Take in the same number for all rows, one for each row, or nothing; what the history is then."""
        way = self.draw.choice(("none", "number", "each"))
        counts = [self.draw.randint(0, tokens) for _ in grown]
        if way == "none":
            return self.rows
        if way == "number":
            counts = counts[:1] * len(counts)
        self.cache.commit(counts[0] if way == "number" else torch.tensor(counts, device=self.device))
        return [row.cut(0, row.key.shape[1] - tokens + n) for row, n in zip(grown, counts, strict=True)]

    def _backend(self, step: Step) -> str:
        """The one of the case, but "auto" for what the decode kernel never takes."""
        (decode,) = DECODING
        other = step.kind == DRAFT or step.tokens > MAX_DECODE_TOKENS
        return "auto" if other and self.backend == decode.name else self.backend

    def _tokens(self, count: int) -> list[Tensor]:
        """query, key, value as views of `[B, T, H, D]`, and scores; the same numbers on every device."""
        case, batch = self.case, len(self.rows)
        heads = (case.heads, case.kv_heads, case.kv_heads)
        made = [torch.randn(batch, count, h, case.head_dim, generator=self.source) for h in heads]
        scores = torch.randn(batch, case.kv_heads, count, generator=self.source)
        scores = scores.mul(1.5).round() if case.ties else scores
        return [*(x.to(self.dtype).to(self.device).transpose(1, 2) for x in made), scores.to(self.device)]

    def _compare(self, out: Tensor, query: Tensor, row: _Row) -> None:
        case, count = self.case, query.shape[1]
        seen = kept(row.scores[None], case.keep, count, True, None, None, case.sinks, case.window)[0]
        bias = row.scores if case.add_scores else torch.zeros_like(row.scores)
        exact = _attention(query, row, bias, seen, torch.float64)
        rounded = _attention(query, row, bias, seen, torch.float32, self.dtype)
        for into, x in zip((self.judged.found, self.judged.exact, self.judged.rounded), (out, exact[0], rounded[0]), strict=True):
            into.append(x.flatten(0, 1))
        self.judged.magnitude = max([self.judged.magnitude, *exact[1].flatten().tolist()])


def _attention(
    query: Tensor, row: _Row, bias: Tensor, seen: Tensor, wide: torch.dtype, narrow: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out `[H, T, D]`, the absolute terms behind its numbers) of one row; narrow: what weights and out are rounded to."""
    group = query.shape[0] // row.key.shape[0]
    key, value, bias, seen = (x.repeat_interleave(group, 0) for x in (row.key.to(wide), row.value.to(wide), bias.to(wide), seen))
    scores = query.shape[2] ** -0.5 * (query.to(wide) @ key.mT) + bias[:, None]
    shown = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(shown, -1)
    log_sum = shown.logsumexp(-1, keepdim=True).expand_as(shown)
    # the roundings of forward, as in `saccade.testing.baseline`
    exponent = torch.maximum(*(x.masked_fill(x == -math.inf, 0.0).abs() for x in (shown, log_sum)))
    terms = (weights * (4.0 + 2.0 * exponent)) @ value.abs()
    if narrow is None:
        return weights @ value, terms
    return (weights.to(narrow).to(wide) @ value).to(narrow), terms


def check_cache(case: CacheCase, dtype: torch.dtype, device: torch.device, backend: str, seed: int) -> list[Result]:
    """Judged outputs of all steps together, and whether the counts of tokens are right after each."""
    life = _Life(case, dtype, device, backend, seed)
    with torch.no_grad():
        for i, step in enumerate(case.steps):
            life.take(step)
            counts = [row.key.shape[1] for row in life.rows]
            seen = life.cache.seen
            if (seen is None and any(counts)) or (seen is not None and seen.tolist() != counts):
                said = f"after step {i} the cache has seen {None if seen is None else seen.tolist()}, its rows hold {counts}"
                return [Result("seen", math.inf, 0.0, math.inf, math.inf, False, (i,), said)]
    if not life.judged.found:
        return []
    found, exact, rounded = (torch.cat(x) for x in (life.judged.found, life.judged.exact, life.judged.rounded))
    return [judge("out", found, exact, rounded, life.judged.magnitude, dtype)]
