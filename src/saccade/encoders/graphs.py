"""A captured forward, and a captured forward and backward as one differentiable call.

A graph reads fixed memory: `Inputs`, or any object with a `load(batch)`. It writes fixed memory too, so its outputs are copied before the next replay.
All graphs are captured on one side stream, whose cuBLAS workspace is allocated before the first capture and so belongs to no graph.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saccade.encoders.packing import IDS, PLACES, POSITIONS, TYPES, Packed

Run = Callable[[Any], tuple[Tensor, ...]]  # what leaves a model, of its inputs; each with a first dimension of their size
Make = Callable[[], Any]  # the memory from which a graph reads, with a `load(batch)`


class Inputs:
    """The memory from which a graph reads a batch of up to `capacity` tokens, with a pinned twin on the host.

    One allocation holds all numbers, so that one copy brings a batch.

    Attributes:
        numbers: ids, positions, types and places, int64 `[4, capacity]`.
        ends: the ends of the sequences, int32 `[capacity + 1]`; behind the last sequence, the number of tokens.
        longest: a bound of the tokens of each sequence.
    """

    def __init__(self, capacity: int, device: torch.device, longest: int):
        self.capacity, self.longest = capacity, longest
        length = 4 * capacity + (capacity + 2) // 2
        with torch.inference_mode(False):
            self.memory = torch.zeros(length, dtype=torch.int64, device=device)
            pins = device.type == "cuda"
            self.pinned = [torch.zeros(length, dtype=torch.int64, device="cpu", pin_memory=pins) for _ in range(2)]
            self.numbers, self.ends = self._parts(self.memory)
        self.host = [tuple([x.numpy() for x in self._parts(memory)]) for memory in self.pinned]
        self.sent = [torch.cuda.Event(), torch.cuda.Event()]
        self.turn = 0
        self.fill_with_sequences()

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        numbers = memory[: 4 * self.capacity].view(4, self.capacity)
        return numbers, memory[4 * self.capacity :].view(torch.int32)[: self.capacity + 1]

    def fill_with_sequences(self, length: int = 16) -> None:
        """Valid sequences, for warming up: every id, position and type is 0, which each model has."""
        places = torch.arange(self.capacity + 1, device=self.memory.device)
        self.ends.copy_((places * length).clamp(max=self.capacity))

    def load(self, batch: Packed, stream: torch.cuda.Stream | None = None) -> None:
        """Bring a batch, on the current stream."""
        tokens = batch.tokens
        if isinstance(batch.numbers, Tensor):
            numbers, ends = self.numbers, self.ends
            numbers[:, :tokens].copy_(batch.numbers)
            numbers[:, tokens:].zero_()
            ends[: batch.ends.shape[0]].copy_(batch.ends)
            ends[batch.ends.shape[0] :].fill_(tokens)
            return
        # the copy from this half may still run
        self.turn ^= 1
        self.sent[self.turn].synchronize()
        table, borders = self.host[self.turn]
        table[:, :tokens], table[:, tokens:] = batch.numbers, 0
        borders[: len(batch.ends)], borders[len(batch.ends) :] = batch.ends, tokens
        self.memory.copy_(self.pinned[self.turn], non_blocking=True)
        self.sent[self.turn].record(stream)

    def places(self, tokens: int) -> Tensor:
        """The places of the tokens in the padded batch."""
        return self.numbers[PLACES, :tokens]

    def arguments(self, types: bool) -> dict[str, Tensor]:
        """The arguments of a model: one row of packed tokens."""
        numbers = self.numbers
        found = {"input_ids": numbers[IDS][None], "position_ids": numbers[POSITIONS][None]}
        return found | ({"token_type_ids": numbers[TYPES][None]} if types else {})


class Turns:
    """Memory that one stream uses after another: a thread that has a stream of its own waits for what the last one has launched."""

    def __init__(self) -> None:
        self.last: torch.cuda.Stream | None = None
        self._raw = -1  # the driver's number of `last`

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """The current stream, which uses the memory from here on."""
        # an object of torch takes ten times as long
        raw = torch._C._cuda_getCurrentRawStream(device.index or 0)  # type: ignore[attr-defined]
        if self.last is None or raw != self._raw:
            current = torch.cuda.current_stream(device)
            if self.last is not None:
                current.wait_stream(self.last)
            self.last, self._raw = current, raw
        return self.last


class Sent:
    """Whether a batch of the host has been read by its copy to a device."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._waits = False

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """The copies of a batch have been launched on a stream, by default the current one."""
        if self._event is not None:
            self._event.record(stream)
            self._waits = True

    def wait(self) -> None:
        """Return once the batch has been read."""
        if self._event is not None and self._waits:
            self._event.synchronize()
            self._waits = False


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Leaves torch's random numbers as they were, also after a capture that fails, and keeps Python's collector from ending one midway."""
    state, stream = torch.cuda.get_rng_state(device), torch.cuda.current_stream(device)
    collects, done = gc.isenabled(), False
    gc.disable()
    try:
        yield
        done = True
    finally:
        if collects:
            gc.enable()
        if not done:
            torch.cuda.set_stream(stream)  # torch stays on the stream of a capture that cannot be ended
            # a capture that failed leaves the generator in its capture: it gets another state, of the same numbers
            torch.cuda.default_generators[device.index or 0].graphsafe_set_state(torch.Generator(device))
        torch.cuda.set_rng_state(state, device)


@contextmanager
def _aliased(model: nn.Module, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Leaves of the same memory in the place of the parameters of a model.

    A node that adds to a parameter's gradient belongs to the stream on which it was made. It lives as long as any graph of the caller, such as an old
    loss. A capture that led to it would fail: "would make the legacy stream depend on a capturing blocking stream".
    """
    # of the type of parameters, whose shapes torch.compile takes for constants
    aliases = {id(x): nn.Parameter(x.detach()) for x in parameters}
    places = [
        (d, name, x)
        for m in model.modules()
        for d in (m._parameters,)
        for name, x in d.items()
        if x is not None and id(x) in aliases
    ]
    for d, name, x in places:
        d[name] = aliases[id(x)]
    try:
        yield list(aliases.values())
    finally:
        for d, name, x in places:
            d[name] = x


