"""The size of the stored selection, and whether forward stores it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from saccade.nm_sparse.blocks import Setting

_recomputing = Setting()


@contextlib.contextmanager
def recompute_selection(enabled: bool = True) -> Iterator[None]:
    """A context in which calls of `nm_sparse_attention` store no selection; backward runs their forward again to obtain it.

    Between forward and backward this saves one bit per score, `B * H * Tq * Tk / 8` bytes per call; it costs one forward. The
    gradients are bitwise the same. For whole layers, `torch.utils.checkpoint` does the same. All threads are affected. Contexts may be nested and
    overlap, and the newest counts.

    Args:
        enabled: False stores the selection again inside such a context.
    """
    with _recomputing.block(enabled):
        yield


def keeps_selection() -> bool:
    """Whether a forward stores its selection for backward."""
    return not _recomputing.on


def words_of(kv_len: int, group: int) -> int:
    """The number of int32 words in the selection of one query; see `NMSparseLaunchers`."""
    return -(-(-(-kv_len // group) * (1 << (group - 1).bit_length())) // 32)
