"""Launches a CUDA C++ kernel: describes a launch as data, and repeats it without describing it again. Knows nothing of
attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.errors import InvalidArgument
from saccade.hardware import arch_of
from saccade.launch.cache import LaunchCache
from saccade.nvrtc import Bound, Options, Parameters, Source, load, parameters_of

HEADERS = Path(__file__).parent / "cuda"  # device code that families share


class CudaLaunch(NamedTuple):
    """Everything that a launch needs, so that it can be inspected, or run elsewhere, without a GPU.

    arguments: name -> value. A pointer is given as its tensor, and None is a null pointer; pointers that only each launch knows are
        left out.
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
    arguments: Mapping[str, Any]
    architecture: str | None = None
    dependent: bool = False

    @property
    def parameters(self) -> Parameters:
        """The names and types of the kernel's parameters, in its order."""
        return parameters_of(self.source, self.kernel, self.options)

    def ready(self, device: torch.device) -> Bound:
        """The kernel, loaded on the device, with its arguments after the pointers bound; it is called with all pointers in the order of
        the parameters."""
        kernel = load(self.source, self.kernel, self.options, device, self.architecture)
        launch = kernel.configure(self.grid, self.threads, self.shared_bytes)
        pointers = self.parameters.pointers
        numbers = {name: value for name, value in self.arguments.items() if name not in pointers}
        return launch.bind(numbers, dependent=self.dependent and arch_of(device) >= 90)


# signature of a call -> its launcher: describing a call and looking up its kernel costs 10 to 30 us of host time
_READY = LaunchCache()


def run(
    make: Callable[..., CudaLaunch], tensors: tuple[Tensor | None, ...], options: tuple, about: Callable[[torch.device], Any]
) -> None:
    """Launch what `make(*tensors, *options, about(device))` describes; tensors are the kernel's pointers, in its order, and the `CudaLaunch` gives
    each of them by name."""
    device = tensors[0].device  # type: ignore[union-attr]
    signature = (make, device, options, *[None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
    launch = _READY.get(signature)
    if launch is None:
        call = make(*tensors, *options, about(device))
        check_pointers(call, tensors)
        launch = _READY.remember(signature, call.ready(device))
    launch(*[0 if x is None else x.data_ptr() for x in tensors])


def check_pointers(call: CudaLaunch, tensors: Sequence[Tensor | None]) -> None:
    """Refuse tensors in another order than that of the kernel's pointers: later launches pass only addresses."""
    names = call.parameters.pointers
    wrong = [name for name, x in zip(names, tensors, strict=False) if call.arguments.get(name, call) is not x]
    if wrong or len(names) != len(tensors):
        raise InvalidArgument(
            f"{len(tensors)} tensors are given for the pointers {', '.join(names)} of {call.kernel}; out of place are {', '.join(wrong) or 'none'}"
        )


def strides(**of: Sequence[int]) -> dict[str, int]:
    """Strides by name: `{"key_batch": ..., "key_head": ..., "key_row": ...}` for `strides(key=key.stride()[:3])`."""
    return dict(pair for name, given in of.items() for pair in zip(_names_of(name), given, strict=False))


@functools.cache
def _names_of(tensor: str) -> tuple[str, ...]:
    return tuple(f"{tensor}_{dim}" for dim in ("batch", "head", "row", "column"))


def addresses(**tensors: Tensor | None) -> dict[str, int]:
    """Addresses by name; None is a null pointer."""
    return {name: 0 if x is None else x.data_ptr() for name, x in tensors.items()}
