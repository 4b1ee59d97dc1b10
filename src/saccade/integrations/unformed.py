"""A mask that takes no memory until code computes with it: a layer needs only a few numbers of it."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class UnformedMask(Tensor):
    """A bool mask `[B, 1, T, T]` that is not formed until code computes with it; any operation of torch forms it."""

    _formed: Tensor | None

    # results of operations are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _of(cls, batch: int, tokens: int, device: torch.device) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, (batch, 1, tokens, tokens), dtype=torch.bool, device=device)  # type: ignore[attr-defined]
        made._formed = None
        return made

    def holds_for(self, query: Tensor, key: Tensor) -> bool:
        """Whether its numbers describe a call completely: no code has computed with the mask, which may have changed it, and its shape fits the call."""
        lengths = (self.shape[0], self.shape[2])
        return self._formed is None and all((x.shape[0], x.shape[2]) == lengths for x in (query, key))

    def formed(self) -> Tensor:
        """The mask as a plain tensor, the same one at each call."""
        if self._formed is None:
            self._formed = self._form()
        return self._formed

    def _form(self) -> Tensor:
        raise NotImplementedError

    def _again(self, memo: dict[int, Any]) -> Self:
        """A mask with copies of the same numbers."""
        raise NotImplementedError

    def __dlpack__(self, **options: Any) -> Any:
        # torch would hand out the address of its memory, which is null
        return self.formed().__dlpack__(**options)

    def numpy(self, *, force: bool = False) -> Any:
        """As of a plain tensor; torch refuses that of subclasses, which have memory of their own."""
        return self.formed().numpy(force=force)

    def tolist(self) -> Any:
        """As of a plain tensor."""
        return self.formed().tolist()

    def share_memory_(self) -> Self:
        """Move the numbers of the mask to shared memory; the mask has no memory of its own."""
        for part in vars(self).values():
            if isinstance(part, Tensor):
                part.share_memory_()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = self._again(memo)
        # code that computed with it may have changed it
        made._formed = copy.deepcopy(self._formed, memo)
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(UnformedMask, UnformedMask.formed, (args, kwargs or {}))
        return func(*args, **kwargs)


def formed(mask: Tensor | None) -> Tensor | None:
    """`mask`, for kernels, which read memory: an `UnformedMask` has none before it is formed."""
    return mask.formed() if isinstance(mask, UnformedMask) else mask
