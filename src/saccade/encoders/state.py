"""What a graph has seen besides its inputs: everything that a replay would not notice when it changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class State:
    """Reads the state of a model, as a key for its graphs."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._modules: list[nn.Module] = []

    def tensors(self) -> list[Tensor]:
        """Every parameter and buffer, as the modules hold them now."""
        self._modules = list(self.model.modules())
        return [x for m in self._modules for d in (m._parameters, m._buffers) for x in d.values() if x is not None]

    def key(self, tensors: list[Tensor]) -> tuple:
        """Addresses, dtypes and flags of tensors; of each module whether it trains, its dropout, and the switches of adapters."""
        device = tensors[0].device
        return (
            tuple([x.data_ptr() for x in tensors]),
            tuple([x.requires_grad for x in tensors]),
            tensors[0].dtype,
            autocast_of(device),
            torch.are_deterministic_algorithms_enabled(),
            tuple([m.training for m in self._modules]),
            tuple([x for m in self._modules for x in _switches(m)]),
            getattr(getattr(self.model, "config", None), "_attn_implementation", None),
        )

    def watched(self) -> str:
        """The first module inside of the model that somebody looks into by a hook, in words; empty if there is none."""
        for m in self._modules:
            hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
            if m is not self.model and hooks:
                return f"{type(m).__name__} has a hook, which a replay would not call"
            if getattr(m, "gradient_checkpointing", False) and m.training:
                return "gradient checkpointing computes layers again in backward"
        return ""


def _switches(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, nn.Dropout):
        return (module.p,)
    if hasattr(module, "_disable_adapters"):  # a layer of peft
        scaling = module.__dict__.get("scaling") or {}
        return (
            module._disable_adapters,
            str(getattr(module, "_active_adapter", "")),
            str(getattr(module, "merged_adapters", "")),
            *scaling.values(),
        )
    return ()
