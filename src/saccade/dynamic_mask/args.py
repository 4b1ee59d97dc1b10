"""The interface between `dynamic_mask_attention` and its families of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from saccade.engine.record import Differentiable, DifferentiableOrNone, Size


class DynamicMaskCall(NamedTuple):
    """The arguments of `dynamic_mask_attention` that a call is prepared by, in the order of `describe_dynamic_mask`, then the backend."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_scores: Tensor
    keep: int
    is_causal: bool
    lengths: Tensor | None
    document_ids: Tensor | None
    add_scores: bool
    scale: float | None
    enable_gqa: bool
    sinks: int
    window: int
    backend: str


class DynamicMaskArgs(NamedTuple):
    """The record of `dynamic_mask_attention`: what its ops take. start, stop: the interval of positions that keep each key; keep: the most keys that
    a query keeps."""

    query: Differentiable
    key: Differentiable
    value: Differentiable
    key_scores: DifferentiableOrNone
    start: Tensor
    stop: Tensor
    keep: Size
    is_causal: bool
    scale: float


class CausalCall(Protocol):
    """A causal call of `dynamic_mask_attention` as a whole; see `DynamicMaskLaunchers.causal`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None, /
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[], bool]]:
        """(out, lse, intervals, faulty): `watched` and `forward` in one; intervals holds start and stop as one tensor
        `[2, B, Hkv, Tk]`."""
        ...

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
        key_scores: Tensor | None, intervals: Tensor, /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:  # fmt: skip
        """(dq, dk, dv, dscores) of eager tensors; None if the family's `backward` has to compute them."""
        ...


class DynamicMaskLaunchers(NamedTuple):
    """The entry points of a family of `dynamic_mask_attention`. `start` and `stop` are the interval of positions that keep each key.
    `max_new_keys` bounds how many keys any two queries keep together, without the keys that lie between the two.

    forward:   `(query, key, value, key_scores | None, start, stop, max_new_keys, scale) -> (out, lse)`
    backward:  `(dout, dlse | None, out, lse, *the arguments of forward) -> (dq, dk, dv, dscores)`; dk and dv may share memory
    intervals: `(key_scores, keep, lengths | None) -> (start, stop) | None`, the causal intervals, None if it cannot; optional.
    watched:   the same with a third result: a function, to be called once, that says whether any score was not finite.
    causal:    `(query, key, value, keep, adds_scores, scale, launches) -> call | None`; launches: remembered launches of calls that differ from this
               one only in their data.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    intervals: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    watched: Callable[..., tuple[Tensor, Tensor, Callable[[], bool]] | None] | None = None
    causal: Callable[..., CausalCall | None] | None = None


class Places(NamedTuple):
    """The kept entries of a decoding cache, in fixed memory that kernels update in place; all contiguous, in no particular order.

    key, value: `[B, Hkv, size, D]`. scores: float32 `[B, Hkv, size]`. position: int32 `[B, Hkv, size]`, -1 where a place is not
    used yet (so at most 2**31 - 1 tokens).
    seen: int64 `[B, Hkv]`, tokens so far, equal for all heads of a row; counted on the device for each head separately.
    """

    key: Tensor
    value: Tensor
    scores: Tensor
    position: Tensor
    seen: Tensor


class DecodeLaunchers(NamedTuple):
    """Entry point of a family that decodes.

    plan: `(query, key, value, key_scores, lengths | None, places, scale, add_scores, return_lse, sinks, window) -> call`, called
          once per signature, with `keep + sinks + window` places; then `call(query, key, value, key_scores, lengths | None, places) -> (out, lse | None)`.
    """

    plan: Callable[..., Callable[..., tuple[Tensor, Tensor | None]]]
