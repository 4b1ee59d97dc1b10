"""The tensors that kernels may read: dense memory that torch's own operations read too. All others are refused by name.

Some subclasses of `torch.Tensor` have a meaning that is not in their memory: torch's causal biases never write theirs, and a masked tensor holds
two. Reading such memory would give a wrong result without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.errors import InvalidArgument

_PLAIN = (Tensor, torch.nn.Parameter)
# torch's own placeholders for plain tensors: while a program is traced, and for results that a collective has yet to deliver
_STAND_INS = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")


def check_kinds(**given: Any) -> None:
    """Raise for each tensor whose memory does not say what it means. Other checks handle arguments that are not tensors.

    Raises:
        InvalidArgument: a subclass of `torch.Tensor` with operations of its own, or a layout other than strided.
    """
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            continue
        if type(tensor) not in _PLAIN and brings_its_own(type(tensor)):
            raise InvalidArgument(
                f"{name} is a {type(tensor).__name__}, a subclass of torch.Tensor with operations of its own; it must be a plain torch.Tensor"
                + (f", such as {name}.to_local()" if hasattr(tensor, "device_mesh") else "")
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise InvalidArgument(f"{name} is {kind}; it must be a dense torch.Tensor")


def check_kinds_but_sharded(**given: Any) -> None:
    """`check_kinds` of what may be a DTensor, whose parts are checked later.

    Raises:
        InvalidArgument: as `check_kinds`.
    """
    check_kinds(**{name: x for name, x in given.items() if not hasattr(x, "device_mesh")})


def brings_its_own(kind: Any) -> bool:
    """Whether a subclass of `torch.Tensor` defines for itself what torch's operations do with it. torch's placeholder for a plain tensor does not."""
    if kind.__module__.startswith("torch.") and kind.__name__ in _STAND_INS:
        return False
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return True
    function = kind.__torch_function__
    return function is not torch._C._disabled_torch_function_impl and function.__func__ is not _DEFAULT


_DEFAULT = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
