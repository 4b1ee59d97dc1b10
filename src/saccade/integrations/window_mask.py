"""The mask of a sliding window, held as the window. transformers describes it by a function; the full mask has a byte for each pair of tokens."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from saccade.engine.prepare import traced
from saccade.engine.window import Window, ends_of, in_window
from saccade.integrations.mask_functions import HOLE, OTHER_HOLE, found_in
from saccade.integrations.unformed import UnformedMask


class WindowMask(UnformedMask):
    """A bool mask `[B, 1, T, T]` of as many queries as keys.

    Args:
        window: (left, right), as `saccade.attention` takes it.
    """

    window: Window

    @staticmethod
    def __new__(cls, batch: int, tokens: int, window: Window, device: torch.device) -> WindowMask:
        made = cls._of(batch, tokens, device)
        made.window = window
        return made

    def _form(self) -> Tensor:
        places = torch.arange(self.shape[2], device=self.device)
        seen = in_window(places[:, None], places, *ends_of(self.window)).expand(*self.shape)
        return seen.contiguous()  # as the strides of the mask say, which `view` and writes in place rely on

    def _again(self, memo: dict[int, Any]) -> WindowMask:
        return WindowMask(self.shape[0], self.shape[2], self.window, self.device)


def window_mask(
    mask_function: Any, attention_mask: Tensor | None, q_length: int, kv_length: int, places: dict[str, Any]
) -> WindowMask | None:
    """The mask, if `mask_function` is that of a window and nothing else hides or shows a key. places: the arguments `batch_size`, `q_offset`,
    `kv_offset` and `device` of a mask function."""
    if attention_mask is not None or not 1 < q_length == kv_length or traced():
        return None
    # a cache may have dropped keys, or hold more of them than there are tokens
    offsets = [places.get(name, 0) for name in ("q_offset", "kv_offset")]
    if any(type(offset) is not int or offset != 0 for offset in offsets):
        return None
    window = window_of(mask_function)
    if window is None or "batch_size" not in places:
        return None
    return WindowMask(places["batch_size"], q_length, window, torch.device(places.get("device", "cpu")))


def window_for(mask: Tensor | None, query: Tensor, key: Tensor, ends: Tensor | None, ends_k: Tensor | None) -> Window | None:
    """The window that replaces the mask of a call; None if the mask must be formed. ends: of the sequences packed into the only row,
    whose windows are those of the row, if queries and keys have the same."""
    if not isinstance(mask, WindowMask) or not mask.holds_for(query, key):
        return None
    apart = ends is not None and (query.shape[0] != 1 or not (ends_k is None or ends_k is ends))
    return None if apart else mask.window


def window_of(mask_function: Any) -> Window | None:
    """The window of a mask function of transformers; None if it is anything but a window."""
    from transformers import masking_utils

    # a causal window of `width` tokens includes the query itself, so it begins `width - 1` tokens before it
    width = _hole(masking_utils.sliding_window_causal_mask_function, mask_function)
    if width is not None:
        return (width - 1, 0)
    both = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
    width = None if both is None else _hole(both, mask_function)
    return _window_of_gemma(mask_function) if width is None else (width, width)


def _window_of_gemma(mask_function: Any) -> Window | None:
    """The window of both sides of Gemma 3 as an encoder (EmbeddingGemma), a causal one joined with one of the model's own."""
    from transformers import masking_utils

    overlay = getattr(sys.modules.get("transformers.models.gemma3.modeling_gemma3"), "_bidirectional_window_overlay", None)
    if overlay is None:
        return None
    causal = masking_utils.sliding_window_causal_mask_function(HOLE)
    found = found_in(mask_function, masking_utils.or_masks(causal, overlay(OTHER_HOLE)))
    width = found.get(HOLE)
    return (width - 1, width - 1) if type(width) is int and width > 0 and found[OTHER_HOLE] == width else None


def _hole(compose: Any, mask_function: Any) -> int | None:
    width = found_in(mask_function, compose(HOLE)).get(HOLE)
    return width if type(width) is int and width > 0 else None
