"""Captures a function around an optimised encoder, such as a training step, in one CUDA graph for each size of its batch.

The function runs over a copy of the batch at fixed addresses. Before it the batch is packed, so a call of the encoder inside finds its packed tokens
(`Inside`) and waits for nothing. The first call of a size is a real step that runs uncaptured; the second one captures and replays. So each step
is computed once, and nothing has to be undone after a capture.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from saccade.encoders import base
from saccade.encoders.attention import Borders
from saccade.encoders.capacity import capacity
from saccade.encoders.packing import PLACES, Packed, unpack
from saccade.engine.problem import captured
from saccade.engine.switch import REASON, is_disabled
from saccade.engine.tracing import observer
from saccade.errors import InvalidArgument

Batch = dict[str, Tensor]
_PACKED = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
# values of added columns; ids get the padding id
_FILLS = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "labels": -100}
_STEP = 16
running = threading.local()  # `inside`: the batch of the captured function that runs in this thread


def columns_of(batch: Batch, longest: int | None) -> int:
    """The columns a batch gets: the next multiple of 16, or as many as it has if one of its tensors `[B, T]` cannot be filled up."""
    shape, mask = batch["input_ids"].shape, batch.get("attention_mask")
    if mask is None:
        return shape[1]
    for name, x in batch.items():
        by_token = x.shape[:2] == shape
        known = name in _FILLS and x.dim() == 2 and not (name == "labels" and x.is_floating_point())
        if (by_token and not known) or (name in _PACKED and not by_token):
            return shape[1]
    wide = -(-shape[1] // _STEP) * _STEP
    return wide if longest is None else max(shape[1], min(wide, longest))


def widened(batch: Batch, columns: int, padding: int) -> Batch:
    """The batch with its tensors `[B, T]` filled up to so many columns."""
    shape = batch["input_ids"].shape
    more = columns - shape[1]
    if more == 0:
        return batch
    fills = _FILLS | {"input_ids": padding}
    return {name: F.pad(x, (0, more), value=fills[name]) if x.shape == shape else x for name, x in batch.items()}


class Inside:
    """The batch of a captured function as a call of the encoder finds it. served: the `Served` encoder. batch: tensors at fixed addresses.
    inputs: `graphs.Inputs`, its packed tokens."""

    def __init__(self, served: Any, batch: Batch, inputs: Any):
        self.served, self.batch, self.inputs = served, batch, inputs

    def other(self, served: Any, given: Mapping[str, Any]) -> str:
        """Why a call is not that of the batch; empty if it is. Token types may be left out."""
        if served is not self.served:
            return "another encoder's function is captured"
        for name in _PACKED:
            x = given.get(name)
            if x is not self.batch.get(name) and not (name == "token_type_ids" and x is None):
                return f"its {name} are not those of the captured function's batch"
        return ""

    def hidden(self, types: bool) -> Tensor:
        """The last layer, padded. types: the call gives token types. Waits for nothing."""
        rows, columns = self.batch["input_ids"].shape
        inputs, size = self.inputs, self.inputs.capacity
        arguments = inputs.arguments("token_type_ids" in self.served.signature.parameters)
        if not types and "token_type_ids" in arguments:
            arguments["token_type_ids"] = torch.zeros_like(arguments["token_type_ids"])
        found = self.served.run_fused(arguments, Borders(inputs.ends, min(inputs.longest, size)))
        # rows behind the last token go to one more place, which is cut off
        real = torch.arange(size, device=found.device) < inputs.ends[-1]
        places = inputs.numbers[PLACES].where(real, rows * columns)
        return unpack(found, places, (1, rows * columns + 1))[0, : rows * columns].view(rows, columns, -1)


@contextmanager
def _active(inside: Inside) -> Iterator[None]:
    before = getattr(running, "inside", None)
    running.inside = inside
    try:
        yield
    finally:
        running.inside = before


class _Static:
    """A batch at fixed addresses on a GPU, with pinned twins on the host, from which one copy brings everything."""

    def __init__(self, batch: Batch, device: torch.device):
        self.places: dict[str, tuple[int, Tensor]] = {}
        length = 0
        for name, x in batch.items():
            self.places[name] = length, torch.empty(x.shape, dtype=x.dtype, device="meta")
            length += -(-x.numel() * x.element_size() // 16) * 16
        with torch.inference_mode(False):
            self.memory = torch.zeros(length, dtype=torch.uint8, device=device)
            self.pinned = [torch.zeros(length, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
            self.tensors, *self.host = [self._parts(x) for x in (self.memory, *self.pinned)]
        self.sent = [torch.cuda.Event(), torch.cuda.Event()]
        self.turn = 0

    def _parts(self, memory: Tensor) -> Batch:
        return {
            name: memory[first : first + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
            for name, (first, x) in self.places.items()
        }

    def load(self, batch: Batch) -> None:
        """Copy a batch there, on the current stream."""
        there = [name for name, x in batch.items() if x.is_cuda]
        if len(there) < len(batch):
            # the copy from this half may still run
            self.turn ^= 1
            self.sent[self.turn].synchronize()
            for name in batch.keys() - there:
                self.host[self.turn][name].copy_(batch[name].detach())
            self.memory.copy_(self.pinned[self.turn], non_blocking=True)
            self.sent[self.turn].record()
        for name in there:
            self.tensors[name].copy_(batch[name].detach())


class _Step:
    """One size of a captured function: its memory, and its graph once it is captured."""

    def __init__(self, served: Any, batch: Batch, size: int, device: torch.device):
        from saccade.encoders.graphs import Inputs

        self.device, self.static, self.inputs = device, _Static(batch, device), Inputs(size, device, batch["input_ids"].shape[1])
        self.inside = Inside(served, self.static.tensors, self.inputs)
        self.outputs: Any = None
        self.bytes = 0
        self.last = ""  # how the encoder ran inside

    def load(self, batch: Batch, packed: Packed) -> None:
        self.static.load(batch)
        self.inputs.load(packed)

    def _run(self, function: Callable[[Batch], Any]) -> Any:
        # autocast's cached casts of weights would be stale, before the function and after it
        torch.clear_autocast_cache()
        try:
            with _active(self.inside):
                found = function(dict(self.static.tensors))
            self.last = self.inside.served.last
            return tree_map_only(
                Tensor, Tensor.detach, found
            )  # the graph of autograd ends here, with its nodes that add to gradients
        finally:
            torch.clear_autocast_cache()

    def warm(self, function: Callable[[Batch], Any], stream: torch.cuda.Stream) -> Any:
        """A real step without a graph, on the stream of captures."""
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                found = self._run(function)
        finally:
            current.wait_stream(stream)
        return _copied(found)

    def capture(self, function: Callable[[Batch], Any], stream: torch.cuda.Stream, pool: Any) -> None:
        """Capture a step, which computes nothing."""
        from saccade.encoders.graphs import _quiet

        gc.collect()  # a reference cycle may hold an old loss, whose gradient accumulators belong to another stream
        before = torch.cuda.memory_reserved(self.device)
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with (
            _quiet(self.device, pool),
            torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self.outputs = self._run(function)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.bytes = max(0, torch.cuda.memory_reserved(self.device) - before)

    def replay(self) -> Any:
        self.graph.replay()
        return _copied(self.outputs)


def _copied(found: Any) -> Any:
    """A result in memory of its own, which no later call overwrites, and without a graph of autograd."""
    return tree_map_only(Tensor, lambda x: x.detach().clone(), found)


class CapturedFunction:
    """The result of `Optimized.capture`: the function, which runs from CUDA graphs when it can.

    Attributes:
        function: the function itself.
        failed: why it could not be captured; empty if nothing failed.
        last: how the last call ran.
    """

    def __init__(self, handle: Any, function: Callable[[Batch], Any]):
        if not callable(function):
            raise InvalidArgument(f"function is a {type(function).__name__}; it must be callable with a batch")
        if len(handle.served) != 1:
            raise InvalidArgument(f"the handle serves {len(handle.served)} encoders; a function is captured around exactly one")
        if not handle.served[0].packs:
            raise InvalidArgument(
                f"{type(handle.served[0].model).__name__} is not packed; a function is captured around an encoder whose texts are packed"
            )
        self.function, self.failed, self.last = function, "", "no call yet"
        self._handle, self._model = handle, handle.served[0].model
        self._warm: set[tuple] = set()  # sizes that have run

    def __call__(self, batch: Mapping[str, Tensor]) -> Any:
        """Run the function on a batch and return copies of what it returns.

        Raises:
            InvalidArgument: no dict of tensors, no `input_ids`, or tokens beyond the model's positions.
        """
        given = _checked(batch)
        served = self._handle.served[0] if self._handle.served else None
        if is_disabled():
            self.last = f"uncaptured: {REASON}"
            return self._plain(given)
        seen = observer() or ("the call itself is captured" if captured() else "")
        if served is None or seen:
            self.last = f"uncaptured: {seen or 'the handle was restored'}"
            return self._plain(given)
        with served.lock:
            state = served.current_state()
            reason = self._refused(served, given)
            if not reason:
                longest = getattr(served.model.config, "max_position_embeddings", None)
                wide = widened(given, columns_of(given, longest), served.padding)
                packed, used = served._pack({name: wide.get(name) for name in _PACKED})
                reason = "there is no real token" if packed.tokens == 0 else "a padded position is used" if bool(used) else ""
            if reason:
                self.last = f"uncaptured: {reason}"
                return self._plain(given)
            return self._stepped(served, state, given, wide, packed)

    def _plain(self, batch: Batch) -> Any:
        """The function without a graph; the encoder inside runs like any other call of it."""
        device = next(self._model.parameters()).device
        return _copied(self.function({name: x.to(device) for name, x in batch.items()}))

    def _refused(self, served: Any, batch: Batch) -> str:
        if not base.has_graphs(served.state.tensors[0].device):
            return "graphs need a GPU"
        return self.failed or served.failed or served.state.watched or served._refused({x: batch.get(x) for x in _PACKED})

    def _stepped(self, served: Any, state: int, given: Batch, wide: Batch, packed: Packed) -> Any:
        """Replay the graph of a size, or capture it first, or warm it up."""
        device, size = served.state.tensors[0].device, capacity(max(packed.tokens, packed.shape[0]))
        shapes = tuple([(name, x.shape, x.dtype) for name, x in wide.items()])
        key = (self, state, size, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), shapes)
        gpu = served._graphs_on(device)
        gpu.turns.take(device)
        step = served.graphs.get(key)
        made = step is None
        if step is None:
            step = _Step(served, wide, size, device)
        step.load(wide, packed)
        if made and key not in self._warm:
            found = step.warm(self.function, gpu.stream)
            self._warm.add(key)
            self.last = f"uncaptured: the first step of a size of {size} tokens, which warms up"
            return found
        if made:
            self.failed = self._capture(step, gpu)
            if self.failed:
                self.last = f"uncaptured: {self.failed}"
                served.say(f"{self.name}: {self.failed}; it runs uncaptured")
                return self._plain(given)
            served.graphs[key] = step
            gpu._drop()
        served.graphs.move_to_end(key)
        self.last = f"captured: {packed.tokens} tokens in a graph of {size}"
        served.last = step.last
        return step.replay()

    def _capture(self, step: _Step, gpu: Any) -> str:
        """Capture a step; returns why that failed."""
        try:
            step.capture(self.function, gpu.stream, gpu.pool)
        except RuntimeError as error:
            return f"a CUDA graph could not be captured ({' '.join(str(error).split())[:200]})"
        return ""

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def explain(self) -> str:
        """How the function ran, and the memory of its graphs."""
        graphs = [g for one in self._handle.served for key, g in one.graphs.items() if key[0] is self]
        held = sum([g.bytes for g in graphs])
        return f"{self.name}: {len(graphs)} graphs, {held / 2**20:.0f} MiB; last call {self.last}"


def _checked(batch: Any) -> Batch:
    if not isinstance(batch, Mapping):
        raise InvalidArgument(f"batch is a {type(batch).__name__}; it must be a dict of tensors")
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            raise InvalidArgument(f"batch[{name!r}] is a {type(x).__name__}; a captured function takes tensors alone")
    if "input_ids" not in batch:
        raise InvalidArgument(f"batch holds {', '.join(map(str, batch)) or 'nothing'}; it must hold input_ids `[B, T]`")
    return dict(batch)
