"""Tensors that a model makes on the host and copies to a GPU, which a capture does not let pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Constants(TorchDispatchMode):
    """Gives a capture what earlier runs of the same code have copied from the host: the positions of MPNet, a bound of DeBERTa-v2's buckets.

    A copy from pageable memory waits for the device, which ends a capture. The tensor depends on nothing that a replay changes: what comes from the
    device cannot be read on the host during a capture. The object keeps the copies, and lives as long as the graph that reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: list[tuple[Tensor, Tensor]] = []  # (on the host, on the device)

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
