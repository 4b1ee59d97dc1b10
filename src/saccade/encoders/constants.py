"""Tensors that a model makes on the host and copies to a GPU, which a capture forbids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_MAKERS = (torch.tensor, torch.as_tensor)


class _Numbers(TorchFunctionMode):
    """Makes `torch.tensor(0.0, device="cuda")` create its tensor on the host first: no `TorchDispatchMode` sees the copy inside it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func not in _MAKERS or device is None or torch.device(device).type == "cpu" or isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(device)


class Constants(TorchDispatchMode):
    """Gives a capture what earlier runs of the same code have copied from the host: the positions of MPNet, a bound of DeBERTa-v2's buckets.

    A copy from pageable memory waits for the device, which ends a capture. No replay changes the tensor, because a capture lets the host read nothing
    from the device. The object keeps the copies, and lives as long as the graph that reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: list[tuple[Tensor, Tensor]] = []  # (on the host, on the device)
        self._numbers = _Numbers()

    def __enter__(self) -> Constants:
        self._numbers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is not torch.ops.aten._to_copy.default or device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        x = args[0]
        if x.device.type != "cpu":
            return func(*args, **kwargs)
        if x.dim() == 0:
            return torch.full((), x.item(), dtype=kwargs.get("dtype") or x.dtype, device=device)
        known = self._find(x, kwargs)
        if known is not None:
            return known.clone()
        found = func(*args, **kwargs)
        self._known.append((x.clone(), found.clone()))
        return found

    def _find(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        dtype = kwargs.get("dtype") or x.dtype
        for host, there in self._known:
            if (host.dtype, there.dtype, there.device) == (x.dtype, dtype, torch.device(kwargs["device"])) and torch.equal(
                host, x
            ):
                return there
        return None
