"""One encoder that is served: how a call of its forward is packed, and by what it is computed."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.encoders import attention, families
from saccade.encoders.attention import Borders
from saccade.encoders.capacity import capacity
from saccade.encoders.packing import Packed, pack, unpack
from saccade.encoders.state import State
from saccade.engine.calls import read_later
from saccade.engine.problem import captured
from saccade.errors import InvalidArgument

_logger = logging.getLogger("saccade")
_MOST_SLOTS = 4  # forwards whose backward has not come yet; losses of sentence-transformers have two to four
# arguments that are packed; every other one has to be absent
_PACKED = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_USED = (
    "a padded position is used: a token that is no padding has mask 0, or padding lies on the left, where a pooler or head reads"
)
_HARMLESS = {"return_dict", "use_cache", "output_attentions", "output_hidden_states"}


class Served:
    """A base model of transformers whose forward packs its batch. share: of the memory that was free, which graphs may hold. has_head: another model
    reads its output."""

    def __init__(self, model: nn.Module, share: float, has_head: bool = False):
        self.model, self.stock = model, model.forward
        self.family = families.FAMILIES[model.config.model_type]
        self.signature = inspect.signature(self.stock)
        self.padding = int(model.config.pad_token_id or 0)
        self.has_head = has_head
        self.state, self.lock, self.share = State(model), threading.RLock(), share
        self.graphs: OrderedDict[tuple, Any] = OrderedDict()  # by (state, what, capacity, bound), least recently used first
        self.failed = ""  # why nothing is captured
        self.last = "no call yet"
        self.output_type: Any = None
        self._gpu: _Gpu | None = None
        self._said: set[str] = set()

    # --- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = self._refused(args, kwargs)
        if reason:
            self.last = f"stock: {reason}"
            return self.stock(*args, **kwargs)
        given = self.signature.bind(*args, **kwargs).arguments
        extra = given.pop("kwargs", {})
        batch, used = self._pack(given)
        if used is True:
            self.last = f"stock: {_USED}"
            return self.stock(*args, **kwargs)
        waiting = read_later(used) if isinstance(used, Tensor) else None
        if batch.tokens == 0:
            self.last = "stock: there is no real token"
            return self.stock(*args, **kwargs)
        padded = self._hidden(batch)
        if waiting is not None and waiting():
            self.last = f"stock: {_USED}"
            return self.stock(*args, **kwargs)
        return self._outputs(padded, given.get("return_dict", extra.get("return_dict")))

    def _refused(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """Why a call runs as it is; empty if it is packed."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return "the call is traced"
        if captured():
            return "a CUDA graph of the caller is captured"
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            return str(error)
        given = dict(given) | given.get("kwargs", {})
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0:
            return "it has no input_ids `[B, T]`"
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            return f"its mask has shape {list(getattr(mask, 'shape', ()))} and is no key padding `[B, T]`"
        for name in ("output_attentions", "output_hidden_states", "use_cache"):
            if given.get(name):
                return f"{name} is asked for"
        config = self.model.config
        if getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
            return "the config asks for attentions or hidden states"
        beyond = [n for n, x in given.items() if x is not None and n not in _PACKED and n not in _HARMLESS and n != "kwargs"]
        if beyond:
            return f"{beyond[0]} is given"
        if self.model.config._attn_implementation != attention.NAME:
            return f"its attention is {self.model.config._attn_implementation!r} now"
        return ""

    def _pack(self, given: dict[str, Any]) -> tuple[Packed, Tensor | bool]:
        ids, mask, types, positions = (given.get(name) for name in _PACKED)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and self.family.positions == "columns" and ids.shape[1] > longest and positions is None:
            raise InvalidArgument(
                f"input_ids have {ids.shape[1]} tokens a row; the positions of {type(self.model).__name__} end at {longest}"
            )
        device = next(self.model.parameters()).device
        if ids.is_cuda and ids.device != device:
            raise InvalidArgument(f"input_ids lie on {ids.device} and the model on {device}; ids on the host are brought there")
        reads_first = not self.family.causal and (self.has_head or getattr(self.model, "pooler", None) is not None)
        return pack(ids, mask, types, positions, self.family, self.padding, reads_first)

    def _hidden(self, batch: Packed) -> Tensor:
        """The last layer, padded."""
        device = next(self.model.parameters()).device
        with self.lock:
            tensors = self.state.tensors()
            watched = self.state.watched()
            if device.type != "cuda" or watched or self.failed:
                self.last = f"unpadded{f': {watched or self.failed}' if device.type == 'cuda' else ''}"
                return self._eager(batch, device)
            if self._gpu is None or self._gpu.device != device:
                self.graphs.clear()
                self._gpu = _Gpu(self, device)
            return self._gpu.hidden(batch, tensors)

    def _eager(self, batch: Packed, device: torch.device) -> Tensor:
        numbers, ends = batch.numbers.to(device), batch.ends.to(device)
        arguments = {"input_ids": numbers[0][None], "position_ids": numbers[1][None]}
        if "token_type_ids" in self.signature.parameters:
            arguments["token_type_ids"] = numbers[2][None]
        rows = self.run(arguments, Borders(ends, max(1, batch.longest)))
        return unpack(rows, numbers[3], batch.shape)

    def run(self, arguments: dict[str, Tensor], borders: Borders) -> Tensor:
        """The model's own forward over one row of packed tokens: `[tokens, E]`."""
        model = self.model
        if "use_cache" in self.signature.parameters:
            arguments["use_cache"] = False  # type: ignore[assignment]
        pooler, has_pooler = getattr(model, "pooler", None), hasattr(model, "pooler")
        if has_pooler:
            model.pooler = None  # it would read the first token of the row
        try:
            with attention.packed(borders):
                found = self.stock(**arguments, return_dict=True)
        finally:
            if has_pooler:
                model.pooler = pooler
        expected = families.layers_of(model.config)
        if borders.layers != expected:
            raise RuntimeError(f"{type(model).__name__} called its attention {borders.layers} times for {expected} layers")
        self.output_type = type(found)
        return found.last_hidden_state[0]

    def _outputs(self, padded: Tensor, return_dict: bool | None) -> Any:
        """What the model's own forward returns, around the padded last layer."""
        assert self.output_type is not None, "a forward has run"
        pooler = families.pooler_of(self.model)
        found = self.output_type(last_hidden_state=padded, **({} if pooler is None else {"pooler_output": pooler(padded)}))
        wanted = getattr(self.model.config, "return_dict", True) if return_dict is None else return_dict
        return found if wanted else found.to_tuple()

    # --- for the handle

    def say(self, sentence: str) -> None:
        """A warning, once."""
        if sentence not in self._said:
            self._said.add(sentence)
            _logger.warning(sentence)

    def prepare(self, tokens: list[int], train: bool, progress: Callable[[int], None]) -> None:
        """Capture the capacities of so many tokens."""
        device = next(self.model.parameters()).device
        if device.type != "cuda":
            return
        for number in tokens:
            with self.lock:
                if self._gpu is None or self._gpu.device != device:
                    self._gpu = _Gpu(self, device)
                self._gpu.make(self.state.tensors(), capacity(number), train)
            progress(number)


