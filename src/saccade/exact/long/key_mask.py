"""A mask of keys together with a bias, for the kernels of long sequences on sm_90. They read its bytes without a copy, whatever its strides (`cuda/key_mask.cuh`)."""

from __future__ import annotations

from torch import Tensor

SELECTOR_BYTES = 128  # in shared memory, for 64 keys


def strides_of(mask: Tensor) -> dict[str, int]:
    """The numbers of a mask `[B, H, Tq, Tk]` that the kernels take. It was expanded over heads and queries (`AttentionArgs`)."""
    batch, *pairs, column = [s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True)]
    assert pairs == [0, 0], "a mask beside a bias is one of keys"
    return {"key_mask_batch": batch, "key_mask_column": column}
