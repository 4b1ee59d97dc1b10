"""Calls that are captured once in a CUDA graph and replayed with the numbers of each case."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class ReadsOffsets(ABC):
    """A call that reads what it has counted itself, and where a captured one reads it."""

    @abstractmethod
    def __call__(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """(out, lse)."""

    @abstractmethod
    def read_again(self, x: Any) -> None:
        """Count anew, after the numbers of `x` have changed."""


def replayed(run: Callable[[Any], Any], way: str) -> Callable[[Any], Any]:
    """`run` captured with its backward in a CUDA graph by the first call and replayed by all, where that is the way of the stack."""
    if way != "graph":
        return run
    captured: list[tuple[Any, Any]] = []

    def replay(x: Any) -> tuple[Tensor, Tensor | None]:
        names = [n for n in _own(x) if getattr(x, n).requires_grad]
        if not captured:
            captured.append((_captured(run, x, names), x))
        graph, first = captured[0]
        for name in _own(x):
            if name not in (*names, "dout", "dlse"):  # these are given to the graph
                getattr(first, name).copy_(getattr(x, name))
        if isinstance(run, ReadsOffsets):
            run.read_again(first)
        # a graph's outputs and gradients lie where those of the next replay will: a product with 1 takes them elsewhere
        found = [y * 1 for y in graph(*(getattr(x, n) * 1 for n in names))]
        return found[0], found[1] if len(found) > 1 else None

    return replay


def captured_packed(
    call: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], offsets: Sequence[Tensor]
) -> Callable[..., tuple[Tensor, ...]]:
    """`call` captured with the sequences in the opposite order, and replayed with those of the case: a graph must read its offsets at each replay."""
    distinct: dict[int, Tensor] = {id(x): x for x in offsets}
    kept = [(x, x.clone()) for x in distinct.values()]
    for x, right in kept:
        x[1:] = right.diff().flip(0).cumsum(0)
    with _nothing_freed():
        graph: Any = torch.cuda.make_graphed_callables(call, _leaves(tensors), allow_unused_input=True)
    for x, right in kept:
        x.copy_(right)
    # results and gradients lie where the next replay puts its own: a product with 1 takes them elsewhere
    return lambda *given: tuple(y * 1 for y in graph(*(x * 1 for x in given)))


def _leaves(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Tensors to capture with. Rows that share memory cannot be written to, which replaying with other numbers does."""
    return tuple((x.detach().clone() if 0 in x.stride() else x.detach()).requires_grad_() for x in tensors)


def _own(x: Any) -> list[str]:
    """The fields of inputs that are tensors and not views of another."""
    views = ("query", "key", "value") if getattr(x, "qkv", None) is not None else ()
    return [f.name for f in dataclasses.fields(x) if f.name not in views and isinstance(getattr(x, f.name), Tensor)]


def _captured(run: Callable[[Any], Any], x: Any, names: list[str]) -> Callable[..., Any]:
    """A function of the named fields of `x`, whose others it reads from where they are."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(y for y in run(dataclasses.replace(x, **dict(zip(names, tensors, strict=True)))) if y is not None)

    with _nothing_freed():
        return torch.cuda.make_graphed_callables(call, _leaves(getattr(x, n) for n in names), allow_unused_input=True)


@contextlib.contextmanager
def _nothing_freed() -> Iterator[None]:
    """A context in which no garbage is collected: a graph of an earlier case that is freed while another is captured ends the capture."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
