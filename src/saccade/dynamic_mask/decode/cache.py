"""Decoding with a dynamic mask: a cache of `keep` entries for each key head, equivalent to keeping the whole history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.dynamic_mask.api import dynamic_mask_attention
from saccade.dynamic_mask.args import Places
from saccade.dynamic_mask.backends import DECODING
from saccade.dynamic_mask.problem import DynamicMaskProblem, check_selection_values, describe_dynamic_mask
from saccade.engine.arguments import check_keep
from saccade.engine.backend import Backend
from saccade.engine.calls import gradient_needed, values_known
from saccade.engine.dispatch import choose
from saccade.engine.lengths import checked_lengths
from saccade.engine.tracing import eager, load
from saccade.errors import InvalidArgument, UnsupportedProblem


@dataclass
class _Entries:
    """Kept tokens in the order of their positions; unused entries come first and have position -1."""

    key: Tensor  # [B, Hkv, n, D]
    value: Tensor  # [B, Hkv, n, Dv]
    scores: Tensor  # [B, Hkv, n] float32
    position: Tensor  # [B, Hkv, n] int32

    def joined(self, other: _Entries) -> _Entries:
        return _Entries(*(torch.cat(pair, dim=2) for pair in zip(self.tensors(), other.tensors(), strict=True)))

    def taken(self, index: Tensor) -> _Entries:
        wide = index[..., None]
        return _Entries(*(x.gather(2, wide.expand(*index.shape, x.shape[3]) if x.dim() == 4 else index) for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.key, self.value, self.scores, self.position


class DynamicMaskCache:
    """Keys and values of the `keep` best-scored tokens so far, for each batch row and key head.

    The result is exact: scores do not change, so a key that `keep` others outrank never returns. Memory and the time of a step do
    not grow with the history.

        cache = DynamicMaskCache(keep=1024)
        out = cache.attend(q_prompt, k_prompt, v_prompt, s_prompt, lengths=lengths)   # prefill, right-padded
        out = cache.attend(q, k, v, s)                                                # one token, or a few

    On a GPU that the decode kernel supports, a token takes one launch without any wait, and the memory of the cache stays in
    place from the first decoded token on. So once a token was decoded, steps of the same shapes can be captured in a CUDA graph.
    `attend` (also of a new prompt) and `take_rows` with the same number of rows keep that graph valid. A graph may be replayed on
    one stream at a time.

    Source:
        paper 004, per-query causal top-w (Listing 1); the observation that eviction is final is ours
        (`saccade.dynamic_mask.selection.intervals`).
    """

    def __init__(self, keep: int) -> None:
        """keep: entries of each key head, at least 1."""
        self.keep = check_keep(keep)
        # both are None before the first call; after it, entries and counts of one kind or the other
        self._entries: _Entries | None = None
        self._counted: Tensor | None = None
        self._places: Places | None = None
        self._signature: tuple | None = None
        self._decode: Callable[..., tuple[Tensor, Tensor | None]] | None = None

    def __repr__(self) -> str:
        seen = "empty" if self.seen is None else f"seen={self.seen.tolist()}"
        return f"DynamicMaskCache(keep={self.keep}, {seen})"

    @property
    def seen(self) -> Tensor | None:
        """The number of tokens so far, int64 `[B]`, as a copy; None before the first call."""
        return self._counted if self._places is None else self._places.seen[:, 0].clone()

    @property
    def nbytes(self) -> int:
        """The size of the entries in bytes."""
        return sum(x.nbytes for x in self._tensors())

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
        """Attention of new tokens to all tokens so far, themselves included; then keeps what later tokens can see.

        Args:
            query: `[B, H, T, D]`. key, value: `[B, Hkv, T, D]`, key_scores `[B, Hkv, T]` of the same T new tokens. Scores must be
                finite.
                The decode kernel on a GPU does not check this, because a check would wait for the device at every token: a NaN
                score ranks above all others, stays in the cache, and makes every later output of its head NaN.
            lengths: `[B]`, how many of the new tokens, counted from the first, are real; the others may hold anything, NaN
                included, and their output is meaningless.
            scale, enable_gqa, add_scores: as in `dynamic_mask_attention`.
            backend: "auto"; "decode" (at most 8 tokens without gradient; "auto" chooses it on a GPU where it can); or a backend
                of `dynamic_mask_attention`, which then runs over the entries and new tokens together.

        Returns:
            out `[B, H, T, D]`, equal to attention over the full history up to rounding.

        Raises:
            InvalidArgument: a bad argument, with what was given and what is allowed.
            UnsupportedProblem: the named backend cannot run this call; keys, values or scores require a gradient (queries may);
                or the first call of a cache is captured in a CUDA graph.
        """
        if gradient_needed(key, value, key_scores):
            raise UnsupportedProblem(
                "key, value or key_scores requires a gradient, and the contents of a cache get none: attend under torch.no_grad(), or "
                "train with saccade.dynamic_mask_attention over whole sequences"
            )
        decode = self._decoder(query, key, value, key_scores, lengths, scale, enable_gqa, add_scores, backend)
        if lengths is not None:
            lengths = checked_lengths(lengths, key.shape[2])
        if decode is not None:
            if not key_scores.is_cuda and values_known(key_scores):
                check_selection_values(_real(key_scores, lengths), None)
            return decode(query, key, value, key_scores, lengths, self._fixed(key, value))[0]
        # padding is gathered together with tokens, and a weight of 0 times a NaN in it is NaN
        key, value, key_scores = (_real(x, lengths) for x in (key, value, key_scores))
        every = self._ordered(key, value).joined(self._new_entries(key, value, key_scores, lengths))
        # documents: unused entries, tokens, padding. All heads of a row have the same number of tokens, so one head stands for
        # all.
        count = query.shape[2]
        position = every.position[:, 0]
        documents = torch.where(position >= 0, 1, 0)
        documents[:, -count:] = torch.where(position[:, -count:] >= 0, 1, 2)
        out = dynamic_mask_attention(
            query, every.key, every.value, every.scores, keep=self.keep, document_ids=documents, add_scores=add_scores,
            scale=scale, enable_gqa=enable_gqa, backend=backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        self._store(self._kept(every), (position[:, -count:] >= 0).sum(-1))
        return out

    def take_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Replace batch row i by row `rows[i]` (int64 `[n]`, any number of rows, repeats allowed), for beam search or to drop
        requests.

        Raises:
            InvalidArgument: `rows` is not a vector of integers; or, for a cache on a CPU, an index is out of range.
        """
        if isinstance(rows, (list, tuple)):
            rows = torch.as_tensor(rows) if rows else torch.zeros(0, dtype=torch.int64)
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            given = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
            raise InvalidArgument(f"rows is {given}; it must be an int32 or int64 torch.Tensor of shape [n]")
        if not self._tensors():
            return
        held = self._tensors()[0]
        rows = rows.to(held.device, torch.int64)
        # on a GPU this check would wait for the device at every step; there the indexing kernel checks
        if held.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(held):
            raise InvalidArgument(
                f"rows range from {int(rows.min())} to {int(rows.max())}; the cache holds rows 0 to {len(held) - 1}"
            )
        if self._places is None:
            assert self._entries is not None
            assert self._counted is not None
            self._entries = _Entries(*(x[rows] for x in self._entries.tensors()))
            self._counted = self._counted[rows]
            self._signature = None
        elif len(rows) == len(self._places.seen):
            for x in self._places:
                x.copy_(x[rows])
        else:
            with torch.inference_mode(False):
                self._places = Places(*(x[rows] for x in self._places))
            self._signature = None

    def _tensors(self) -> tuple[Tensor, ...]:
        if self._places is not None:
            return self._places[:4]
        return () if self._entries is None else self._entries.tensors()

    def _decoder(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None,
        scale: float | None, enable_gqa: bool, add_scores: bool, backend: str,
    ) -> Callable[..., tuple[Tensor, Tensor | None]] | None:  # fmt: skip
        """The decode kernel planned for such a call; None where it cannot run it. Checked once per signature."""
        tensors = (query, key, value, key_scores)
        # of the new tokens only the queries get a gradient
        needs_grad = gradient_needed(query)
        signature: tuple | None = None
        if eager(*tensors, lengths):
            options = (
                None if lengths is None else (lengths.shape, lengths.device),
                scale,
                enable_gqa,
                add_scores,
                backend,
                needs_grad,
            )
            signature = (*[_metadata(x) for x in tensors], options)
            if signature == self._signature:
                return self._decode
        self._check(*tensors)
        problem = describe_dynamic_mask(
            *tensors, self.keep, True, lengths, None, add_scores, scale, enable_gqa, needs_grad
        )  # fmt: skip
        chosen = self._choose(problem, backend, signature is not None)
        decode = None
        if chosen is not None:
            places = self._fixed(key, value)
            decode = load(chosen).plan(*tensors, lengths, places, problem.scale, problem.add_scores, False)
        self._signature, self._decode = signature, decode
        return decode

    @staticmethod
    def _choose(problem: DynamicMaskProblem, backend: str, plain: bool) -> Backend | None:
        (candidate,) = DECODING
        if backend == candidate.name:
            if not plain:
                raise UnsupportedProblem(
                    f"backend {backend!r} changes memory in place: no torch.compile, fake tensors, or transforms"
                )
            return choose(DECODING, problem, backend)
        wanted = backend == "auto" and plain and candidate.prefers(problem)
        return candidate if wanted and not candidate.why_not(problem) else None

    def _check(self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor) -> None:
        for name, tensor, rank in (("query", query, 4), ("key", key, 4), ("value", value, 4), ("key_scores", key_scores, 3)):
            if not isinstance(tensor, Tensor) or tensor.dim() != rank:
                given = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InvalidArgument(f"{name} is {given}; it must be a torch.Tensor of rank {rank}")
        if not query.shape[2] == key.shape[2] == key_scores.shape[2]:
            raise InvalidArgument(
                f"{query.shape[2]} queries, {key.shape[2]} keys and {key_scores.shape[2]} scores; they are of the same new tokens"
            )
        if not self._tensors():
            return
        for name, held, new in zip(("key", "value"), self._tensors(), (key, value), strict=False):
            if held.shape[:2] != new.shape[:2]:
                raise InvalidArgument(
                    f"the cache holds [B, Hkv] = {list(held.shape[:2])}, {name} is {list(new.shape[:2])}; make a new cache"
                )
            if (held.shape[3], held.dtype, held.device) != (new.shape[3], new.dtype, new.device):
                raise InvalidArgument(
                    f"the cache holds {name}s of D = {held.shape[3]} in {held.dtype} on {held.device}, {name} is of D = "
                    f"{new.shape[3]} in {new.dtype} on {new.device}; make a new cache"
                )

    def _fixed(self, key: Tensor, value: Tensor) -> Places:
        """The entries in fixed memory, which is made at the first call."""
        if self._places is not None:
            return self._places
        if key.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedProblem(
                "the first token of a DynamicMaskCache is captured in a CUDA graph, whose replays would empty its memory; decode one token before the capture"
            )
        shape = (*key.shape[:2], self.keep)
        # tensors made in inference mode could not be changed outside of it
        with torch.inference_mode(False):
            places = Places(
                torch.zeros((*shape, key.shape[3]), dtype=key.dtype, device=key.device),
                torch.zeros((*shape, value.shape[3]), dtype=value.dtype, device=key.device),
                torch.zeros(shape, dtype=torch.float32, device=key.device),
                torch.full(shape, -1, dtype=torch.int32, device=key.device),
                torch.zeros(shape[:2], dtype=torch.int64, device=key.device),
            )
        if self._entries is not None and self._counted is not None:
            for x, held in zip(places, self._entries.tensors(), strict=False):
                x[:, :, : held.shape[2]] = held
            places.seen.copy_(self._counted[:, None].expand(shape[:2]))
        self._places, self._entries, self._counted = places, None, None
        return places

    def _ordered(self, key: Tensor, value: Tensor) -> _Entries:
        """The entries in the order of their positions."""
        if self._places is not None:
            held = _Entries(*self._places[:4])
            return held.taken(torch.argsort(held.position, dim=-1, stable=True))
        if self._entries is None:
            position = torch.empty((*key.shape[:2], 0), dtype=torch.int32, device=key.device)
            self._entries = _Entries(key.detach()[:, :, :0], value.detach()[:, :, :0], position.float(), position)
            self._counted = torch.zeros(len(key), dtype=torch.int64, device=key.device)
        return self._entries

    def _new_entries(self, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None) -> _Entries:
        batch, heads, count = key_scores.shape
        seen = self.seen
        assert seen is not None
        along = torch.arange(count, device=key.device)
        position = (seen[:, None] + along).to(torch.int32).expand(batch, count)
        if lengths is not None:
            position = torch.where(along < lengths[:, None], position, -1)
        position = position[:, None, :].expand(batch, heads, count)
        return _Entries(key.detach(), value.detach(), key_scores.detach().float(), position)

    def _kept(self, every: _Entries) -> _Entries:
        # ranked by (score, position) among real tokens; padding and unused entries have position -1 and rank last
        real = every.position >= 0
        order = torch.argsort(every.position, dim=-1, stable=True)
        scores = every.scores.masked_fill(~real, float("-inf")).gather(2, order)
        best = order.gather(2, torch.argsort(scores, dim=-1, stable=True))[..., -min(self.keep, order.shape[2]) :]
        return every.taken(best.gather(2, torch.argsort(every.position.gather(2, best), dim=-1, stable=True)))

    def _store(self, kept: _Entries, new: Tensor) -> None:
        if self._places is None:
            assert self._counted is not None
            self._entries, self._counted = kept, self._counted + new
            return
        for x, entries in zip(self._places, kept.tensors(), strict=False):
            # in place, because a captured graph refers to this memory, which has room for at least as many
            x[:, :, : entries.shape[2]] = entries
        self._places.seen.add_(new[:, None])


def _real(new: Tensor, lengths: Tensor | None) -> Tensor:
    """New tokens `[B, Hkv, T, ...]`, with padding replaced by zeros."""
    if lengths is None:
        return new
    real = torch.arange(new.shape[2], device=new.device) < lengths[:, None]
    return new.where(real.view(len(real), 1, -1, *([1] * (new.dim() - 3))), 0.0)


def _metadata(tensor: Tensor) -> tuple:
    """The properties of a tensor on which a compiled kernel depends, including the alignment of its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0
