"""Checks the values of `lengths`, and of other tensors of whole numbers, once per tensor: a check waits for the device, and the layers of a
model share the same few tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from saccade import native
from saccade.engine.arguments import check_length_values
from saccade.engine.calls import recordable, values_known

_MAX_TENSORS = 64
# keyed by identity, oldest first: the tensor, its version when it was checked (None if it has none), and for what
_CHECKED: dict[int, tuple[weakref.ref[Tensor], int | None, Hashable]] = {}


def checked_lengths(lengths: Tensor, kv_len: int, any_width: bool = False) -> Tensor:
    """`lengths` as contiguous int32 (unchanged with `any_width`), with values checked to lie in 0..Tk, unless they cannot be read
    yet (tracing, capture).

    On a CPU they are checked at each call. On another device a tensor is checked once for each version, as a check in each layer would wait for
    everything that was launched. One that was made under `torch.inference_mode` has no version; values written into it later are clamped to
    0..Tk.
    """
    if torch.compiler.is_compiling():
        return lengths.to(torch.int32).contiguous()
    if values_known(lengths):
        check_once(lengths, kv_len, lambda: check_length_values(lengths, kv_len))
        if native.calls is not None and lengths.is_cuda:
            native.calls.checked(lengths, kv_len)
    return recordable(lengths if any_width else lengths.to(torch.int32).contiguous())


def check_once(tensor: Tensor, about: Hashable, check: Callable[[], None]) -> None:
    """Run `check`, which may raise, unless it has run for this tensor on a GPU, at this version and with the same `about`."""
    version = None if tensor.is_inference() else tensor._version
    seen = _CHECKED.get(id(tensor))
    known = seen is not None and seen[0]() is tensor and seen[1:] == (version, about)
    # on a CPU a check does not wait, and numpy may change values without a new version
    if not known or tensor.device.type == "cpu":
        check()
        _remember(tensor, version, about)


def _remember(tensor: Tensor, version: int | None, about: Hashable) -> None:
    """A freed tensor removes its own entry, so a full table drops the oldest live one.

    A loop over the dictionary must not run Python or allocate collected objects: either lets another thread add to it.
    """
    number = id(tensor)
    _CHECKED.pop(number, None)
    if len(_CHECKED) >= _MAX_TENSORS:
        for oldest in list(_CHECKED)[:1]:
            _CHECKED.pop(oldest, None)
    checked = _CHECKED  # at the end of a process the module's names are gone before its last tensors

    def forget(_: object) -> None:
        checked.pop(number, None)

    _CHECKED[number] = (weakref.ref(tensor, forget), version, about)
