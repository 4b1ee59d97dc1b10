"""The causal mask of a batch whose position ids restart, as the ends of its sequences.

transformers finds such sequences once for a batch and describes their mask by a function. Formed, it has a byte for each pair of
tokens, and every layer would read it; `attention_varlen` needs no more than the ends.
"""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from saccade.engine.prepare import traced
from saccade.engine.problem import replayed


class PackedMask(Tensor):
    """A bool mask `[B, 1, T, T]` that is not formed before somebody computes with it; any operation of torch does that.

    Args:
        numbers: int64 `[B, T]`, the number of each token's sequence within its row, ascending.

    `ends`, int32 `[sequences + 1]`, are 0 and then the end of each sequence in the rows laid one behind another; `longest` is the
    length of the longest one.
    """

    ends: Tensor
    longest: int
    numbers: Tensor
    _formed: Tensor | None

    # results of operations are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor) -> PackedMask:
        batch, tokens = numbers.shape
        shape = (batch, 1, tokens, tokens)
        made: PackedMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=numbers.device)  # type: ignore[attr-defined]
        made.numbers, made._formed = numbers, None
        made.ends, made.longest = _ends(numbers)
        return made

    def holds_for(self, query: Tensor, key: Tensor) -> bool:
        """Whether the ends say all about a call: nobody computed with the mask, which may have changed it, and it has its shape."""
        lengths = (self.shape[0], self.shape[2])
        return self._formed is None and all((x.shape[0], x.shape[2]) == lengths for x in (query, key))

    def formed(self) -> Tensor:
        """The mask as a plain tensor, one for all who ask."""
        if self._formed is None:
            same = self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
            self._formed = same.tril_()
        return self._formed

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedMask:
        made = PackedMask(copy.deepcopy(self.numbers, memo))
        # what somebody computed with it may have changed it
        made._formed = copy.deepcopy(self._formed, memo)
        memo[id(self)] = made
        return made

    def share_memory_(self) -> PackedMask:
        """Move what the mask consists of to shared memory; it has none of its own."""
        for part in (self.numbers, self.ends, self._formed):
            if part is not None:
                part.share_memory_()
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(PackedMask, PackedMask.formed, (args, kwargs or {}))
        return func(*args, **kwargs)


def packed_mask(mask_function: Any, attention_mask: Tensor | None, q_length: int, kv_length: int) -> PackedMask | None:
    """The mask if `mask_function` is the causal one of packed sequences and nothing else hides or shows a key."""
    if attention_mask is not None or q_length != kv_length or traced():
        return None
    numbers = _sequence_numbers(mask_function)
    # the ends wait for the device, once for a batch, which neither a graph nor a fake tensor can
    if type(numbers) is not Tensor or numbers.shape[1] != q_length or replayed(numbers):
        return None
    return PackedMask(numbers)


def formed(mask: Tensor | None) -> Tensor | None:
    """`mask`, for kernels, which read memory: a `PackedMask` has none before it is formed."""
    return mask.formed() if isinstance(mask, PackedMask) else mask


def _ends(numbers: Tensor) -> tuple[Tensor, int]:
    begins = torch.nn.functional.pad(numbers.diff(dim=1) != 0, (1, 0), value=True)
    ends = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=numbers.numel())
    return ends.to(torch.int32), int(ends.diff().max())


def _sequence_numbers(mask_function: Any) -> Tensor | None:
    from transformers import masking_utils

    for compose in (_of_compatibility, _of_both_masks):
        # the function that transformers would make itself, with holes where its tensors are
        positions, numbers = object(), object()
        found: dict[object, Any] = {positions: None, numbers: None}
        made = compose(masking_utils, positions, numbers)
        if made is not None and _fits(mask_function, made, found):
            return found[numbers]
    return None


def _of_compatibility(masking_utils: Any, positions: Any, numbers: Any) -> Any:
    """The causal mask of packed sequences, as newer releases compose it."""
    compose = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    return None if compose is None else compose(masking_utils.causal_mask_function, positions, numbers)


def _of_both_masks(masking_utils: Any, positions: Any, numbers: Any) -> Any:
    """The same, as releases up to 5.17 at least compose it."""
    apart = getattr(masking_utils, "packed_sequence_mask_function", None)
    return None if apart is None else masking_utils.and_masks(masking_utils.causal_mask_function, apart(numbers))


def _fits(given: Any, pattern: Any, found: dict[object, Any]) -> bool:
    """Whether `given` is the same function over the same functions as `pattern`; what stands in its holes is put into `found`."""
    if isinstance(pattern, tuple):
        return isinstance(given, tuple) and len(given) == len(pattern) and all(map(_fits, given, pattern, [found] * len(given)))
    if not isinstance(pattern, FunctionType):
        if pattern not in found:
            return given is pattern
        found[pattern] = given
        return True
    if given is pattern:
        return True
    if not isinstance(given, FunctionType) or given.__code__ is not pattern.__code__:
        return False
    return _fits(_cells(given), _cells(pattern), found)


def _cells(function: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
