"""Decoding with a dynamic mask: a cache of `keep` entries for each key head that gives what the whole history would give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import InvalidArgument
from saccade.functional import _checked_lengths, dynamic_mask_attention


@dataclass
class _Entries:
    """Kept tokens in the order of their positions, not yet used places first; position -1 marks those."""

    key: Tensor  # [B, Hkv, n, D]
    value: Tensor  # [B, Hkv, n, Dv]
    scores: Tensor  # [B, Hkv, n] float32
    position: Tensor  # [B, Hkv, n] int64

    def joined(self, other: _Entries) -> _Entries:
        return _Entries(*(torch.cat(pair, dim=2) for pair in zip(self.tensors(), other.tensors(), strict=True)))

    def taken(self, index: Tensor) -> _Entries:
        wide = index[..., None]
        return _Entries(*(x.gather(2, wide.expand(*index.shape, x.shape[3]) if x.dim() == 4 else index) for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.key, self.value, self.scores, self.position


class DynamicMaskCache:
    """Keys and values of the `keep` best-scored tokens so far, for each batch row and key head.

    It is exact, not an approximation: scores do not change, so a key that `keep` others outrank never returns. Memory and the time
    of a step do not grow with the history.

        cache = DynamicMaskCache(keep=1024)
        out = cache.attend(q_prompt, k_prompt, v_prompt, s_prompt, lengths=lengths)   # prefill, right-padded
        out = cache.attend(q, k, v, s)                                                # one token, or a few

    Source: paper 004, per-query causal top-w (Listing 1); that eviction is final is ours (`saccade.selection`).
    """

    def __init__(self, keep: int) -> None:
        """keep: entries of each key head, at least 1."""
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InvalidArgument(f"keep is {keep!r}; it must be a whole number of keys, at least 1")
        self.keep = keep
        self.seen: Tensor | None = None
        self._entries: _Entries | None = None

    def __repr__(self) -> str:
        seen = "empty" if self.seen is None else f"seen={self.seen.tolist()}"
        return f"DynamicMaskCache(keep={self.keep}, {seen})"

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        return 0 if self._entries is None else sum(x.nbytes for x in self._entries.tensors())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_scores: Tensor,
        *,
        lengths: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        add_scores: bool = True,
        backend: str = "auto",
    ) -> Tensor:
        """Attention of new tokens to all tokens so far, themselves included, then keep what later tokens can see.

        Args:
            query: `[B, H, T, D]`. key, value: `[B, Hkv, T, D]`, key_scores `[B, Hkv, T]` of the same T new tokens.
            lengths: `[B]`, how many of the new tokens are real, the first ones; the output of the others means nothing.
            scale, enable_gqa, add_scores, backend: as in `dynamic_mask_attention`.

        Returns:
            out `[B, H, T, D]`, equal to attention over the full history up to rounding.
        """
        new = self._describe(query, key, value, key_scores, lengths)
        if self._entries is None:
            self._entries = _Entries(*(x[:, :, :0] for x in new.tensors()))
        every = self._entries.joined(new)
        # documents: places not used yet, tokens, padding. All heads of a row have as many tokens, so one head speaks for all.
        position = every.position[:, 0]
        documents = torch.where(position >= 0, 1, 0)
        documents[:, -query.shape[2] :] = torch.where(position[:, -query.shape[2] :] >= 0, 1, 2)
        out = dynamic_mask_attention(
            query, every.key, every.value, every.scores, keep=self.keep, document_ids=documents, add_scores=add_scores,
            scale=scale, enable_gqa=enable_gqa, backend=backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        assert self.seen is not None
        real = (new.position[:, 0] >= 0).sum(-1)
        self.seen = self.seen + real
        self._entries = self._kept(every)
        return out

    def take_rows(self, rows: Tensor) -> None:
        """Make batch row i what row `rows[i]` was (int64, any number of rows, repeats allowed): beams, or requests that ended."""
        if self._entries is None or self.seen is None:
            return
        rows = rows.to(self.seen.device)
        self.seen = self.seen[rows]
        self._entries = _Entries(*(x[rows] for x in self._entries.tensors()))

    def _describe(self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None) -> _Entries:
        for name, tensor, rank in (("query", query, 4), ("key", key, 4), ("value", value, 4), ("key_scores", key_scores, 3)):
            if not isinstance(tensor, Tensor) or tensor.dim() != rank:
                given = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InvalidArgument(f"{name} is {given}; it must be a torch.Tensor of rank {rank}")
        if not query.shape[2] == key.shape[2] == key_scores.shape[2]:
            raise InvalidArgument(
                f"{query.shape[2]} queries, {key.shape[2]} keys and {key_scores.shape[2]} scores; they are of the same new tokens"
            )
        if self._entries is not None and self._entries.key.shape[:2] != key.shape[:2]:
            raise InvalidArgument(
                f"the cache holds [B, Hkv] = {list(self._entries.key.shape[:2])}, key is {list(key.shape[:2])}; make a new cache"
            )
        batch, heads, count = key_scores.shape
        if self.seen is None:
            self.seen = torch.zeros(batch, dtype=torch.int64, device=key.device)
        along = torch.arange(count, device=key.device)
        position = (self.seen[:, None] + along).expand(batch, count)
        if lengths is not None:
            position = torch.where(along < _checked_lengths(lengths, count)[:, None], position, -1)
        position = position[:, None, :].expand(batch, heads, count)
        return _Entries(key.detach(), value.detach(), key_scores.detach().float(), position)

    def _kept(self, every: _Entries) -> _Entries:
        # by (score, position) among real tokens; padding and unused places rank last, by position -1
        real = every.position >= 0
        order = torch.argsort(every.position, dim=-1, stable=True)
        scores = every.scores.masked_fill(~real, float("-inf")).gather(2, order)
        best = order.gather(2, torch.argsort(scores, dim=-1, stable=True))[..., -self.keep :]
        return every.taken(best.gather(2, torch.argsort(every.position.gather(2, best), dim=-1, stable=True)))
