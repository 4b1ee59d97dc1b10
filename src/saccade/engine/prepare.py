"""Prepared calls: what depends only on the metadata of a call is worked out once for each signature and remembered.

Describing a call, choosing a backend and planning its launches takes tens of microseconds of host time, as long as a small
attention takes on the device. The signature holds everything that this may depend on: shapes, strides, dtypes, devices, flags,
numbers and whether a gradient is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine.arguments import untraced
from saccade.engine.backend import Backend
from saccade.engine.dispatch import choose
from saccade.launch.cache import LaunchCache

_PREPARED: dict[Hashable, Prepared] = {}
_MAX_PREPARED = 4096


class Prepared:
    """A described call and the backend that runs it.

    asked: the backend as ops name it, with "auto:" before its name where another may take its place.
    offered: whether C++ was told of the call (`saccade.native`).
    launches: what the launchers of the backend have worked out for calls of this signature. Each entry is keyed by whatever else
        it depends on (the alignment of addresses, the layout of an incoming gradient).
    """

    __slots__ = ("asked", "backend", "launches", "offered", "problem")

    def __init__(self, problem: Any, backend: Backend, asked: str):
        self.problem, self.backend, self.asked = problem, backend, asked
        self.launches, self.offered = LaunchCache(), False


def remembered(signature: Hashable) -> Prepared | None:
    """The prepared call of a signature.

    The wings make the signature and call this inline: one function for both, with the signature as a closure, takes 0.5 us longer.

    Raises:
        TypeError: the signature holds something without a hash, which is no plain number.
    """
    return _PREPARED.get(signature)


def prepare(
    signature: Hashable | None, describe: Callable[..., Any], arguments: tuple, backends: tuple[Backend, ...], backend: str
) -> Prepared:
    """Describe a call and choose its backend; remembered for the calls that follow, unless `signature` is None.

    Raises:
        InvalidArgument, UnsupportedProblem: as `describe` and `dispatch.choose`.
    """
    with untraced():
        problem = describe(*arguments)
        chosen = choose(backends, problem, backend)
        prepared = Prepared(problem, chosen, chosen.asked(backend))
    if signature is not None:
        # only a stream of ever new shapes fills the memory
        if len(_PREPARED) >= _MAX_PREPARED:
            _PREPARED.clear()
        _PREPARED[signature] = prepared
    return prepared


def forget() -> None:
    """Forget every prepared call, so that backends are chosen anew: one of them was set aside."""
    _PREPARED.clear()
    native.forget()


def traced() -> bool:
    """Whether a compiler or `torch.jit.trace` traces the call: sizes may be symbols then, and nothing is remembered."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def metadata(tensor: Tensor) -> tuple:
    """The part of a signature that describes an optional tensor."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def wait_for_known_calls(device: torch.device | str, seconds: float = 120.0) -> bool:
    """Wait until calls that were made before are made again from C++, so that times are those of later calls too; whether they are.

    On a machine's first use C++ is compiled in the background, for some 20 s, while Python makes every call. False without a GPU or a compiler,
    and where it takes longer than `seconds`.
    """
    if torch.device(device).type != "cuda":
        return False
    return native.finish(forget, seconds)
