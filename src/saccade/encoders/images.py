"""Models whose batch has a fixed shape behind its first dimension: towers of images, and the text towers beside them. Captured by batch size."""

from __future__ import annotations

import operator
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.encoders import base, graphs
from saccade.encoders.base import OF_LOSSES, Encoder
from saccade.encoders.capacity import ROWS, rows_captured
from saccade.encoders.plans import Build, Plan, builder, signature
from saccade.errors import InvalidArgument

MASK = "attention_mask"
NO_GPU = "CUDA graphs need a GPU"
_CHANGED = "the model has changed since the last call"
_MOST_PLANS = 64  # signatures of calls that are remembered
_TOKENS = 128  # tokens that an image counts as
_MOST_FORMS = 16  # shapes behind the batch for which graphs are made; each has graphs of its own
_ASKED = {"output_attentions", "output_hidden_states"}


class Tower(NamedTuple):
    """The tensor that a batch must have, and others that it may have."""

    main: str
    others: tuple[str, ...] = ()


_PIXELS, _IDS = Tower("pixel_values"), Tower("input_ids", (MASK, "position_ids"))
# `model_type` of a config -> tower. Others may mix the images of a batch
TOWERS: dict[str, Tower] = {
    **dict.fromkeys(("vit", "clip_vision_model", "siglip_vision_model", "dinov2"), _PIXELS),
    **dict.fromkeys(("clip_text_model", "siglip_text_model"), _IDS),
}
TIMM = Tower("x")
Form = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # by tensor: its name, its shape behind the batch, its dtype


def tower_of(model: nn.Module) -> Tower | None:
    """How a model's batches are captured; None if it is no known tower."""
    timm = sys.modules.get("timm.models.vision_transformer")
    if timm is not None and type(model) is timm.VisionTransformer:
        return TIMM
    return TOWERS.get(getattr(getattr(model, "config", None), "model_type", ""))


def why_not(model: nn.Module) -> str:
    """Why a known tower cannot be captured by batch size; empty if it can."""
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return "it has batch normalisation, which would count the padding of a batch"
    return ""


class Rows:
    """The memory from which a graph reads a batch of up to `capacity` rows. Rows behind the batch are 0, and their mask is 1. If attention saw
    nothing of a row, the row might give NaN, which would spread to the gradients."""

    def __init__(self, capacity: int, form: Form, device: torch.device):
        self.capacity = capacity
        self.used = 0  # rows that a batch has written
        self.sent = graphs.Sent(device)
        with torch.inference_mode(False):
            self.tensors = {
                name: torch.full((capacity, *shape), int(name == MASK), dtype=dtype, device=device) for name, shape, dtype in form
            }

    def load(self, batch: dict[str, Tensor], stream: Any = None) -> None:
        """Copy a batch there, on the current stream. A batch on the host may be changed after `sent.wait()`."""
        before, rows = self.used, next(iter(batch.values())).shape[0]
        self.used, on_host = max(before, rows), False
        for name, x in batch.items():
            memory = self.tensors[name]
            (memory if rows == self.capacity else memory[:rows]).copy_(x, non_blocking=True)
            on_host = on_host or not x.is_cuda
            if rows < before:
                memory[rows:before].fill_(int(name == MASK))
        self.used = rows
        if on_host:
            self.sent.record(stream)


