"""Text models that cannot be packed: captured as they are, padded, by batch size and width."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.encoders import base, families, images
from saccade.encoders.capacity import columns_captured, rows_captured
from saccade.encoders.constants import Constants
from saccade.encoders.images import MASK, Batched, Form, Tower
from saccade.encoders.plans import Plan, builder
from saccade.engine.calls import read_later

_IDS = "input_ids"
_TEXT = Tower(_IDS, (MASK, "token_type_ids", "position_ids"))
_MOST_TOKENS = 2**15  # padded tokens of a batch; a larger one keeps the GPU busy
_PROBED_ROWS = 3
_LEFT = "a row starts with a masked token, so it is padded on the left or empty, and columns are added on the right alone"


def why_not(model: Any) -> str:
    """Why a text model that is not packed cannot be captured padded either; empty if it can."""
    config, taken = getattr(model, "config", None), inspect.signature(model.forward).parameters
    name, kind = type(model).__name__, getattr(config, "model_type", "")
    if _IDS not in taken or MASK not in taken:
        return f"the forward of {name} takes no input_ids and attention_mask"
    if "decoder_input_ids" in taken or getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return f"{name} has a decoder or cross attention"
    # if the forward of an encoder takes a cache, its config says that it is no decoder
    keeps = "use_cache" in taken and getattr(config, "use_cache", False) and not hasattr(config, "is_decoder")
    if keeps or (kind in families.FAMILIES and families.FAMILIES[kind].causal):
        return f"{name} keeps a cache, as models that generate do"
    if families.grows(config):
        return "its rotary embedding depends on the longest sequence of the calls so far"
    return images.why_not(model)


class Table(images.Rows):
    """The memory from which a graph reads a batch of up to `capacity` rows and `form`'s width. Added tokens are padding of mask 0. The first
    token of each added row has mask 1, as a row of which attention sees nothing may give NaN."""

    def __init__(self, capacity: int, form: Form, device: torch.device, padding: int):
        self.padding, self.constants = padding, Constants()
        super().__init__(capacity, form, device)
        self.used = capacity  # no row is filler yet
        self.load({name: x[:0] for name, x in self.tensors.items()})

    def load(self, batch: dict[str, Tensor], stream: Any = None) -> None:
        """Bring a batch, on the current stream."""
        before, (rows, columns) = self.used, batch[_IDS].shape
        self.used, on_host = max(before, rows), False
        for name, x in batch.items():
            memory = self.tensors[name]
            filler = self.padding if name == _IDS else 0
            whole = rows == self.capacity and columns == memory.shape[1]
            (memory if whole else memory[:rows, :columns]).copy_(x, non_blocking=True)
            on_host = on_host or not x.is_cuda
            if columns < memory.shape[1]:
                memory[:rows, columns:].fill_(filler)
            if rows < before:
                memory[rows:before].fill_(filler)
                if name == MASK:
                    memory[rows:before, 0].fill_(1)
        self.used = rows
        if on_host:
            self.sent.record(stream)


class _Probed(NamedTuple):
    """The result of probing a batch that was filled up. why_not: why no batch is filled up. columns: the dimensions of each output that follow the width."""

    why_not: str
    columns: dict[str, list[int]]


class Padded(Batched):
    """A text model whose forward is replayed from a graph of the next batch size and width. not_packed: why it is not packed."""

    def __init__(self, model: Any, share: float, not_packed: str):
        taken = inspect.signature(model.forward).parameters
        others = tuple([name for name in _TEXT.others if name in taken])
        super().__init__(model, share, Tower(_IDS, others))
        self.attention = ""  # its own attention: only the model knows what it adds to the scores
        self.not_packed = not_packed
        self.padding = int(getattr(model.config, "pad_token_id", None) or 0)
        self.implementation = getattr(model.config, "_attn_implementation", None)
        self._probed: _Probed | None = None
        every = [x.kind is inspect.Parameter.VAR_KEYWORD for x in taken.values()]
        self._options = {"return_dict": True} if "return_dict" in taken or any(every) else {}

    # --- what is refused

    def refused_arguments(self, given: dict[str, Any]) -> str:
        """Why a call with these arguments is not captured; empty if it is."""
        reason = super().refused_arguments(given)
        if reason:
            return reason
        rows, columns = given[_IDS].shape
        most = self._positions()
        if most is not None and columns > most:
            return f"input_ids have {columns} tokens a row, and the positions end at {most}"
        if rows_captured(rows) * columns > _MOST_TOKENS:
            return f"a batch of {rows} rows of {columns} tokens keeps the GPU busy; graphs end at {_MOST_TOKENS} tokens"
        return ""

    def _refused_model(self) -> str:
        now = getattr(self.model.config, "_attn_implementation", None)
        if now != self.implementation:
            return f"its attention was {self.implementation!r} and is {now!r} now"
        return super()._refused_model()

    def _positions(self) -> int | None:
        """How many positions the model has; None if there is no limit."""
        most = getattr(self.model.config, "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else None

    def _widest(self) -> int | None:
        """The width up to which columns may be added. A model that counts positions begins behind the number of its padding token."""
        most = self._positions()
        return most - self.padding - 1 if most is not None and self.padding + 1 < most else most

    # --- a batch

    def form(self, batch: dict[str, Tensor]) -> Form:
        """Its tensors at the next width; without a mask nothing can be hidden, so the width is its own."""
        width, most = batch[_IDS].shape[1], self._widest()
        if MASK in batch and (most is None or width < most):
            width = columns_captured(width) if most is None else min(columns_captured(width), most)
        return tuple([(name, (width,), x.dtype) for name, x in batch.items()])

    def _replayed(self, plan: Plan, given: dict[str, Any], early: bool = False) -> tuple[Any, str]:
        waiting = None
        if MASK in plan.names and plan.size[1][0][1] != given[_IDS].shape[1:]:
            left = (given[MASK][:, 0] == 0).any()
            if left.is_cuda:
                waiting = read_later(left)
            elif left:
                return None, _LEFT
        outputs, reason = super()._replayed(plan, given, early)
        return (None, _LEFT) if waiting is not None and waiting() else (outputs, reason)

    def unfit(self, batch: dict[str, Tensor]) -> str:
        """Why a batch cannot be filled up; found from the first one."""
        if self._probed is None:
            self._probed = self.probe(batch)
            if self._probed.why_not:
                self.say(f"{type(self.model).__name__}: {self._probed.why_not}; {self.fallback}")
        return self._probed.why_not

    def cut(self, outputs: list[Tensor], names: list[str], batch: dict[str, Tensor]) -> list[Tensor]:
        """The part of the outputs that belongs to the batch, in memory of its own."""
        rows, columns = batch[_IDS].shape
        assert self._probed is not None, "the first batch was probed"
        found = []
        for y, name in zip(outputs, names, strict=True):
            y = y[:rows]
            for dim in self._probed.columns[name]:
                y = y.narrow(dim, 0, columns)
            found.append(y.clone(memory_format=torch.contiguous_format))
        return found

    # --- whether padding leaves the outputs unchanged

    def probe(self, batch: dict[str, Tensor]) -> _Probed:
        """Compute a part of a batch three times: alone, filled up, and filled up with other tokens of mask 0. The outputs must be the same.

        No model is known by name here. A convolution over tokens, or a mean over columns, would read the padding.
        """
        try:
            with self._at_rest():
                return self._compared(batch)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return _Probed(f"a batch that is filled up fails ({' '.join(str(error).split())[:200]})", {})

    def _compared(self, batch: dict[str, Tensor]) -> _Probed:
        device, most = self.model_device(), self._widest()
        columns = batch[_IDS].shape[1] if most is None else min(batch[_IDS].shape[1], most - 2)
        width = columns_captured(columns + 1) if most is None else min(columns_captured(columns + 1), most - 1)
        if columns < 1 or width <= columns:
            return _Probed(f"its positions end at {most}", {})
        part = {name: x[:_PROBED_ROWS, :columns].to(device) for name, x in batch.items()}
        ids = part[_IDS]
        part[MASK] = part[MASK].clone() if MASK in part else torch.ones_like(ids)
        part[MASK][:, 0] = 1
        rows = ids.shape[0]
        table = Table(rows_captured(rows + 1), tuple([(n, (width,), x.dtype) for n, x in part.items()]), device, self.padding)
        table.load(part)
        alone, filled = self._named_outputs(part)[1], self._named_outputs(table.tensors)[1]
        other = torch.where(ids.amax() == self.padding, ids.amin(), ids.amax())
        table.tensors[_IDS][rows:] = other
        table.tensors[_IDS][:rows, columns:] = other
        changed = self._named_outputs(table.tensors)[1]
        dims = {name: follows(x, filled[name], columns, width) for name, x in alone.items()}
        real = part[MASK] != 0
        for name, x in alone.items():
            if dims[name] is None:
                return _Probed(f"its output {name} has the shape {list(x.shape)}, which does not follow the width", {})
            three = [_real(y, dims[name] or [], rows, columns, real) for y in (x, filled[name], changed[name])]
            if not near(three[1], three[2], exact=True):
                return _Probed(f"its {name} depends on padding of mask 0", {})
            if not near(three[0], three[1], exact=False):
                return _Probed(f"its {name} depends on the width of the batch", {})
        return _Probed("", {name: x or [] for name, x in dims.items()})

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Without dropout and gradients, and without casts of weights that autocast remembers."""
        device, modes = self.model_device().type, [(m, m.training) for m in self.model.modules()]
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        for module, _ in modes:
            module.training = False
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
                yield
        finally:
            for module, training in modes:
                module.training = training

    # --- for graphs and the handle

    def _named_outputs(self, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The type of what the model's own forward returns, and its tensors."""
        found = self.stock(**tensors, **self._options)
        named = {name: x for name, x in found.items() if x is not None} if hasattr(found, "items") else {}
        if not named or not all(isinstance(x, Tensor) for x in named.values()):
            raise RuntimeError(f"{type(self.model).__name__} returns more than tensors by their names: {', '.join(named)}")
        return type(found), named

    def inputs(self, size: tuple[int, Form], device: torch.device) -> Table:
        """The memory of a batch size and a form."""
        return Table(*size, device, self.padding)

    def outputs(self, inputs: images.Rows) -> tuple[Tensor, ...]:
        """The tensors that the model's own forward returns."""
        before = torch.get_rng_state(), random.getstate()
        with inputs.constants if isinstance(inputs, Table) else Constants():
            kind, named = self._named_outputs(inputs.tensors)
        if not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate():
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            raise RuntimeError("it draws random numbers on the host, which a replay would not")
        assert self._probed is not None, "the first batch was probed"
        unseen = [name for name in named if name not in self._probed.columns]
        if unseen:
            raise RuntimeError(f"{type(self.model).__name__} returns {', '.join(unseen)} in training alone")
        self._made[self._state] = builder(kind, list(named)), list(named)
        return tuple(named.values())

    def describe(self) -> str:
        """How it is computed, for `explain`."""
        reason = self.failed or (self._probed.why_not if self._probed is not None else "")
        if not base.has_graphs(self.model_device()):
            reason = images.NO_GPU
        how = f"stock: {reason}" if reason else "padded, replayed from CUDA graphs by batch and width"
        return f"{how}; not packed: {self.not_packed}"

    def prepare_rows(self, rows: int, train: bool) -> None:
        """Nothing: a batch of text has a width too, and is captured at first use."""


def follows(alone: Tensor, filled: Tensor, columns: int, width: int) -> list[int] | None:
    """The dimensions of an output behind its first that are as wide as the batch; None if one of them changes otherwise."""
    if alone.dim() != filled.dim() or alone.dim() == 0:
        return None
    found = [dim for dim in range(1, alone.dim()) if alone.shape[dim] != filled.shape[dim]]
    return found if all((alone.shape[dim], filled.shape[dim]) == (columns, width) for dim in found) else None


def _real(x: Tensor, dims: list[int], rows: int, columns: int, real: Tensor) -> Tensor:
    """An output at the real tokens of a batch, as far as it has tokens."""
    x = x[:rows]
    for dim in dims:
        x = x.narrow(dim, 0, columns)
    return x[real] if 1 in dims else x


def near(x: Tensor, y: Tensor, exact: bool) -> bool:
    """Whether two outputs are equal but for rounding; exact: the same operations gave them, so all that differs was read."""
    if not x.is_floating_point():
        return bool(torch.equal(x, y))
    precise = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
    limit = (1e-5 if precise else 1e-3) if exact else (1e-2 if precise else 5e-2)
    x, y = x.double(), y.double()
    return bool((x - y).abs().amax() <= limit * x.abs().amax().clamp(min=1e-30))


def encoder(model: nn.Module, share: float, not_packed: str) -> Padded | None:
    """A text model that is captured padded; None if it cannot be."""
    return None if why_not(model) else Padded(model, share, not_packed)
