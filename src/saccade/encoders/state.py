"""The state that a graph has seen besides its inputs, whose changes a replay would not notice.

Numbers that modules keep in Python, such as the `eps` of a norm, are not among it.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from saccade import native
from saccade.engine import prepare

_requires_grad, _dtype, _values = attrgetter("requires_grad"), attrgetter("dtype"), methodcaller("values")
_address, _stride, _numel = Tensor.data_ptr, Tensor.stride, Tensor.numel
# modules whose forward reads their parameters and their input alone
_SIMPLE = frozenset((nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv2d, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Identity))
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
# hooks that every module of the process calls
_GLOBAL_HOOKS = [getattr(modules, f"_global_{name}_hooks") for name in ("forward", "forward_pre", "backward", "backward_pre")]
# what products of float32 are computed in; the public names of the same take seven times as long to read
_precision, _PRECISIONS = torch._C._get_fp32_precision_getter, (("cuda", "matmul"), ("cuda", "conv"), ("generic", "all"))  # type: ignore[attr-defined]
# parts of others in a model, in words; they know a padded batch alone
_HOOK = "a module inside of it has a hook, which a replay would not call"
_FORWARD = "a module inside of it has a forward of its own, which a replay would not call"
_MOST = 64  # states that are remembered; only a model that is changed again and again reaches it


def autocast_of(kind: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of device, None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class State:
    """Reads the state of a model, as a number: the same for the same parameters at the same addresses, modes and switches.

    It is read at each call, so the modules are listed once, and again when one of them holds another part. C++ finds that nothing has changed since the
    last call. Without C++, Python does, in 90 us for MiniLM on one machine and 310 on another.

    Attributes:
        modules: of the model, as they were at the last read.
        changes: counts the reads that may have found a change, of the config too. Facts that are worked out from the model hold until it rises.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.tensors: list[Tensor] = []
        self.parameters: list[Tensor] = []  # those that want a gradient, tied ones once
        self.watched = ""  # what a replay would pass by, in words; empty if there is nothing
        self.recomputes = False  # whether backward calls layers again
        self.changes = 0
        self._parts: list[int] = []
        self._quick: tuple[bytes, list[Any]] | None = None
        self._places: Any = None  # of the tensors, as C++ knows them
        self._held: list[Any] = []  # the objects whose addresses `_quick` holds: no other object gets such an address
        self._last: list[Any] = []
        self._ties: list[int] = []  # by tensor: the first place of the same one
        self._number = self._count = 0
        self._known: dict[tuple, int] = {}
        self._others: set[str] = set()
        self._kind = "cpu"
        self._list()

    def _list(self) -> None:
        self.modules = list(self.model.modules())
        # of most modules the parameters alone matter: neither their mode nor a part that they are given changes what they compute
        others = [m for m in self.modules if type(m) not in _SIMPLE]
        self._dicts = [m._parameters for m in self.modules] + [d for m in others for d in (m._buffers, m._modules)]
        # a graph looks up rows in these
        above = [m for m in self.modules if any(isinstance(x, nn.Embedding) for x in m.modules())]
        self._to_tables = [d for m in above for d in (m._parameters, m._modules)]
        self._owns = [m.__dict__ for m in others]
        self._hooks = _GLOBAL_HOOKS + [
            hooks
            for m in self.modules
            if m is not self.model
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        paths = [m for m in self.modules if isinstance(getattr(m, "drop_prob", None), float)]  # of timm and DINOv2
        self._adapters = [m for m in self.modules if hasattr(m, "_disable_adapters")]  # of peft
        # FSDP puts whole parameters in the place of its shards for the time of a call, and frees them before backward
        self._gathered = any("_is_fsdp_managed_module" in own for own in self._owns)
        # torch's own wrapper of a layer, which accelerate puts there with FSDP
        self._wrapped = any(type(m).__name__ == "CheckpointWrapper" for m in self.modules)
        self._checkpointed = [m for m in self.modules if hasattr(m, "gradient_checkpointing")]
        self._marks = [
            *[(m.__dict__, "p") for m in self.modules if isinstance(m, nn.Dropout)],
            *[(m.__dict__, "drop_prob") for m in paths],
            *[(m.__dict__, "gradient_checkpointing") for m in self._checkpointed],
        ]
        self._forwards = [(m.__dict__, "forward") for m in self.modules if m is not self.model]
        own = self.model.__dict__
        # the graphs of a state do not depend on these, but the calls that are captured do
        self._choices = [(own, "config"), (own, "grad_checkpointing"), *self._forwards]

    @property
    def seen(self) -> str:
        """The part of somebody else that a batch reaches, as the state was last read; empty if there is none."""
        return self.watched if self.watched in (_HOOK, _FORWARD) else ""

    def read(self) -> int:
        """The number of the state as it is now."""
        if not self._is_quick():
            self._read_all()
            self._keep()
            self.changes += 1
        return self._number

    def may_hold(self) -> bool:
        """Whether a graph of the last state may run before `read` says that nothing has changed. False without C++.

        A replay then reads no memory that was freed, and the frequent changes are ruled out. Tables of embeddings are the same: an id that only a larger
        table has would end the process's use of its GPU.
        """
        if self._places is None or self._quick is None or native.module is None or self.tensors[0].device.type != self._kind:
            return False
        tables, walked = self._tables
        return (
            self._quick[1] == self._numbers()
            and native.module.hold(self._places)
            and native.module.is_state(tables, False, *walked)
        )

    def _is_quick(self) -> bool:
        """Whether nothing on which the state depends has changed, as far as C++ can tell; False without C++."""
        if native.module is None or self._quick is None:
            return False
        kept, numbers = self._quick
        return numbers == self._numbers() and native.module.is_state(kept, torch.is_grad_enabled(), *self._walked)

    def _keep(self) -> None:
        """Note the state for the next read."""
        self._quick = self._places = None
        if native.module is None:
            if self._kind == "cuda":
                native.start(prepare.forget)
            return
        config = getattr(self.model.__dict__.get("config"), "__dict__", {})
        marks = [*self._marks, *self._choices]
        dicts = [*self._dicts, config]
        every = {id(x): x for x in [*dicts, *self._owns, *[own for own, _ in marks]]}
        self._walked = dicts, self._hooks, self._owns, marks, [*every.values()]
        self._held = [*config.values(), *[own.get(name) for own, name in marks]]
        self._quick = native.module.state_of(*self._walked), self._numbers()
        walked: tuple[list[Any], ...] = self._to_tables, [], [], [], self._to_tables
        self._tables = native.module.state_of(*walked), walked
        # a replay that is dropped must not have drawn random numbers
        draws = any(own.get("training") for own in self._owns)
        self._places = None if self.watched or draws else native.module.places_of(self.tensors)

    def _numbers(self) -> list[Any]:
        """The numbers that lie outside of the modules' attributes."""
        return [
            autocast_of(self._kind),
            torch.are_deterministic_algorithms_enabled(),
            *[_precision(*x) for x in _PRECISIONS],
            self.model.training,
            *([_switches(m) for m in self._adapters] if self._adapters else ()),
        ]

    def _read_all(self) -> None:
        # without a loop in Python, which took twice the time of all the rest
        parts = [*map(id, chain.from_iterable(map(_values, self._dicts)))]
        if parts != self._parts:
            self._list()
            values = [*chain.from_iterable(map(_values, self._dicts))]
            self._parts = [*map(id, values)]
            self.tensors = [x for x in values if isinstance(x, Tensor)]
            # other parameters may lie at the same addresses, and tied ones be apart
            self._last, first = [], dict[int, int]()
            self._ties = [first.setdefault(id(x), i) for i, x in enumerate(self.tensors)]
            # DTensors and quantised weights: what an operation of theirs launches is theirs to know
            self._others = {type(x).__name__ for x in self.tensors if type(x) not in _PLAIN}
        self._kind = self.tensors[0].device.type
        self.recomputes = self._wrapped or any(m.gradient_checkpointing and m.training for m in self._checkpointed)
        self.watched = self._watched()
        plain = [] if self._others else self.tensors
        found = [
            [*map(_address, plain)],
            [*map(_dtype, plain)],
            [*map(_numel, plain)],
            [*map(_stride, plain)],
            [*map(_requires_grad, self.tensors)],
            self._ties,
            [own.get("training") for own in self._owns],
            [own.get(name) for own, name in self._marks],
            self._numbers(),
        ]
        if found != self._last:
            self.parameters = list({id(x): x for x in self.tensors if x.requires_grad}.values())
            key = tuple([tuple(x) for x in found])
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
        if not all(map(_is_asleep, chain.from_iterable(map(_values, self._hooks)))):
            return _HOOK
        if any("forward" in own for own, _ in self._forwards):
            return _FORWARD
        if self.recomputes:
            return "gradient checkpointing computes layers again in backward"
        return ""


def _is_asleep(hook: Any) -> bool:
    """Whether a hook is one that transformers adds at the first call that asks for hidden states or attentions, and never removes.

    It does nothing in other calls, and such a call runs as stock.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _switches(module: nn.Module) -> tuple[Any, ...]:
    scaling = module.__dict__.get("scaling") or {}
    return (
        module._disable_adapters, str(getattr(module, "_active_adapter", "")), str(getattr(module, "merged_adapters", "")), *scaling.values()
    )  # fmt: skip
