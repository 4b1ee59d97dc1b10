"""Whether gradients of queries are added in an order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from saccade.nm_sparse.blocks import Setting

_unordered = Setting()


@contextlib.contextmanager
def unordered_gradients(enabled: bool = True) -> Iterator[None]:
    """A context in which backward passes of `nm_sparse_attention` may add the gradient of a query in any order.

    By default gradients are the same bits every run. On sm_90 with 2:4 or 1:2, D from 65 to 128 and at least 1,024 queries and keys (D up to
    64: 8,192), without dropout and a block mask, backward then is 1.08 to 1.23 times as fast as by default's two passes on an H200; `dq`
    differs from run to run by the rounding of a float32 sum of `Tk / 128` terms. Everywhere else nothing changes. The call of
    `backward` has to be inside the context; the forward may be outside. All threads are affected; blocks may be nested and overlap, and the
    newest counts. Under `torch.use_deterministic_algorithms(True)` nothing changes.

    Args:
        enabled: False gives gradients the same bits again inside such a context.
    """
    with _unordered.block(enabled):
        yield


def adds_in_order() -> bool:
    """Whether a backward pass has to add in order."""
    return not _unordered.on or torch.are_deterministic_algorithms_enabled()