class Batched(Encoder):
    """A tower whose forward is replayed from a graph of the next batch size."""

    fallback = "it runs as stock"

    def __init__(self, model: Any, share: float, tower: Tower, fuse: bool = False):
        super().__init__(model, share, fuse)
        self.tower = tower
        if tower is TIMM:
            self.attention = ""
        self.channels = getattr(getattr(model, "config", None), "num_channels", None)
        self._forms: dict[Form, None] = {}
        self._made: dict[int, tuple[Build, list[str]]] = {}  # by state: what builds the output, and the names of its tensors
        self._state = 0
        self._plans: dict[tuple, Plan] = {}
        self._changes = -1  # of the state for which plans were made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, reason = self._bound(args, kwargs)
        reason = reason or self._refused()
        if not reason:
            with self.lock:
                outputs, reason = self._run(given)
            if not reason:
                return outputs
        self.last = f"stock: {reason}"
        return self.as_stock(*args, **kwargs)

    # --- what is refused

    def _refused(self) -> str:
        # a model with graphs is on a GPU, or was at its last call; its plan checks that
        if not self.graphs and not base.has_graphs(self.model_device()):
            return NO_GPU
        return self.failed

    def refused_arguments(self, given: dict[str, Any]) -> str:
        """Why a call with these arguments is not captured; empty if it is."""
        main, names = self.tower.main, (self.tower.main, *self.tower.others)
        x = given.get(main)
        pixels = self.tower.others == ()
        if not isinstance(x, Tensor) or x.dim() != (4 if pixels else 2) or x.numel() == 0 or x.is_floating_point() != pixels:
            return f"it has no {main} `{'[B, C, H, W]' if pixels else '[B, T]'}`"
        if pixels and self.channels not in (None, x.shape[1]):
            return f"{main} have {x.shape[1]} channels and the model has {self.channels}"
        for name, value in given.items():
            if (
                name in names
                or name in ("return_dict", OF_LOSSES, "is_causal" if pixels else "")
                or value is None
                or value is False
            ):
                continue
            return f"{name} is asked for" if name in _ASKED else f"{name} is given"
        if given.get("is_causal"):
            return "is_causal is asked for"
        for name in self.tower.others:
            y = given.get(name)
            if y is not None and (not isinstance(y, Tensor) or y.shape != x.shape or y.device != x.device):
                return f"{name} is no `[B, T]` beside {main}"
        if torch.is_grad_enabled() and x.requires_grad:
            return f"a gradient of {main} is wanted, and a graph gives those of the parameters"
        if x.shape[0] > ROWS:
            return f"a batch of {x.shape[0]} keeps the GPU busy; graphs end at {ROWS} rows"
        return ""

    def _refused_model(self) -> str:
        config = getattr(self.model, "config", None)
        if getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
            return "the config asks for attentions or hidden states"
        implementation = getattr(config, "_attn_implementation", "")
        if self.attention and implementation != self.attention:
            return f"its attention is {implementation!r} now"
        if self.model.training and getattr(self.model, "grad_checkpointing", False):
            return "gradient checkpointing computes layers again in backward"
        return ""

    def model_device(self) -> torch.device:
        """The device of the model, which is that of its first parameter."""
        return next(self.model.parameters()).device

    # --- a batch

    def _run(self, given: dict[str, Any]) -> tuple[Any, str]:
        """(what the model's own forward returns, why there is nothing)."""
        key = signature(given, OF_LOSSES)
        plan = None if key is None else self._plans.get(key)
        # a replay takes longer than reading the state, so it is launched first, and discarded if the state has changed
        if (
            plan is not None
            and not plan.reason
            and not plan.trains
            and self._changes == self.state.changes
            and self.state.may_hold()
        ):
            outputs, reason = self._replayed(plan, given, early=True)
            if reason is not _CHANGED:
                return outputs, reason
        self._state = self.state.read()
        plan = self._planned(key, given)
        if not plan.reason and self.fusion is not None:
            self._state = self.fused_state(partial(self._example, plan.size[1]), self._state)
            plan = self._planned(key, given)  # another one, if parameters have moved
        return (None, plan.reason) if plan.reason else self._replayed(plan, given)

    def _planned(self, key: tuple | None, given: dict[str, Any]) -> Plan:
        """How a call with these arguments runs, worked out once for a signature while the model stays as it is."""
        if self._changes != self.state.changes:
            self._changes = self.state.changes
            self._plans.clear()
        plan = None if key is None else self._plans.get(key)
        if plan is None:
            plan = self._plan(given)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            if key is not None:
                self._plans[key] = plan
        return plan

    def _plan(self, given: dict[str, Any]) -> Plan:
        reason = self.refused_arguments(given) or self._refused_model()
        if reason:
            return Plan(reason)
        names = tuple([name for name in (self.tower.main, *self.tower.others) if given.get(name) is not None])
        batch = {name: given[name] for name in names}
        x, first = batch[self.tower.main], self.state.tensors[0]
        if not base.has_graphs(first.device):
            return Plan(NO_GPU)
        if x.is_cuda and x.device != first.device:
            return Plan(f"{self.tower.main} lie on {x.device} and the model on {first.device}")
        if self.tower is TIMM and not torch.is_autocast_enabled("cuda") and x.dtype != first.dtype:
            return Plan(f"x is {x.dtype} and the model {first.dtype}")
        if self.state.watched:
            return Plan(self.state.watched)
        form = self.form(batch)
        if not self._known(form):
            return Plan(f"it has seen {_MOST_FORMS} other shapes; a new one is not captured")
        reason = self.unfit(batch)
        if reason:
            return Plan(reason)
        return_dict = given.get("return_dict")
        wanted = getattr(getattr(self.model, "config", None), "return_dict", True) if return_dict is None else return_dict
        trains = torch.is_grad_enabled() and bool(self.state.parameters)
        return Plan("", names, (rows_captured(x.shape[0]), form), trains, not wanted)

    def _replayed(self, plan: Plan, given: dict[str, Any], early: bool = False) -> tuple[Any, str]:
        """As `_run`. early: the state is read once the graph is launched."""
        batch = {name: given[name] for name in plan.names}
        gpu = self._graphs_on(self.state.tensors[0].device)
        graph = gpu.known(self._state, plan.size) if early else gpu.graph(self._state, plan.size, plan.trains)
        if graph is None:
            return None, _CHANGED if early else self.failed or "every captured forward waits for its backward"
        stream = gpu.turns.take(gpu.device)
        found = graph(batch, stream, self.state.parameters) if plan.trains else graph(batch, stream)
        if early and self._has_changed():
            return None, _CHANGED
        self.last = f"captured: {batch[self.tower.main].shape[0]} rows in a graph of {graph.inputs.capacity}"
        build, names = self._made[self._state]
        outputs = build(self.cut(found, names, batch))
        graph.inputs.sent.wait()
        return outputs.to_tuple() if plan.is_tuple and hasattr(outputs, "to_tuple") else outputs, ""

    def _has_changed(self) -> bool:
        """Whether the model is no longer the one for which plans were made."""
        self.state.read()
        return self._changes != self.state.changes

    def form(self, batch: dict[str, Tensor]) -> Form:
        """The facts besides the number of its rows on which the graph of a batch depends."""
        return form_of(batch)

    def unfit(self, batch: dict[str, Tensor]) -> str:
        """Why a batch cannot be filled up; empty if it can."""
        return ""

    def cut(self, outputs: list[Tensor], names: list[str], batch: dict[str, Tensor]) -> list[Tensor]:
        """The part of the outputs that belongs to the batch, in memory of its own: the next replay overwrites that of this one."""
        rows = batch[self.tower.main].shape[0]
        return [y.clone() if rows == y.shape[0] else y[:rows].clone() for y in outputs]

    def _known(self, form: Form) -> bool:
        """Whether graphs of a form are made."""
        if form not in self._forms and len(self._forms) < _MOST_FORMS:
            self._forms[form] = None
        return form in self._forms

    # --- for graphs and the handle

    def inputs(self, size: tuple[int, Form], device: torch.device) -> Rows:
        """The memory of a batch size and a form."""
        return Rows(*size, device)

    def outputs(self, inputs: Rows) -> tuple[Tensor, ...]:
        """The tensors that the model's own forward returns."""
        with self.fused():
            return self._run_stock(inputs)

    def _example(self, form: Form, tokens: int) -> tuple[Tensor, ...]:
        return self._run_stock(Rows(tokens // _TOKENS, form, self.state.tensors[0].device))

    def _run_stock(self, inputs: Rows) -> tuple[Tensor, ...]:
        if self.tower is TIMM:
            self._made[self._state] = operator.itemgetter(0), []
            return (self.stock(inputs.tensors["x"]),)
        found = self.stock(**inputs.tensors, return_dict=True)
        names = [name for name, x in found.items() if x is not None]
        if not all(isinstance(found[name], Tensor) for name in names):
            raise RuntimeError(f"{type(self.model).__name__} returns more than tensors: {', '.join(names)}")
        self._made[self._state] = builder(type(found), names), names
        return tuple([found[name] for name in names])

    def describe(self) -> str:
        """How it is computed, for `explain`."""
        if not base.has_graphs(self.model_device()):
            return f"stock: {NO_GPU}"
        if self.failed:
            return f"stock: {self.failed}"
        fused = f"; {self.fusion.describe()}" if self.fusion is not None else ""
        return f"padded to the next batch size, replayed from CUDA graphs{fused}"

    def prepare_rows(self, rows: int, train: bool) -> None:
        """Capture the batch size of so many images, of the size and dtype of the model."""
        if rows > ROWS:
            raise InvalidArgument(f"images is {rows}; graphs end at {ROWS} images")
        side = getattr(getattr(self.model, "config", None), "image_size", None)
        if side is None or not base.has_graphs(self.model_device()):
            return
        with self.lock:
            first = next(self.model.parameters())
            height, width = (side, side) if isinstance(side, int) else side
            form = (("pixel_values", (int(self.channels or 3), height, width), first.dtype),)
            if self._known(form):
                self._state = self.fused_state(partial(self._example, form))
                self._graphs_on(first.device).make(self._state, (rows_captured(rows), form), train)


def form_of(batch: dict[str, Tensor]) -> Form:
    """The facts that two batches of one graph have in common."""
    return tuple([(name, tuple(x.shape[1:]), x.dtype) for name, x in batch.items()])
