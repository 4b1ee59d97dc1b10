"""The causal mask of a batch whose position ids restart, as the ends of its sequences.

transformers finds such sequences once for a batch and describes their mask by a function. The full mask has a byte for each pair of tokens, and every
layer would read it. `attention_varlen` needs only the ends, and the window of a layer that has one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine.prepare import traced
from saccade.engine.problem import compiled_or_captured
from saccade.engine.window import Window, ends_of, in_window
from saccade.integrations.mask_functions import HOLE, OTHER_HOLE, THIRD_HOLE, found_in
from saccade.integrations.unformed import UnformedMask


class PackedMask(UnformedMask):
    """A bool mask `[B, 1, T, T]` that is not formed until code computes with it.

    Args:
        numbers: int64 `[B, T]`, the number of each token's sequence within its row, ascending.
        window: (left, right) of a sliding window, as `saccade.attention` takes it.

    `ends`, int32 `[sequences + 1]`, are 0 and then the end of each sequence in the rows laid one behind another; `longest` is the
    length of the longest one.
    """

    ends: Tensor
    longest: int
    numbers: Tensor
    window: Window | None

    @staticmethod
    def __new__(cls, numbers: Tensor, window: Window | None = None) -> PackedMask:
        made = cls._of(numbers.shape[0], numbers.shape[1], numbers.device)
        made.numbers, made.window = numbers, window
        made.ends, made.longest = _ends(numbers)
        return made

    def _form(self) -> Tensor:
        same = self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
        if self.window is None:
            return same.tril_()
        places = torch.arange(self.shape[2], device=self.device)
        return (same & in_window(places[:, None], places, *ends_of(self.window))).tril_()

    def _again(self, memo: dict[int, Any]) -> PackedMask:
        return PackedMask(copy.deepcopy(self.numbers, memo), self.window)


def packed_mask(mask_function: Any, attention_mask: Tensor | None, q_length: int, kv_length: int) -> PackedMask | None:
    """The mask if `mask_function` is the causal one of packed sequences, perhaps with a window, and nothing else hides or shows a key."""
    if attention_mask is not None or q_length != kv_length or traced():
        return None
    numbers, window = _sequence_numbers(mask_function)
    # reading the ends waits for the device once for a batch, which is impossible in a graph or with fake tensors
    if type(numbers) is not Tensor or numbers.shape[1] != q_length or compiled_or_captured(numbers):
        return None
    return PackedMask(numbers, window)


def _ends(numbers: Tensor) -> tuple[Tensor, int]:
    begins = torch.nn.functional.pad(numbers.diff(dim=1) != 0, (1, 0), value=True)
    ends = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=numbers.numel())
    return ends.to(torch.int32), int(ends.diff().max()) if numbers.numel() else 0


def _sequence_numbers(mask_function: Any) -> tuple[Tensor | None, Window | None]:
    """The numbers, and the window that each sequence has."""
    from transformers import masking_utils

    for compose in (_of_compatibility, _of_both_masks):
        for within in (masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(THIRD_HOLE)):
            # the function that transformers would make itself, with holes where its tensors and numbers are
            made = compose(masking_utils, within)
            found = {} if made is None else found_in(mask_function, made)
            width = found.get(THIRD_HOLE)
            if found and (width is None or (type(width) is int and width > 0)):
                return found[OTHER_HOLE], None if width is None else (width - 1, None)
    return None, None


def _of_compatibility(masking_utils: Any, within: Callable[..., Any]) -> Any:
    """The mask of packed sequences, as newer releases compose it of the one within a sequence."""
    compose = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    return None if compose is None else compose(within, HOLE, OTHER_HOLE)


def _of_both_masks(masking_utils: Any, within: Callable[..., Any]) -> Any:
    """The same, as releases up to 5.17 at least compose it."""
    apart = getattr(masking_utils, "packed_sequence_mask_function", None)
    return None if apart is None else masking_utils.and_masks(within, apart(OTHER_HOLE))
