"""The choice between the kernels of sm_90 (`exact/long`) and Triton's for a ragged call, for its launchers and for `explain`. Imports only torch."""

from __future__ import annotations

from saccade.exact.long.choice import Kind, chunks, named, takes
from saccade.exact.ragged.config import forward_by_triton, in_chunks, long_config
from saccade.launch.disabled import failure_of
from saccade.launch.triton import pow2


def prefers(kind: Kind, *directions: str) -> bool:
    """Whether the ragged family leaves these directions ("forward", "backward") to these kernels, and none of them was disabled."""
    return in_chunks(kind.head_dim, *kind.features) and all(failure_of(named(d, kind)) is None for d in directions)


def by_chunks(kind: Kind, *directions: str) -> bool:
    """Whether these kernels compute the directions of a call, if the copy engine can address its tensors."""
    return prefers(kind, *directions) and takes(kind)


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