class Forward:
    """A captured forward without a gradient."""

    def __init__(self, run: Run, make: Make, device: torch.device, stream: torch.cuda.Stream, pool: Any):
        before = torch.cuda.memory_reserved(device)
        self.inputs = make()
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with _quiet(device), torch.inference_mode(False), torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run(self.inputs)
            stream.synchronize()
            with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.outputs = run(self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.bytes = max(0, torch.cuda.memory_reserved(device) - before)

    def __call__(self, batch: Any, stream: torch.cuda.Stream) -> tuple[Tensor, ...]:
        """The outputs of a batch and of what fills it up, in memory that the next replay overwrites. stream: the current one."""
        self.inputs.load(batch, stream)
        self.graph.replay()
        return self.outputs


class Slot:
    """One forward and its backward at a time: the graphs of a slot share memory, which holds what a forward saves for its backward."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.owner: object | None = None  # the ticket of the forward whose backward has not come yet

    @property
    def free(self) -> bool:
        return self.owner is None


class Ticket:
    """Held by the node of a forward; dropped with it, so that a graph that nobody differentiates frees its slot."""

    def __init__(self, slot: Slot):
        self.slot, slot.owner = slot, id(self)

    def give_back(self) -> None:
        """The backward has run, or never will."""
        if self.slot.owner == id(self):
            self.slot.owner = None

    def __del__(self) -> None:
        self.give_back()


class Gradients:
    """The buffers in which every training graph of a model writes its gradients: one for each dtype."""

    def __init__(self, parameters: list[Tensor]):
        self.flat: dict[torch.dtype, Tensor] = {}
        self.views: list[Tensor] = []
        sizes: dict[torch.dtype, int] = {}
        for x in parameters:
            sizes[x.dtype] = sizes.get(x.dtype, 0) + x.numel()
        with torch.inference_mode(False):
            self.flat = {dtype: torch.empty(n, dtype=dtype, device=parameters[0].device) for dtype, n in sizes.items()}
        used = dict.fromkeys(sizes, 0)
        for x in parameters:
            first = used[x.dtype]
            self.views.append(self.flat[x.dtype][first : first + x.numel()].view(x.shape))
            used[x.dtype] = first + x.numel()
        self.lock, self.turns = threading.Lock(), Turns()
        self.by_dtype = {dtype: [i for i, x in enumerate(parameters) if x.dtype == dtype] for dtype in sizes}

    def copies(self, used: list[bool]) -> list[Tensor | None]:
        """The gradients in memory of their own: autograd may keep them as they are, and the next replay overwrites the buffers."""
        found: list[Tensor | None] = [None] * len(self.views)
        for dtype, places in self.by_dtype.items():
            copy = self.flat[dtype].clone()
            parts = torch._utils._unflatten_dense_tensors(copy, [self.views[i] for i in places])
            for i, part in zip(places, parts, strict=True):
                if used[i]:
                    found[i] = part
        return found


class Training:
    """A captured forward and backward, differentiable in the parameters of the model."""

    def __init__(
        self, model: nn.Module, run: Run, make: Make, device: torch.device, stream: torch.cuda.Stream, slot: Slot,
        parameters: list[Tensor], gradients: Gradients,
    ):  # fmt: skip
        before = torch.cuda.memory_reserved(device)
        self.slot, self.gradients = slot, gradients
        self.inputs = make()
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with _quiet(device), torch.inference_mode(False), torch.enable_grad(), _aliased(model, parameters) as leaves:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    # by output: its gradient, and whether it leads to each parameter
                    self.doutputs, self.reached = all_reached(partial(run, self.inputs), leaves)
            stream.synchronize()
            with torch.cuda.graph(self.forward, pool=slot.pool, stream=stream, capture_error_mode="thread_local"):
                outputs = run(self.inputs)
            with torch.cuda.graph(self.backward, pool=slot.pool, stream=stream, capture_error_mode="thread_local"):
                found = _gradients(outputs, leaves, self.doutputs)
                pairs = [(into, x) for into, x in zip(gradients.views, found, strict=True) if x is not None]
                torch._foreach_copy_([into for into, _ in pairs], [x for _, x in pairs])
            self.outputs = tuple([x.detach() for x in outputs])
            self.constant = [i for i, x in enumerate(outputs) if not x.requires_grad]
        torch.cuda.current_stream(device).wait_stream(stream)
        self.bytes = max(0, torch.cuda.memory_reserved(device) - before)

    def __call__(self, batch: Any, stream: torch.cuda.Stream, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        """As `Forward`; autograd leads through the outputs to the parameters."""
        self.inputs.load(batch, stream)
        found: tuple[Tensor, ...] = _Replayed.apply(self, *parameters)  # type: ignore[no-untyped-call]
        return found


def _gradients(outputs: Sequence[Tensor], leaves: list[Tensor], doutputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of leaves; an output before the first parameter that is trained has none to give."""
    pairs = [(x, dx) for x, dx in zip(outputs, doutputs, strict=True) if x.requires_grad]
    return torch.autograd.grad([x for x, _ in pairs], leaves, [dx for _, dx in pairs], allow_unused=True)


def all_reached(run: Callable[[], Sequence[Tensor]], leaves: list[Tensor]) -> tuple[tuple[Tensor, ...], list[list[bool]]]:
    """By output: a gradient of zeros, and whether it leads to each of the leaves.

    Every output's backward runs, each through a forward of its own. torch.compile may have donated the buffers of a graph to its backward, which then
    cannot be kept for a second one.
    """
    outputs = run()
    doutputs, found = tuple([torch.zeros_like(x) for x in outputs]), []
    for i, dx in enumerate(doutputs):
        outputs = run() if i else outputs
        given = _gradients([outputs[i]], leaves, [dx]) if outputs[i].requires_grad else [None] * len(leaves)
        found.append([x is not None for x in given])
    return doutputs, found


def fill(into: Sequence[Tensor], given: Sequence[Tensor | None], reached: list[list[bool]]) -> list[bool]:
    """Bring the gradients of the outputs, 0 for one that no loss reads; says which parameters have a gradient.

    A pooler that no loss reads has none, as in stock. An optimiser decays a parameter whose gradient is 0, and leaves one that has none.
    """
    for memory, x in zip(into, given, strict=True):
        if x is None:
            memory.zero_()
        else:
            memory.copy_(x)
    rows = [row for row, x in zip(reached, given, strict=True) if x is not None]
    return [any(column) for column in zip(*rows, strict=True)]


class _Replayed(torch.autograd.Function):
    """The outputs of a replayed forward, whose backward replays the other graph."""

    @staticmethod
    def forward(ctx: Any, training: Training, *parameters: Tensor) -> tuple[Tensor, ...]:
        training.forward.replay()
        ctx.training, ctx.ticket = training, Ticket(training.slot)
        ctx.versions = sum([x._version for x in parameters])
        ctx.addresses = [*map(Tensor.data_ptr, parameters)]
        ctx.parameters = parameters  # leaves: they own no graph
        ctx.set_materialize_grads(False)
        outputs = tuple([x.detach() for x in training.outputs])
        ctx.mark_non_differentiable(*[outputs[i] for i in training.constant])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *doutputs: Tensor | None) -> tuple[Tensor | None, ...]:
        training, slot = ctx.training, ctx.ticket.slot
        if slot.owner != id(ctx.ticket):
            raise RuntimeError(
                "an optimised encoder gives the gradient of a forward once; call it again in place of retain_graph=True"
            )
        if sum([x._version for x in ctx.parameters]) != ctx.versions:
            raise RuntimeError("a parameter of an optimised encoder was changed in place between its forward and its backward")
        if [*map(Tensor.data_ptr, ctx.parameters)] != ctx.addresses:
            raise RuntimeError(
                "a parameter of an optimised encoder was moved to other memory between its forward and its backward"
            )
        gradients = training.gradients
        if all(x is None for x in doutputs):
            ctx.ticket.give_back()
            return None, *[None] * len(ctx.parameters)
        with gradients.lock:  # another thread's backward writes the same buffers
            gradients.turns.take(training.doutputs[0].device)
            used = fill(training.doutputs, doutputs, training.reached)
            training.backward.replay()
            found = gradients.copies(used)
        ctx.ticket.give_back()
        return None, *found
