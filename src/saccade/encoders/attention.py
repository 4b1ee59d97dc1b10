"""The attention function of an optimised model: that of `saccade.integrations.transformers`, given the borders of the batch that runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saccade.integrations.transformers import attention_forward, boolean_mask

NAME = "saccade_encoder"
OPAQUE = "saccade_encoder_opaque"  # the same function, at which torch.compile breaks its graph
_running = threading.local()


@dataclass
class Borders:
    """Ends of the packed sequences, int32 `[sequences + 1]`, and a bound of their lengths. layers: calls of the attention function so far."""

    ends: Tensor
    longest: int
    layers: int = 0


@contextlib.contextmanager
def packed(borders: Borders | None) -> Iterator[Borders | None]:
    """Every attention layer of this thread is given these borders, None for those of a padded batch."""
    before = getattr(_running, "borders", None)
    _running.borders = borders
    try:
        yield borders
    finally:
        _running.borders = before


def is_packed() -> bool:
    """Whether `packed` is active in this thread."""
    return getattr(_running, "borders", None) is not None


def forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
    """`attention_forward`, packed while `packed` is active."""
    borders: Borders | None = getattr(_running, "borders", None)
    if borders is not None:
        borders.layers += 1
        ends = {"cu_seq_lens_q": borders.ends, "cu_seq_lens_k": borders.ends}
        options |= ends | {"max_length_q": borders.longest, "max_length_k": borders.longest}
    return attention_forward(module, query, key, value, attention_mask, **options)


def register() -> None:
    """Make the function known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, forward)
    AttentionInterface.register(OPAQUE, torch.compiler.disable(forward))
    for name in (NAME, OPAQUE):
        AttentionMaskInterface.register(name, boolean_mask)
