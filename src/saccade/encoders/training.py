"""A captured forward and backward as one differentiable call: two graphs, which share memory until the backward has run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saccade.encoders.graphs import Make, Run, Turns, _quiet


@contextmanager
def _aliased(model: nn.Module, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Leaves that share the memory of a model's parameters and replace them.

    A node that adds to a parameter's gradient belongs to the stream on which it was made. It lives as long as any graph of the caller, such as an old
    loss. A capture that led to it would fail: "would make the legacy stream depend on a capturing blocking stream".
    """
    # they have the type of parameters, whose shapes torch.compile treats as constants
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


class Slot:
    """One forward and its backward at a time: the graphs of a slot share memory, which holds what a forward saves for its backward."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.owner: object | None = None  # the ticket of the forward that still waits for its backward

    @property
    def free(self) -> bool:
        return self.owner is None


class Ticket:
    """Held by the autograd node of a forward and dropped with it, so that a graph that is never differentiated frees its slot."""

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
        """The gradients in memory of their own: autograd may keep the tensors that it gets, and the next replay overwrites the buffers."""
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
        with _quiet(device, slot.pool), torch.inference_mode(False), torch.enable_grad(), _aliased(model, parameters) as leaves:
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
    """The gradients of leaves; an output before the first trained parameter contributes none."""
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
