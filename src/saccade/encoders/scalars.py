"""Numbers of the host on their way to a GPU, which a capture does not let pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Scalars(TorchDispatchMode):
    """Makes a number on the device in place of copying it there, as DeBERTa-v2 does with a bound of its buckets. Such a copy waits for the device,
    which ends a capture. The number itself depends on nothing that a replay changes: what comes from the device cannot be read during a capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and torch.device(device).type != "cpu":
            x = args[0]
            if x.dim() == 0 and x.device.type == "cpu":
                return torch.full((), x.item(), dtype=kwargs.get("dtype") or x.dtype, device=device)
        return func(*args, **kwargs)