class _Gpu:
    """The graphs of an encoder on one device."""

    def __init__(self, served: Served, device: torch.device):
        self.served, self.device = served, device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.slots: list[Any] = []
        self.gradients: dict[tuple, Any] = {}
        self.limit = int(torch.cuda.mem_get_info(device)[0] * served.share)

    def hidden(self, batch: Packed, tensors: list[Tensor]) -> Tensor:
        served = self.served
        parameters = [x for x in tensors if x.requires_grad] if torch.is_grad_enabled() else []
        graph = self._graph(tensors, capacity(batch.tokens), bool(parameters))
        if graph is None:
            served.last = f"unpadded: {served.failed or 'every captured forward waits for its backward'}"
            return served._eager(batch, self.device)
        served.last = f"captured: {batch.tokens} tokens in a graph of {graph.inputs.capacity}"
        if not parameters:
            return unpack(graph(batch), graph.inputs.places(batch.tokens), batch.shape)
        rows = graph(batch, _unique(parameters))
        return unpack(rows, graph.inputs.places(batch.tokens).clone(), batch.shape)

    def make(self, tensors: list[Tensor], size: int, train: bool) -> None:
        """Capture a capacity if it is not there."""
        self._graph(tensors, size, train and any(x.requires_grad for x in tensors))

    def _graph(self, tensors: list[Tensor], size: int, trains: bool) -> Any:
        """The graph of a capacity, made if there is none; None where it cannot be had."""
        served, state = self.served, self.served.state.key(tensors)
        slot = self._slot() if trains else None
        if trains and slot is None:
            served.say("an optimised encoder has four forwards that wait for their backward; the fifth runs without a graph")
            return None
        key = (state, id(slot), size)
        found = served.graphs.get(key)
        if found is None:
            try:
                found = self._capture(tensors, size, slot, state)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                served.failed = f"a CUDA graph could not be captured ({' '.join(str(error).split())[:200]})"
                served.say(f"{type(served.model).__name__}: {served.failed}; it runs unpadded, without graphs")
                return None
            served.graphs[key] = found
            self._drop()
        served.graphs.move_to_end(key)
        return found

    def _capture(self, tensors: list[Tensor], size: int, slot: Any, state: tuple) -> Any:
        from saccade.encoders.graphs import Forward, Gradients, Inputs, Training

        served, types = self.served, "token_type_ids" in self.served.signature.parameters
        longest = int(getattr(served.model.config, "max_position_embeddings", 2**14) or 2**14)

        def run(inputs: Inputs) -> Tensor:
            enabled = torch.is_autocast_enabled("cuda")
            # casts of weights that autocast remembers would go stale
            with torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled, cache_enabled=False):
                return served.run(inputs.arguments(types), Borders(inputs.ends, min(longest, size)))

        if slot is None:
            return Forward(run, size, self.device, self.stream, self.pool)
        parameters = _unique([x for x in tensors if x.requires_grad])
        known = tuple([x.data_ptr() for x in parameters])
        if known not in self.gradients:
            self.gradients = {known: Gradients(parameters)}  # type: ignore[arg-type]
        return Training(run, size, self.device, self.stream, slot, parameters, self.gradients[known])  # type: ignore[arg-type]

    def _slot(self) -> Any:
        from saccade.encoders.graphs import Slot

        free = next((x for x in self.slots if x.free), None)
        if free is None and len(self.slots) < _MOST_SLOTS:
            free = Slot()
            self.slots.append(free)
        return free

    def _drop(self) -> None:
        """Drop the least recently used graphs until the rest fits the limit."""
        graphs = self.served.graphs
        while len(graphs) > 1 and sum([g.bytes for g in graphs.values()]) > self.limit:
            graphs.popitem(last=False)


def _unique(tensors: list[Tensor]) -> list[Tensor]:
    """Without weights that are tied to an earlier one."""
    return list({id(x): x for x in tensors}.values())
