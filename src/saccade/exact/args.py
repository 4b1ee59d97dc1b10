"""The record of `attention`: the arguments that every backend is given, declared once."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from saccade.engine.record import BACKWARD_TOO, Differentiable, DifferentiableOrNone
from saccade.engine.sharded import BATCH, BHTD, Dims, scores_dims
from saccade.engine.window import NO_LIMIT
from saccade.launch.cache import LaunchCache


class AttentionCall(NamedTuple):
    """The arguments of the public function, in its order. The function itself makes a plain tuple of them, which is faster."""

    query: Annotated[Tensor, BHTD]
    key: Annotated[Tensor, BHTD]
    value: Annotated[Tensor, BHTD]
    attn_mask: Annotated[Tensor | None, scores_dims]
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    lengths: Annotated[Tensor | None, BATCH]
    window: tuple | None
    key_mask: Annotated[Tensor | None, BATCH]
    return_lse: bool
    backend: str


class PackedCall(NamedTuple):
    """The arguments of `attention_qkvpacked`."""

    qkv: Annotated[Tensor, Dims(0, 3)]
    attn_mask: Annotated[Tensor | None, scores_dims]
    dropout_p: float
    is_causal: bool
    scale: float | None
    lengths: Annotated[Tensor | None, BATCH]
    window: tuple | None
    return_lse: bool
    backend: str


class AttentionArgs(NamedTuple):
    """The tensors and numbers of one `attention` call, after checking; the same for every backend.

    query, key, value: `[B, H, Tq, D]`, `[B, Hkv, Tk, D]`, `[B, Hkv, Tk, D]`.
    mask: bool (True = attend), broadcastable to `[B, H, Tq, Tk]`. With a bias it is a mask of keys, `[B, 1, 1, Tk]`.
    bias: floating, added to the scores, broadcastable likewise; or a bias for each of W windows (see `windows_of`).
    lengths: int32 `[B]`; int64 too for backends in plain torch. seed: int64 `[1]`, the Philox key; None without dropout.
    window_left, window_right: of a sliding window, NO_LIMIT for none; a call with one has neither mask nor bias.
    launches: what the backend's launchers remember of calls that differ from this one only in their data; None for a call that
        was not prepared.
    """

    query: Differentiable
    key: Differentiable
    value: Differentiable
    mask: Tensor | None
    bias: DifferentiableOrNone
    lengths: Tensor | None
    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    window_left: int = NO_LIMIT
    window_right: int = NO_LIMIT
    launches: Annotated[LaunchCache | None, BACKWARD_TOO] = None


def windows_of(bias: Tensor | None, batch: int) -> int:
    """W of a bias `[W, H or 1, Tq or 1, Tk or 1]` that has a row for each of W windows, where the batch is images times windows with
    the windows inside: batch row b reads row b % W. 0 for a bias that broadcasts to the batch."""
    if bias is None or bias.dim() < 4:
        return 0
    return 0 if bias.shape[0] in (1, batch) else bias.shape[0]


def repeated(bias: Tensor, batch: int) -> Tensor:
    """The same call for backends that know no windows: the bias is copied for each image."""
    windows = windows_of(bias, batch)
    return bias.repeat(batch // windows, 1, 1, 1) if windows else bias
