"""The prepared call: what depends on the metadata of a call alone, worked out once for each signature and remembered.

To describe a call, choose a backend and plan its launches takes tens of microseconds of host time, as much as a small attention takes on
the device. A signature is all that this may depend on: shapes, strides, dtypes, devices, flags, numbers and whether a gradient is needed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine.backend import Backend
from saccade.engine.dispatch import choose
from saccade.launch.cache import LaunchCache

_PREPARED: dict[Hashable, Prepared] = {}
_MAX_PREPARED = 4096


class Prepared:
    """A described call and who runs it.

    asked: the backend as ops name it, "auto:" before its name where another may take its place.
    offered: whether C++ was told of the call (`saccade.native`).
    launches: what the launchers of the backend have worked out for calls of this signature, by what else it depends on (the
        alignment of addresses, the layout of an incoming gradient).
    """

    __slots__ = ("asked", "backend", "launches", "offered", "problem")

    def __init__(self, problem: Any, backend: Backend, asked: str):
        self.problem, self.backend, self.asked = problem, backend, asked
        self.launches, self.offered = LaunchCache(), False


def prepare(backends: tuple[Backend, ...], problem: Any, backend: str) -> Prepared:
    """Choose the backend of a described call.

    Raises:
        InvalidArgument, UnsupportedProblem: as `dispatch.choose`.
    """
    chosen = choose(backends, problem, backend)
    return Prepared(problem, chosen, chosen.asked(backend))


def remembered(signature: Hashable) -> Prepared | None:
    """The prepared call of a signature.

    Raises:
        TypeError: the signature holds something that has no hash, so that it is no plain number.
    """
    return _PREPARED.get(signature)


def remember(signature: Hashable | None, prepared: Prepared) -> Prepared:
    """Keep a prepared call for the calls that follow; None for a signature that must not be kept."""
    if signature is not None:
        if len(_PREPARED) >= _MAX_PREPARED:  # a stream of ever new shapes
            _PREPARED.clear()
        _PREPARED[signature] = prepared
    return prepared


def forget() -> None:
    """Choose anew: a backend was set aside."""
    _PREPARED.clear()
    native.forget()


def traced() -> bool:
    """Whether a compiler or `torch.jit.trace` follows the call: sizes may be symbols then, and nothing is remembered."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def metadata(tensor: Tensor) -> tuple:
    """What a signature holds of an optional tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
