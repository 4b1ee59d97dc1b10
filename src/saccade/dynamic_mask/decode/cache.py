"""Decoding with a dynamic mask: a cache of `keep` entries for each key head, equivalent to keeping the whole history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.dynamic_mask.api import dynamic_mask_attention
from saccade.dynamic_mask.args import Places
from saccade.dynamic_mask.backends import BACKENDS, DECODING
from saccade.dynamic_mask.decode.entries import Entries, accepted_of, none_of, real_of, rolled
from saccade.dynamic_mask.problem import DynamicMaskProblem, check_selection_values, describe_dynamic_mask
from saccade.engine.arguments import check_choice, check_count, check_flag, check_keep, check_lengths
from saccade.engine.backend import Backend
from saccade.engine.calls import autocast, gradient_needed, values_known
from saccade.engine.dispatch import choose, why_not
from saccade.engine.kinds import check_kinds
from saccade.engine.lengths import checked_lengths
from saccade.engine.switch import is_disabled
from saccade.engine.tracing import eager, load
from saccade.errors import InvalidArgument, UnsupportedProblem

_NAMES = ("auto", *[backend.name for backend in (*DECODING, *BACKENDS)])


class DynamicMaskCache:
    """A cache for decoding with `dynamic_mask_attention`: keys and values of the `keep` best-scored tokens so far.

    Each batch row and key head has entries of its own. With `sinks` and `window`, the cache also keeps the first and the newest tokens. The
    result is exact: scores do not change, so a key that `keep` others outrank never returns once it has left the window. Neither memory nor
    the time of a step grows with the history.

        cache = DynamicMaskCache(keep=1024)
        out = cache.attend(q_prompt, k_prompt, v_prompt, s_prompt, lengths=lengths)   # prefill, right-padded
        out = cache.attend(q, k, v, s)                                                # one token, or a few
        out = cache.attend(q_draft, k_draft, v_draft, s_draft, commit=False)          # speculative tokens
        cache.commit(accepted)                                                        # the first accepted[b] of row b enter

    On a GPU that the decode kernel supports, a token takes one launch and waits for nothing. The memory of the cache stays in
    place from the first decoded token on, so a CUDA graph can capture steps of the same shapes. The graph stays valid after `reset`, after
    `attend` (also of a new prompt), and after `take_rows` with the same number of rows. Replay it on one stream at a time.

    Args:
        keep: as in `dynamic_mask_attention`.
        sinks: as in `dynamic_mask_attention`.
        window: as in `dynamic_mask_attention`.

    Raises:
        InvalidArgument: `keep` is below 1, `sinks` or `window` is below 0, or one of them is no whole number.

    Source: paper 004, Listing 1 (per-query causal top-w). That eviction is final is our observation (`dynamic_mask.selection.intervals`).
    """

    def __init__(self, keep: int, *, sinks: int = 0, window: int = 0) -> None:
        self.keep, self.sinks, self.window = check_keep(keep), check_count("sinks", sinks, 0), check_count("window", window, 0)
        # both are None before the first call; after it, entries and counts of one kind or the other
        self._entries: Entries | None = None
        self._counted: Tensor | None = None
        self._places: Places | None = None
        self._signature: tuple | None = None
        self._decode: Callable[..., tuple[Tensor, Tensor | None]] | None = None
        # entries and new tokens of a call that was not committed, and the index of the first new one
        self._waiting: tuple[Entries, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a planned call holds a Triton launch, which cannot be pickled; a copy plans its own launch and workspace
        return {**vars(self), "_signature": None, "_decode": None}

    def __repr__(self) -> str:
        counts = self.seen
        seen = "empty" if counts is None else f"seen={counts.tolist() if values_known(counts) else 'unknown'}"
        always = "".join(f"{name}={n}, " for name, n in (("sinks", self.sinks), ("window", self.window)) if n)
        return f"DynamicMaskCache(keep={self.keep}, {always}{seen})"

    @property
    def size(self) -> int:
        """The most entries that a key head may hold: `keep + sinks + window`."""
        return self.keep + self.sinks + self.window

    @property
    def seen(self) -> Tensor | None:
        """The number of tokens so far, int64 `[B]`, as a copy; None before the first call."""
        counted = self._counted if self._places is None else self._places.seen[:, 0]
        return None if counted is None else counted.clone()

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
        padding_side: str = "right",
        commit: bool = True,
    ) -> Tensor:
        """Attention of new tokens to all tokens so far, themselves included; then keeps what later tokens can see.

        Args:
            query: `[B, H, T, D]` of T new tokens.
            key: `[B, Hkv, T, D]` of the same tokens.
            value: `[B, Hkv, T, D]` of the same tokens.
            key_scores: `[B, Hkv, T]` of the same tokens, finite. The decode kernel on a GPU does not check this, because a check would wait
                for the device at every token. A NaN score ranks first, stays in the cache, and makes later outputs of its head NaN.
            lengths: `[B]`, how many of the new tokens are real, counted from the first, or up to the last with
                `padding_side="left"`. The others may hold anything, NaN included, and their output is meaningless.
            scale: as in `dynamic_mask_attention`.
            enable_gqa: as in `dynamic_mask_attention`.
            add_scores: as in `dynamic_mask_attention`.
            backend: "auto"; "decode" (at most 8 tokens without gradient; "auto" chooses it on a GPU if it can); or a backend
                of `dynamic_mask_attention`, which then runs over the entries and new tokens together.
            padding_side: "right" or "left", the side of a row with the tokens that are not real.
            commit: False leaves the cache as it is. `commit` then takes in as many of these tokens as were accepted; any other
                call forgets them.

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
        check_choice("padding_side", padding_side, ("right", "left"))
        query, key, value = autocast(query, key, value)
        self._waiting = None
        if padding_side == "left" and lengths is not None:
            self._check(query, key, value, key_scores, lengths)
            rule = (self.keep, True, lengths, None, add_scores, scale, enable_gqa, False, self.sinks, self.window)
            describe_dynamic_mask(query, key, value, key_scores, *rule)
            lengths = checked_lengths(lengths, key.shape[2])
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "add_scores": add_scores, "backend": backend}
            shifted = [rolled(x, lengths) for x in (query, key, value, key_scores)]
            return rolled(self.attend(*shifted, lengths=lengths, commit=commit, **options), key.shape[2] - lengths)
        decode = None
        if check_flag("commit", commit):
            decode = self._decoder(query, key, value, key_scores, lengths, scale, enable_gqa, add_scores, backend)
        elif check_choice("backend", backend, _NAMES) in [candidate.name for candidate in DECODING]:
            raise UnsupportedProblem(f"backend {backend!r} changes the cache in place, so it takes no commit=False")
        else:
            self._check(query, key, value, key_scores, lengths)
        if lengths is not None:
            lengths = checked_lengths(lengths, key.shape[2])
        if decode is not None:
            if not key_scores.is_cuda and values_known(key_scores):
                check_selection_values(real_of(key_scores, lengths), None)
            return decode(query, key, value, key_scores, lengths, self._fixed(key, value))[0]
        every, first = self._joined(key, value, key_scores, lengths)
        out = dynamic_mask_attention(
            query, every.key, every.value, every.scores, keep=self.keep, document_ids=every.parts(first), sinks=self.sinks, window=self.window,
            add_scores=add_scores, scale=scale, enable_gqa=enable_gqa, backend=backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        if not self._tensors():  # not earlier: a refused call would have fixed the batch of the cache
            self._entries, self._counted = none_of(key, value)
        if commit:
            self._take_in(every, first)
        else:
            self._waiting = every, first
        return out

    def commit(self, accepted: Tensor | int) -> None:
        """Take in the first `accepted` tokens of the last call, which was made with `commit=False`; int32 or int64 `[B]`, or one number for
        all rows. Padding of that call is not taken in.

        Raises:
            InvalidArgument: no call waits to be committed; or a number is below 0 or above the tokens of that call. On a GPU the
                values of a tensor are not read, since that would wait at each step: such numbers then mean none or all.
        """
        if self._waiting is None:
            raise InvalidArgument("no call waits to be committed; call attend(..., commit=False) first")
        every, first = self._waiting
        batch, _, size = every.position.shape
        accepted = accepted_of(accepted, batch, size - first, every.position.device)
        real = torch.arange(size, device=accepted.device) < first + accepted[:, None]
        self._take_in(replace(every, position=torch.where(real[:, None, :], every.position, -1)), first)
        self._waiting = None

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> None:
        """Empty batch rows (all of them by default), so that new sequences begin there; the memory stays in place.

        Raises:
            InvalidArgument: as `take_rows`.
        """
        self._waiting = None
        if not self._tensors():
            return
        position = self._tensors()[3]
        index = torch.arange(len(position), device=position.device) if rows is None else self._rows(rows)
        seen = self._counted if self._places is None else self._places.seen
        assert seen is not None
        with torch.inference_mode(position.is_inference()):
            position[index] = -1
            seen[index] = 0

    def take_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Replace batch row i by row `rows[i]` (int64 `[n]`, any number of rows, repeats allowed), for beam search or to drop
        requests.

        Raises:
            InvalidArgument: `rows` is not a vector of integers; or, for a cache on a CPU, an index is out of range.
        """
        self._waiting = None
        rows = self._rows(rows)
        if not self._tensors():
            return
        if self._places is None:
            assert self._entries is not None
            assert self._counted is not None
            self._entries = Entries(*(x[rows] for x in self._entries.tensors()))
            self._counted = self._counted[rows]
            self._signature = None
        elif len(rows) == len(self._places.seen):
            for x in self._places:
                x.copy_(x[rows])
        else:
            with torch.inference_mode(False):
                self._places = Places(*(x[rows] for x in self._places))
            self._signature = None

    def _rows(self, rows: Tensor | Sequence[int]) -> Tensor:
        """Checked indices of batch rows, int64 on the device of the cache."""
        if isinstance(rows, (list, tuple)):
            with contextlib.suppress(RuntimeError, TypeError, ValueError):  # it stays a list, which is refused below
                rows = torch.as_tensor(rows, device="cpu") if rows else torch.zeros(0, dtype=torch.int64, device="cpu")
        check_kinds(rows=rows)
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            given = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
            raise InvalidArgument(f"rows is {given}; it must be an int32 or int64 torch.Tensor of shape [n]")
        if not self._tensors():
            return rows
        held = self._tensors()[0]
        rows = rows.to(held.device, torch.int64)
        # on a GPU this check would wait for the device at every step; there the indexing kernel checks
        if held.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(held):
            raise InvalidArgument(
                f"rows range from {int(rows.min())} to {int(rows.max())}; the cache holds rows 0 to {len(held) - 1}"
            )
        return rows

    def _tensors(self) -> tuple[Tensor, ...]:
        if self._places is not None:
            return self._places[:4]
        return () if self._entries is None else self._entries.tensors()

    def _decoder(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None,
        scale: float | None, enable_gqa: bool, add_scores: bool, backend: str,
    ) -> Callable[..., tuple[Tensor, Tensor | None]] | None:  # fmt: skip
        """The decode kernel planned for such a call; None if it cannot run it. Checked once per signature."""
        tensors = (query, key, value, key_scores)
        # of the new tokens only the queries get a gradient
        needs_grad = gradient_needed(query)
        signature: tuple | None = None
        try:
            if eager(*tensors, lengths):
                given = None if lengths is None else (lengths.shape, lengths.dtype, lengths.device)
                options = (given, scale, enable_gqa, add_scores, backend, needs_grad, is_disabled())
                signature = (*[_metadata(x) for x in tensors], options)
                if signature == self._signature:
                    return self._decode
        except (AttributeError, RuntimeError, TypeError, ValueError):  # an argument that is not a tensor or flag is refused here
            signature = None
        self._check(*tensors, lengths)
        problem = describe_dynamic_mask(
            *tensors, self.keep, True, lengths, None, add_scores, scale, enable_gqa, needs_grad, self.sinks, self.window
        )  # fmt: skip
        chosen = self._choose(problem, backend, signature is not None)
        decode = None
        if chosen is not None:
            places = self._fixed(key, value)
            decode = load(chosen).plan(
                *tensors, lengths, places, problem.scale, problem.add_scores, False, self.sinks, self.window
            )
        self._signature, self._decode = signature, decode
        return decode

    @staticmethod
    def _choose(problem: DynamicMaskProblem, backend: str, plain: bool) -> Backend | None:
        (candidate,) = DECODING
        if check_choice("backend", backend, _NAMES) == candidate.name:
            if not plain:
                raise UnsupportedProblem(
                    f"backend {backend!r} changes memory in place: no torch.compile, fake tensors, or transforms"
                )
            return choose(DECODING, problem, backend).backend
        wanted = backend == "auto" and plain and candidate.prefers(problem)
        return candidate if wanted and not why_not(candidate, problem) else None

    def _check(self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None) -> None:
        check_kinds(query=query, key=key, value=value, key_scores=key_scores, lengths=lengths)
        for name, tensor, rank in (("query", query, 4), ("key", key, 4), ("value", value, 4), ("key_scores", key_scores, 3)):
            if not isinstance(tensor, Tensor) or tensor.dim() != rank:
                given = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InvalidArgument(f"{name} is {given}; it must be a torch.Tensor of rank {rank}")
        if not query.shape[2] == key.shape[2] == key_scores.shape[2]:
            raise InvalidArgument(
                f"{query.shape[2]} queries, {key.shape[2]} keys and {key_scores.shape[2]} scores; they are of the same new tokens"
            )
        check_lengths(key_scores, lengths, "key_scores", rank=3)
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
        shape = (*key.shape[:2], self.size)
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

    def _ordered(self, key: Tensor, value: Tensor) -> Entries:
        """The entries in the order of their positions."""
        if self._places is not None:
            held = Entries(*self._places[:4])
            return held.taken(torch.argsort(held.position, dim=-1, stable=True))
        return none_of(key, value)[0] if self._entries is None else self._entries

    def _joined(self, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None) -> tuple[Entries, int]:
        """The entries with those of the new tokens behind them, and the index at which these begin."""
        # padding is gathered together with tokens, and a weight of 0 times a NaN in it is NaN
        key, value, key_scores = (real_of(x, lengths) for x in (key, value, key_scores))
        held = self._ordered(key, value)
        return held.joined(self._new_entries(key, value, key_scores, lengths)), held.position.shape[2]

    def _new_entries(self, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None) -> Entries:
        batch, heads, count = key_scores.shape
        seen = none_of(key, value)[1] if self.seen is None else self.seen
        along = torch.arange(count, device=key.device)
        position = (seen[:, None] + along).to(torch.int32).expand(batch, count)
        if lengths is not None:
            position = torch.where(along < lengths[:, None], position, -1)
        position = position[:, None, :].expand(batch, heads, count)
        return Entries(key.detach(), value.detach(), key_scores.detach().float(), position)

    def _take_in(self, every: Entries, first: int) -> None:
        """Keep what later tokens can see of the entries and, from index `first` on, new tokens."""
        self._store(every.best(self.keep, self.sinks, self.window), (every.position[:, 0, first:] >= 0).sum(-1))

    def _store(self, kept: Entries, new: Tensor) -> None:
        if self._places is None:
            assert self._counted is not None
            self._entries, self._counted = kept, self._counted + new
            return
        for x, entries in zip(self._places, kept.tensors(), strict=False):
            # in place, because a captured graph refers to this memory, which has room for at least as many
            x[:, :, : entries.shape[2]] = entries
        self._places.seen.add_(new[:, None])


def _metadata(tensor: Tensor) -> tuple:
    """The properties of a tensor on which a compiled kernel depends, including the alignment of its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0
