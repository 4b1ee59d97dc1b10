"""Whether gradients of queries are added in a fixed order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from saccade.nm_sparse.blocks import Setting

_unordered = Setting()


@contextlib.contextmanager
def unordered_gradients(enabled: bool = True) -> Iterator[None]:
    """A context in which backward passes of `nm_sparse_attention` may add the gradient of a query in any order.

    By default gradients are the same bits every run, and backward takes two passes. In the context it takes one, if the GPU is an sm_90 and the
    call is 2:4 or 1:2 without dropout and a block mask. D has to be 65 to 128 with at least 1,024 queries and keys, or smaller with at least
    8,192. On an H100 forward and backward together are then 1.08 to 1.21 times as fast from 2,048 tokens on at D = 128, 0.93 to 1.08 at 1,024, and
    1.04 to 1.09 at D = 64 (h100/nm_fused.csv in benchmarks/results). `dq` then differs from run to run by the rounding of a float32 sum of `Tk / 128`
    terms. All other calls are unchanged. The call of `backward` has to be inside the context; the forward may be outside. All threads are
    affected. Contexts may be nested and overlap, and the newest counts. Under `torch.use_deterministic_algorithms(True)` nothing changes.

    Args:
        enabled: False gives gradients the same bits again inside such a context.
    """
    with _unordered.block(enabled):
        yield


def adds_in_order() -> bool:
    """Whether a backward pass must add in a fixed order."""
    return not _unordered.on or torch.are_deterministic_algorithms_enabled()
