"""Launches a CUDA C++ kernel: describes a launch as data, and repeats it without describing it again. Knows nothing of
attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.hardware import arch_of
from saccade.launch.cache import LaunchCache
from saccade.nvrtc import Bound, Options, Source, load

HEADERS = Path(__file__).parent / "cuda"  # device code that families share


class Call(NamedTuple):
    """Everything that a launch needs, so that it can be inspected, or run elsewhere, without a GPU.

    arguments: (declared type, value), pointers first; a pointer is given as its tensor, and None is a null pointer.
    architecture: as for `load`.
    dependent: the kernel may start while its predecessor in the stream still runs, and waits for it itself
        (`cuda/dependent.cuh`).
    """

    source: Source
    kernel: str
    options: Options
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[tuple[str, Any], ...]
    architecture: str | None = None
    dependent: bool = False

    def ready(self, device: torch.device) -> Bound:
        """The kernel, loaded on the device, with its arguments after the pointers bound."""
        kinds = tuple(kind for kind, _ in self.arguments)
        kernel = load(self.source, self.kernel, kinds, self.options, device, self.architecture)
        numbers = tuple(value for kind, value in self.arguments if kind != "pointer")
        launch = kernel.configure(self.grid, self.threads, self.shared_bytes)
        return launch.bind(*numbers, dependent=self.dependent and arch_of(device) >= 90)


# signature of a call -> its launcher: describing a call and looking up its kernel costs 10 to 30 us of host time
_READY = LaunchCache()


def run(
    make: Callable[..., Call], tensors: tuple[Tensor | None, ...], options: tuple, about: Callable[[torch.device], Any]
) -> None:
    """Launch what `make(*tensors, *options, about(device))` describes; tensors are the kernel's pointers, in its order."""
    device = tensors[0].device  # type: ignore[union-attr]
    signature = (make, device, options, *[None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
    launch = _READY.get(signature) or _READY.remember(signature, make(*tensors, *options, about(device)).ready(device))
    launch(*[0 if x is None else x.data_ptr() for x in tensors])


def typed(kind: str, *values: Any) -> tuple[tuple[str, Any], ...]:
    """Arguments of one declared type."""
    return tuple((kind, value) for value in values)
