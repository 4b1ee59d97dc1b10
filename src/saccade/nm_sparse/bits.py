"""The stored selection: its size, and whether forward stores it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_recomputing = False


@contextlib.contextmanager
def recompute_selection(enabled: bool = True) -> Iterator[None]:
    """Calls of `nm_sparse_attention` inside keep no selection for backward, which runs their forward once more to get it.

    Saves one bit a score, `B * H * Tq * Tk / 8` bytes a call, between forward and backward; costs one forward. Gradients are the same
    bits. Around whole layers, `torch.utils.checkpoint` does the same.
    """
    global _recomputing
    before, _recomputing = _recomputing, enabled
    try:
        yield
    finally:
        _recomputing = before


def keeps_selection() -> bool:
    """Whether a forward stores its selection for backward."""
    return not _recomputing


def words_of(kv_len: int, group: int) -> int:
    """int32 words of one query's selection; see `NMSparseLaunchers`."""
    return -(-(-(-kv_len // group) * (1 << (group - 1).bit_length())) // 32)
