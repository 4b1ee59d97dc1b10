"""The calls that the kernels of sm_90 for long sequences take, for the launchers of both families and for `explain`. Imports only torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from saccade.engine.problem import Problem
from saccade.engine.window import NO_LIMIT, has_window
from saccade.exact.long.config import CONFIGS, MAX_HEAD_DIM, MAX_SHARING, most_tokens, rounded
from saccade.exact.varlen.args import FULL, HIDE_LATER, UPPER_LEFT, VarlenArgs
from saccade.hardware import arch_of
from saccade.nvrtc import obstacles

if TYPE_CHECKING:
    from saccade.exact.varlen.problem import VarlenProblem


# no limit of a window: beyond all tokens of any batch, so that one launch serves all, and a sum of two and a place fits 31 bits
_FAR = 2**29


class Kind(NamedTuple):
    """The facts that decide which kernels compute a call, apart from the addresses of its tensors. group: query heads that share a key head."""

    arch: int
    dtype: torch.dtype
    dense: bool
    head_dim: int
    group: int
    max_q: int
    max_k: int
    causal: int
    mask: bool
    dropout: bool
    bias: bool
    scale: float
    window: bool

    @property
    def features(self) -> tuple[bool, bool, bool, bool]:
        """The features that kernels are compiled for: grouped heads, a mask, dropout, a window."""
        return self.group > 1, self.mask, self.dropout, self.window


def kind_of(args: VarlenArgs) -> Kind:
    """The kind of a call that kernels are given."""
    query = args.query
    group = query.shape[1] // max(1, args.key.shape[1])  # of an empty call
    return Kind(
        arch_of(query.device), query.dtype, query.dim() == 4, query.shape[-1], group, args.max_q, args.max_k, args.causal,
        args.mask is not None, args.seed is not None, args.bias is not None, args.scale,
        has_window(args),
    )  # fmt: skip


def kind_of_packed(problem: VarlenProblem) -> Kind:
    """The kind of a described call of packed sequences."""
    return Kind(
        problem.arch, problem.dtype, False, problem.head_dim, problem.heads // max(1, problem.kv_heads), problem.max_q, problem.max_k,
        problem.causal, False, problem.dropout_p > 0, problem.bias is not None, problem.scale, problem.window is not None,
    )  # fmt: skip


def kind_of_dense(problem: Problem) -> Kind:
    """The kind of a described call of dense rows."""
    causal = UPPER_LEFT if problem.is_causal else FULL
    return Kind(
        problem.arch, problem.dtype, True, problem.head_dim, problem.heads // max(1, problem.kv_heads), problem.q_len, problem.kv_len,
        causal, problem.mask == "bool", problem.dropout_p > 0, problem.mask == "bias", problem.scale, problem.window is not None,
    )  # fmt: skip


def window_of(ends: tuple[int, int], causal: int) -> tuple[int, int] | None:
    """(left, right) of a window; None without one. ends: as `engine.window.ends_of` has them."""
    if ends == (NO_LIMIT, NO_LIMIT):
        return None
    left, right = (_FAR if end == NO_LIMIT else min(end, _FAR) for end in ends)
    return left, 0 if causal in HIDE_LATER else right


def takes(kind: Kind) -> bool:
    """Whether the kernels of sm_90 for long sequences take a call, if the copy engine can address its tensors."""
    if kind.arch != 90 or kind.dtype.itemsize != 2 or kind.bias or not kind.scale > 0:
        return False
    parks_all = kind.group > 1 and not kind.window  # dQ of all queries that share a key head
    if (parks_all and kind.group * kind.max_q > MAX_SHARING) or (kind.mask and not kind.dense):
        return False
    if kind.head_dim > MAX_HEAD_DIM or kind.head_dim % 8 or max(kind.max_q, kind.max_k) > most_tokens(kind.window):
        return False
    return not obstacles("90a")


def named(direction: str, kind: Kind) -> tuple:
    """The key under which a failure to compile is remembered."""
    columns = rounded(kind.head_dim)
    return "attention_varlen", f"long_{direction}_sm90", 4 if kind.dense else 3, columns, kind.dtype, kind.causal, *kind.features


def chunks(direction: str, kind: Kind) -> str:
    """The configuration of the kernels of sm_90."""
    return f"CUDA C++ {CONFIGS[direction, rounded(kind.head_dim)]}"
