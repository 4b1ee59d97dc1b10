"""The choice of kernels for a ragged call, for its launchers and for `explain`. Imports torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from saccade.engine.problem import Problem
from saccade.exact.ragged.config import MAX_SHARING, forward_by_triton, in_chunks, long_config
from saccade.exact.varlen.args import FULL, UPPER_LEFT, VarlenArgs
from saccade.hardware import arch_of
from saccade.launch.aside import failure_of
from saccade.launch.triton import pow2
from saccade.nvrtc import obstacles

if TYPE_CHECKING:
    from saccade.exact.varlen.problem import VarlenProblem

# of the kernels of sm_90 for long sequences. Backward parks dQ between rounds of keys, for each block all queries of a sequence: 69 MB at
# this length and D = 64
MAX_TOKENS, MAX_HEAD_DIM = 2048, 128


@dataclass(frozen=True)
class Sm90Config:
    """How a kernel is compiled.

    stages: chunks in shared memory at a time.
    registers: of a thread of each kind of warpgroup. Forward: those that compute, and the one that loads. Backward: the two that own keys, the one
        that computes dQ and the one that loads; 512 in all four.
    teams: of forward, pairs of warpgroups that share queries; each has memory of its own. Two in one block, and not two blocks: beside a
        warpgroup that loads they have 112 registers of a thread in place of 104, of which the products run out.
    """

    stages: int
    registers: tuple[int, ...]
    teams: int = 1


# (direction, D rounded up)
CONFIGS = {
    ("forward", 32): Sm90Config(4, (112, 32), teams=2),
    ("forward", 64): Sm90Config(4, (112, 32), teams=2),
    ("forward", 128): Sm90Config(4, (240, 24)),
    ("backward", 32): Sm90Config(4, (176, 88, 72)),
    ("backward", 64): Sm90Config(4, (192, 72, 56)),
    ("backward", 128): Sm90Config(2, (208, 64, 32)),
}


class Kind(NamedTuple):
    """The facts that decide which kernels compute a call, apart from where its tensors lie. group: query heads that share a key head."""

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

    @property
    def features(self) -> tuple[bool, bool, bool]:
        """The features that kernels are compiled for: grouped heads, a mask, dropout."""
        return self.group > 1, self.mask, self.dropout


def kind_of(args: VarlenArgs) -> Kind:
    """The kind of a call that kernels are given."""
    query = args.query
    group = query.shape[1] // max(1, args.key.shape[1])  # of an empty call
    return Kind(
        arch_of(query.device), query.dtype, query.dim() == 4, query.shape[-1], group, args.max_q, args.max_k, args.causal,
        args.mask is not None, args.seed is not None, args.bias is not None, args.scale,
    )  # fmt: skip


def kind_of_packed(problem: VarlenProblem) -> Kind:
    """The kind of a described call of packed sequences."""
    return Kind(
        problem.arch, problem.dtype, False, problem.head_dim, problem.heads // max(1, problem.kv_heads), problem.max_q, problem.max_k,
        problem.causal, False, problem.dropout_p > 0, problem.bias is not None, problem.scale,
    )  # fmt: skip


def kind_of_dense(problem: Problem) -> Kind:
    """The kind of a described call of dense rows."""
    causal = UPPER_LEFT if problem.is_causal else FULL
    return Kind(
        problem.arch, problem.dtype, True, problem.head_dim, problem.heads // max(1, problem.kv_heads), problem.q_len, problem.kv_len,
        causal, problem.mask == "bool", problem.dropout_p > 0, problem.mask == "bias", problem.scale,
    )  # fmt: skip


def takes(kind: Kind) -> bool:
    """Whether the kernels of sm_90 for long sequences take a call, if the copy engine can address its tensors."""
    if kind.arch != 90 or kind.dtype.itemsize != 2 or kind.bias or not kind.scale > 0:
        return False
    if (kind.group > 1 and kind.group * kind.max_q > MAX_SHARING) or (kind.mask and not kind.dense):
        return False
    if kind.head_dim > MAX_HEAD_DIM or kind.head_dim % 8 or max(kind.max_q, kind.max_k) > MAX_TOKENS:
        return False
    return not obstacles("90a")


def prefers(kind: Kind, *directions: str) -> bool:
    """Whether the ragged family leaves these directions ("forward", "backward") to these kernels, of which none was set aside."""
    return in_chunks(kind.head_dim, *kind.features) and all(failure_of(named(d, kind)) is None for d in directions)


def by_chunks(kind: Kind, *directions: str) -> bool:
    """Whether these kernels compute the directions of a call, if the copy engine can address its tensors."""
    return prefers(kind, *directions) and takes(kind)


def named(direction: str, kind: Kind) -> tuple:
    """The key under which a failure to compile is remembered."""
    columns = rounded(kind.head_dim)
    return "attention_varlen", f"long_{direction}_sm90", 4 if kind.dense else 3, columns, kind.dtype, kind.causal, *kind.features


def rounded(head_dim: int) -> int:
    """Columns of a tile of these kernels."""
    return 32 if head_dim <= 32 else 64 if head_dim <= 64 else 128


def stays_with_triton(kind: Kind) -> bool:
    """Whether forward beyond the tiles stays with Triton though sm_90 has a kernel too."""
    return not kind.dense and forward_by_triton(kind.head_dim, kind.causal, kind.max_q)


def long_form(direction: str, kind: Kind) -> str:
    """The kernels that compute sequences beyond the tiles, in a direction."""
    if by_chunks(kind, direction) and not (direction == "forward" and stays_with_triton(kind)):
        return chunks(direction, kind)
    block = pow2(max(16, kind.head_dim))
    kinds = ("fwd",) if direction == "forward" else ("keys", "queries")
    return " and ".join([f"{k} {long_config(k, block, kind.dtype.itemsize, kind.arch)}" for k in kinds])


def chunks(direction: str, kind: Kind) -> str:
    """The configuration of the kernels of sm_90."""
    return f"CUDA C++ {CONFIGS[direction, rounded(kind.head_dim)]}"
