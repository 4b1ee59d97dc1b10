"""The means that make a training step quick on a GPU: parts that only move memory as one kernel each, and whole steps replayed from a CUDA graph.

A small model is bound by its launches and by its elementwise passes. `part` marks a function that torch.compile makes into one kernel where a
gradient is needed on a GPU; on a CPU, in evaluations and after `plain` it runs as it is written. `Step` captures a step after a few calls, so that
the host launches one thing a step and nothing waits for the device.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EAGER = 3  # calls before the capture: kernels compile and load, the optimiser makes its state
_settings = {"compile": True, "graph": True}


def plain(what: str | None) -> None:
    """Without compiled parts ("compile"), CUDA graphs ("graph") or both ("all") from here on, or with them (None)."""
    _settings.update(compile=what not in ("compile", "all"), graph=what not in ("graph", "all"))


def add_plain(parser: argparse.ArgumentParser) -> None:
    """The argument for `plain`."""
    said = "on a GPU: no compiled parts, no CUDA graphs, or neither (all), for where one of them fails"
    parser.add_argument("--plain", nargs="?", const="all", choices=["compile", "graph", "all"], help=said)


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled where it is worth it. Its first argument is a tensor."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch._dynamo

        # one process trains models of many sizes, and each has shapes of its own
        torch._dynamo.config.recompile_limit = 512
        torch._dynamo.config.accumulated_recompile_limit = 4096
        return torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(first: Tensor, *others: Any) -> Any:
        # evaluations have a last batch of another shape, for which compiling would take longer than it saves
        chosen = compiled() if _settings["compile"] and first.is_cuda and torch.is_grad_enabled() else function
        return chosen(first, *others)

    return call


@part
def normed(x: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """Root-mean-square norm over the last dim, in float32, as `dtype`."""
    return (F.rms_norm(x.float(), (x.shape[-1],), eps=1e-6) * gain).to(dtype)


@part
def added_normed(x: Tensor, more: Tensor, gain: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x + more, its norm)."""
    total = x + more
    return total, (F.rms_norm(total.float(), (x.shape[-1],), eps=1e-6) * gain).to(dtype)


@part
def turned(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Norm, then rotary positions, of `[.., T, H, D]`; cos and sin `[T, 1, D]`."""
    normal = F.rms_norm(x.float(), (x.shape[-1],), eps=1e-6) * gain
    first, second = normal.chunk(2, dim=-1)
    return (normal * cos + torch.cat((-second, first), dim=-1) * sin).to(dtype)


@part
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gate) * up


@part
def loss_of(logits: Tensor, answers: Tensor) -> Tensor:
    """Mean cross entropy, in float32, of `[N, V]`."""
    return F.cross_entropy(logits.float(), answers)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer computes."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def adam(kind: type[torch.optim.Optimizer], parameters: Any, lr: float, device: str, **options: Any) -> torch.optim.Optimizer:
    """A fused optimiser; on a GPU its rate is a tensor, which a graph reads anew in every step."""
    if not device.startswith("cuda"):
        return kind(parameters, lr=lr, fused=True, **options)  # type: ignore[call-arg]
    return kind(parameters, lr=torch.tensor(lr, device=device), fused=True, capturable=True, **options)  # type: ignore[call-arg]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next steps."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class Step:
    """A function of tensors, called once a step, that returns a tensor. On a GPU it is captured after EAGER calls with inputs of the same shapes,
    one graph for each shapes, and replayed from then on. peak: bytes allocated in the calls before a capture, since a replay allocates nothing."""

    def __init__(self, function: Callable[..., Tensor], device: str) -> None:
        self.function = function
        self.graphed = device.startswith("cuda") and _settings["graph"]
        self.stream = torch.cuda.Stream(device) if self.graphed else None
        # by the shapes: the graph, the tensors that it reads and the one that it writes
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self.calls: Counter[tuple[torch.Size, ...]] = Counter()
        self.peak = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not self.graphed:
            return self.function(*inputs)
        shapes = tuple(t.shape for t in inputs)
        if self.calls[shapes] < EAGER:
            self.calls[shapes] += 1
            return self._eagerly(inputs)
        if shapes not in self.graphs:
            self.graphs[shapes] = self._captured(inputs)
        graph, read, written = self.graphs[shapes]
        for held, new in zip(read, inputs, strict=True):
            held.copy_(new)
        graph.replay()
        return written.clone()

    def _eagerly(self, inputs: tuple[Tensor, ...]) -> Tensor:
        # on the stream of the capture, because autograd remembers the stream of a parameter
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)  # type: ignore[union-attr]
        with torch.cuda.stream(self.stream):
            out = self.function(*inputs)
        current.wait_stream(self.stream)  # type: ignore[arg-type]
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        return out

    def _captured(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        read, graph = [t.clone() for t in inputs], torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # what the calls before held; the graph has memory of its own
        # relaxed: kernels that only a captured call takes are loaded while it is captured
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="relaxed"):
            written = self.function(*read)
        return graph, read, written
