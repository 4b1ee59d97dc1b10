"""What a kernel family hands to the dispatcher. Imports nothing from any family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class AttentionArgs(NamedTuple):
    """The tensors and numbers of one `attention` call, after checking; the same for every backend.

    Shapes: query `[B, H, Tq, D]`, key and value `[B, Hkv, Tk, D]`, mask (bool, True = attend) and bias (float, added)
    broadcastable to `[B, H, Tq, Tk]`, lengths int32 `[B]` (of plain torch int64 too), seed int64 `[1]` (the Philox key, None without dropout).
    plan: a number that stands for shapes, strides, dtypes, device and options of this call, where the caller has worked one out;
        calls with one number differ in data alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    lengths: Tensor | None
    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    plan: int | None = None


class Launchers(NamedTuple):
    """Entry points of a family whose gradients are its own.

    forward:  `AttentionArgs -> (out, lse)`
    backward: `(AttentionArgs, dout, dlse | None, out | None, lse, *, bias_grad, packed) -> (dq, dk, dv, dbias | None)`; dq, dk
              and dv are written into views of `packed`, an empty `[B, S, 3, H, D]`, where one is given.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


class CausalCall(Protocol):
    """A causal call of `dynamic_mask_attention` as a whole; see `DynamicMaskLaunchers.causal`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None, /
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[], bool]]:
        """(out, lse, intervals, faulty): watched and forward in one, intervals start and stop in one tensor `[2, B, Hkv, Tk]`."""
        ...

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
        key_scores: Tensor | None, intervals: Tensor, /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:  # fmt: skip
        """(dq, dk, dv, dscores) of eager tensors; None where it is for the family's `backward`."""
        ...


class DynamicMaskLaunchers(NamedTuple):
    """Entry points of a family of `dynamic_mask_attention`; `start`, `stop` are the interval of positions that keep each key, and
    `most` bounds the keys that any two queries keep between them, besides those that lie between the two.

    forward:   `(query, key, value, key_scores | None, start, stop, most, scale) -> (out, lse)`
    backward:  `(dout, dlse | None, out, lse, *the arguments of forward) -> (dq, dk, dv, dscores)`; dk and dv may share memory
    intervals: `(key_scores, keep, lengths | None) -> (start, stop) | None`, the causal ones, None where it cannot; only if the family
               has one.
    watched:   the same with a third result: a function, to be called once, that says whether a score was not finite.
    causal:    `(query, key, value, keep, adds_scores, scale, plan) -> call | None`; plan: a number that stands for all of this, but for
               where the tensors lie.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    intervals: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    watched: Callable[..., tuple[Tensor, Tensor, Callable[[], bool]] | None] | None = None
    causal: Callable[..., CausalCall | None] | None = None


class NMSparseArgs(NamedTuple):
    """The tensors and numbers of one `nm_sparse_attention` call, after checking; the same for every backend.

    Shapes: query, key, value, mask, bias and seed as in `AttentionArgs`; block_mask bool `[B or 1, H or 1, Tq / 64, Tk / 64]`, rounded
    up. Of each `group` consecutive keys, `keep` are kept.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    block_mask: Tensor | None
    seed: Tensor | None
    keep: int
    group: int
    dropout_p: float
    is_causal: bool
    scale: float


class NMSparseLaunchers(NamedTuple):
    """Entry points of a family of `nm_sparse_attention`.

    forward:  `(NMSparseArgs, stores) -> (out, lse, kept)`; `kept` is the selection that this forward made, or empty unless `stores`:
              int32 `[B, H, Tq, words]`, one bit a slot, slot s at bit s % 32 of word s // 32. Key j lies at slot (j // M) * P + j % M,
              P the power of two that is M or next above it; `words` is ceil(ceil(Tk / M) * P / 32). Unused bits are 0.
    backward: `(NMSparseArgs, dout, dlse | None, out, lse, kept, *, bias_grad) -> (dq, dk, dv, dbias | None)`: the gradients for exactly
              the selection `kept`, whichever backend made it. Only the family whose backward serves all has one.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] | None = None


class Places(NamedTuple):
    """The kept entries of a cache for decoding, in fixed memory that kernels change in place; all contiguous, in no order.

    key, value: `[B, Hkv, keep, D]`. scores: float32 `[B, Hkv, keep]`. position: int32 `[B, Hkv, keep]`, -1 where a place is not used yet
    (so at most 2**31 - 1 tokens).
    seen: int64 `[B, Hkv]`, tokens so far, the same for all heads of a row; counted on the device, each head by itself.
    """

    key: Tensor
    value: Tensor
    scores: Tensor
    position: Tensor
    seen: Tensor


class DecodeLaunchers(NamedTuple):
    """Entry point of a family that decodes.

    plan: `(query, key, value, key_scores, lengths | None, places, scale, add_scores, return_lse) -> call`, once a signature; then
          `call(query, key, value, key_scores, lengths | None, places) -> (out, lse | None)`.
    """

    plan: Callable[..., Callable[..., tuple[Tensor, Tensor | None]]]


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation.

    `why_not` and `prefers` take the description of a call (`Problem`, or that of the operation).
    `why_not` lists what makes this call impossible, one sentence each with the actual value; an empty list means it can run.
    `prefers` says whether `backend="auto"` should pick it; it must follow the measured tables in `benchmarks/results`.
    `by_name_only` gives a few words on why `auto` never takes it for such a problem; empty if it may.
    `unpreferred` says in a sentence why `prefers` says no, for `explain`.
    A backend has either `attend` (plain torch, differentiated by torch) or `launchers` (imported at first use).
    """

    name: str
    operation: str
    summary: str
    why_not: Callable[[Any], list[str]]
    prefers: Callable[[Any], bool]
    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    launchers: Callable[[], Any] | None = None
    saves_output: bool = False
    describe_config: Callable[[Any], str] | None = None
    by_name_only: Callable[[Any], str] = lambda problem: ""
    unpreferred: Callable[[Any], str] = lambda problem: ""

    def asked(self, backend: str) -> str:
        """How the ops name it: "auto:" before its name where a call left the choice to us, so that another may take its place."""
        return f"auto:{self.name}" if backend == "auto" else self.name
