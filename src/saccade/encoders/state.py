"""The state that a graph has seen besides its inputs: everything whose changes a replay would not notice."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from saccade import native

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
_values, _address = methodcaller("values"), Tensor.data_ptr
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_MOST = 64  # states that are remembered; only a model that is changed again and again reaches it


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class State:
    """Reads the state of a model, as a number: the same for the same parameters at the same addresses, modes and switches.

    It is read at each call, so the modules are listed once, and again when one of them holds another part. C++ finds that nothing has changed since the
    last call; without it Python does, in 90 us for MiniLM on one machine and 310 on another.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.tensors: list[Tensor] = []
        self.parameters: list[Tensor] = []  # those that want a gradient, tied ones once
        self._parts: list[int] = []
        self._quick: tuple[Any, ...] | None = None
        self.watched = ""  # what a replay would pass by, in words; empty if there is nothing
        self._last: list[Any] = []
        self._number = self._count = 0
        self._known: dict[tuple, int] = {}
        self._others: set[str] = set()
        self._list()

    def _list(self) -> None:
        self._modules = list(self.model.modules())
        self._dicts = [d for m in self._modules for d in (m._parameters, m._buffers, m._modules)]
        self._owns = [m.__dict__ for m in self._modules]
        self._hooks = [
            hooks
            for m in self._modules
            if m is not self.model
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._dropouts = [m for m in self._modules if isinstance(m, nn.Dropout)]
        self._paths = [m for m in self._modules if isinstance(getattr(m, "drop_prob", None), float)]  # of timm and DINOv2
        self._adapters = [m for m in self._modules if hasattr(m, "_disable_adapters")]  # of peft
        # FSDP puts whole parameters in the place of its shards for the time of a call, and frees them before backward
        self._gathered = any("_is_fsdp_managed_module" in own for own in self._owns)
        self._checkpointed = [m for m in self._modules if hasattr(m, "gradient_checkpointing")]

    def read(self) -> int:
        """The number of the state as it is now."""
        if self._quick is None or self._quick != self._read_quickly():
            self._read_all()
            self._quick = self._read_quickly()  # of the modules as they are listed now
        return self._number

    def _read_quickly(self) -> tuple[Any, ...] | None:
        """All that a state depends on, which is the same only if the state is; None without C++."""
        if native.module is None:
            return None
        return native.module.state_of(self._dicts, self._hooks, self._owns), self._numbers()

    def _numbers(self) -> list[Any]:
        """The numbers that lie outside of the parts of the modules."""
        return [
            [m.p for m in self._dropouts] + [m.drop_prob for m in self._paths],
            [_switches(m) for m in self._adapters],
            [m.gradient_checkpointing for m in self._checkpointed],
            self.tensors[0].dtype,
            autocast_of(self.tensors[0].device),
            torch.are_deterministic_algorithms_enabled(),
        ]

    def _read_all(self) -> None:
        # without a loop in Python, which took twice the time of all the rest
        parts = [*map(id, chain.from_iterable(map(_values, self._dicts)))]
        if parts != self._parts:
            self._list()
            values = [*chain.from_iterable(map(_values, self._dicts))]
            self._parts = [*map(id, values)]
            self.tensors = [x for x in values if isinstance(x, Tensor)]
            # DTensors and quantised weights: what an operation of theirs launches is theirs to know
            self._others = {type(x).__name__ for x in self.tensors if type(x) not in _PLAIN}
        self.watched = self._watched()
        found = [
            [] if self._others else [*map(_address, self.tensors)],
            [*map(_requires_grad, self.tensors)],
            [*map(_training, self._modules)],
            *self._numbers(),
        ]
        if found != self._last:
            self.parameters = list({id(x): x for x in self.tensors if x.requires_grad}.values())
            key = tuple([tuple(x) if isinstance(x, list) else x for x in found])
            if key not in self._known:
                if len(self._known) >= _MOST:
                    self._known.clear()
                self._count += 1
            self._last, self._number = found, self._known.setdefault(key, self._count)

    def _watched(self) -> str:
        if self._others:
            return f"its parameters are of the type {', '.join(sorted(self._others))}"
        if self._gathered:
            return "FSDP gathers its parameters for each call, and frees memory that a replay would read"
        if any(self._hooks):
            return "a module inside of it has a hook, which a replay would not call"
        if any(m.gradient_checkpointing and m.training for m in self._checkpointed):
            return "gradient checkpointing computes layers again in backward"
        return ""


def _switches(module: nn.Module) -> tuple[Any, ...]:
    scaling = module.__dict__.get("scaling") or {}
    return (
        module._disable_adapters, str(getattr(module, "_active_adapter", "")), str(getattr(module, "merged_adapters", "")), *scaling.values()
    )  # fmt: skip
