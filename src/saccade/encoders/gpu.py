"""The graphs of one encoder on one device: made at first use, within a limit of memory, the least recently used dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.encoders.capacity import size_of
from saccade.encoders.packing import Packed, unpack

# Graphs of one encoder, whatever their memory: torch's allocator does not count what the driver keeps of a graph, and graphs of weights that were replaced
# are never replayed. 64 sizes up to 16,384 tokens, for two lengths and five uses, are 640.
_MOST_GRAPHS = 1024
_MOST_SLOTS = 4  # forwards whose backward has not come yet; losses of sentence-transformers have two to four


class Gpu:
    """The graphs of an encoder on one device."""

    def __init__(self, served: Any, device: torch.device):
        from saccade.encoders.graphs import Turns, failures

        self.served, self.device = served, device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.slots: list[Any] = []
        self.turns = Turns()
        self.gradients: dict[tuple, Any] = {}
        self.failures = failures()
        self.limit = int(torch.cuda.mem_get_info(device)[0] * served.share)

    def hidden(self, batch: Packed, state: int, early: bool = False) -> tuple[Tensor, Tensor | None] | None:
        """The padded rows of a batch, and what was pooled of them, if anything was.

        early: the state is read once the graph is launched. None if it has changed then, or if there is no graph yet.
        """
        served, size = self.served, size_of(batch.tokens, batch.shape[0], batch.longest, self.served.most)
        trains = torch.is_grad_enabled() and bool(served.state.parameters)
        graph = self.known(state, size) if early else self.graph(state, size, trains)
        if graph is None and early:
            return None
        if graph is None:
            served.last = f"unpadded: {served.failed or 'every captured forward waits for its backward'}"
            return served._eager(batch, self.device), None
        served.last = f"captured: {batch.tokens} tokens in a graph of {graph.inputs.capacity}"
        stream = self.turns.take(self.device)
        if not trains:
            rows, *pooled = graph(batch, stream)
            if early and served.has_changed():
                return None
            padded = graph.inputs.unpacked(rows, batch)
            return padded, pooled[0][: batch.shape[0]].clone() if pooled else None
        rows = graph(batch, stream, served.state.parameters)[0][: batch.tokens]
        return unpack(rows, graph.inputs.places(batch.tokens).clone(), batch.shape), None

    def make(self, state: int, size: Any, train: bool) -> None:
        """Capture a capacity if it is not there."""
        self.graph(state, size, train and bool(self.served.state.parameters))

    def known(self, state: int, size: Any) -> Any:
        """The graph without a gradient of a size; None if it is still to be made."""
        key = (state, None, size)
        found = self.served.graphs.get(key)
        if found is not None:
            self.served.graphs.move_to_end(key)
        return found

    def graph(self, state: int, size: Any, trains: bool) -> Any:
        """The graph of a size, made if there is none; None where it cannot be had."""
        served = self.served
        slot = self._slot() if trains else None
        if trains and slot is None:
            served.say(
                f"an optimised encoder has {_MOST_SLOTS} forwards that wait for their backward; the next runs without a graph"
            )
            return None
        key = (state, None if slot is None else id(slot), size)
        found = served.graphs.get(key)
        if found is None:
            try:
                found = self._captured_with_or_without_fusion(size, slot)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                served.failed = f"a CUDA graph could not be captured ({' '.join(str(error).split())[:200]})"
                served.say(f"{type(served.model).__name__}: {served.failed}; {served.fallback}")
                return None
            served.graphs[key] = found
            self._drop()
        served.graphs.move_to_end(key)
        return found

    def _captured_with_or_without_fusion(self, size: Any, slot: Any) -> Any:
        fusion = self.served.fusion
        try:
            return self._capture(size, slot)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if fusion is None or fusion.failed:
                raise
            fusion.fail(error)
            self.served.say(f"{type(self.served.model).__name__}: {fusion.failed}; its layers run as they are")
        self.follow()
        return self._capture(size, slot)

    def follow(self) -> None:
        """Start again after a capture of any model in this process has failed.

        Earlier graphs no longer follow torch's random numbers. The memory of captures is abandoned too: torch's allocators, also on the host, believe
        that the failed capture still runs, and refuse another there.
        """
        from saccade.encoders.graphs import failures

        if self.failures == failures():
            return
        self.failures = failures()
        self.served.graphs.clear()
        self.pool = torch.cuda.graph_pool_handle()
        for slot in self.slots:
            slot.pool = torch.cuda.graph_pool_handle()

    def _capture(self, size: Any, slot: Any) -> Any:
        from saccade.encoders.graphs import Forward
        from saccade.encoders.training import Gradients, Training

        served = self.served

        def make() -> Any:
            return served.inputs(size, self.device)

        def run(inputs: Any) -> tuple[Tensor, ...]:
            enabled = torch.is_autocast_enabled("cuda")
            # autocast's cached casts of weights would be stale
            with torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled, cache_enabled=False):
                found: tuple[Tensor, ...] = served.outputs(inputs)
                return found

        if slot is None:
            return Forward(run, make, self.device, self.stream, self.pool)
        parameters = served.state.parameters
        known = tuple([(x.data_ptr(), x.dtype, x.shape) for x in parameters])
        if known not in self.gradients:
            self.gradients = {known: Gradients(parameters)}  # type: ignore[arg-type]
        return Training(served.model, run, make, self.device, self.stream, slot, parameters, self.gradients[known])  # type: ignore[arg-type]

    def _slot(self) -> Any:
        from saccade.encoders.training import Slot

        free = next((x for x in self.slots if x.free), None)
        if free is None and len(self.slots) < _MOST_SLOTS:
            free = Slot()
            self.slots.append(free)
        return free

    def _drop(self) -> None:
        """Drop the least recently used graphs until the rest fits the limits."""
        graphs = self.served.graphs
        while len(graphs) > _MOST_GRAPHS or (len(graphs) > 1 and sum([g.bytes for g in graphs.values()]) > self.limit):
            graphs.popitem(last=False)
