"""Prepared calls: everything that depends only on the metadata of a call is worked out once for each signature and remembered.

It takes tens of microseconds of host time to describe a call, choose a backend and plan its launches. A small attention takes as
long on the device. The signature holds everything that this work may depend on: shapes, strides, dtypes, devices, flags, numbers
and whether a gradient is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import native
from saccade.engine.arguments import untraced
from saccade.engine.backend import Backend
from saccade.engine.dispatch import Plan, choose
from saccade.engine.record import annotated
from saccade.launch.cache import LaunchCache

_PREPARED: dict[Hashable, Prepared] = {}
_MAX_PREPARED = 4096
_generation = 0  # how often calls were forgotten


class Prepared:
    """A described call and the backend that runs it, as its plan says.

    op_name: the backend as ops name it, with "auto:" before its name if another may take its place.
    recorded: the kinds of the call whose launches C++ knows (`saccade.native`). refused: C++ cannot replay them.
    launches: what the launchers of the backend have worked out for calls of this signature. Each entry is keyed by whatever else
        it depends on (the alignment of addresses, the layout of an incoming gradient).
    """

    __slots__ = ("backend", "launches", "op_name", "problem", "recorded", "refused")

    def __init__(self, plan: Plan):
        # read at every call that Python makes, hence fields of their own
        self.problem, self.backend, self.op_name = plan.problem, plan.backend, plan.op_name
        self.launches, self.recorded, self.refused = LaunchCache(), LaunchCache(), False


class Part(NamedTuple):
    """A mark: the part of a tensor that a signature holds, as an expression in which `@` is the tensor."""

    text: str


WHOLE = Part("type(@), @.shape, @.stride(), @.dtype, @.device")
# with its place in memory: some kernels ask for multiples of 16 bytes
WITH_START = Part(f"{WHOLE.text}, @.storage_offset() * @.element_size() % 16")
# of packed tokens and of their offsets, whose number changes from batch to batch
TOKENS = Part("type(@), @.shape[1:], @.dtype, @.device")
OFFSETS = Part("type(@), @.dtype, @.device, @.stride()")


_FIND = """
def find(call, *others):
    if traced():
        return None, None
    try:
        {names} = call
        signature = ({parts}, others)
        return signature, _PREPARED.get(signature)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # describing the call says what is wrong
        return None, None
"""


def finder(operation: str, record: Any, *relations: str) -> Callable[..., tuple[Hashable | None, Prepared | None]]:
    """`(call, *others) -> (signature, prepared call)` for public calls, tuples in the order of a record; others: whatever else counts.

    There is no signature if the call is traced, or if an argument has the wrong type. There is no prepared call if the signature is new. The function is
    compiled from text, as the constructor of a NamedTuple is: a loop over the fields would take longer than the rest of a call.

    relations: expressions of the fields that belong to the signature too.
    """
    parts = [repr(operation)]
    for name, kind, marks in annotated(record):
        if kind is Tensor:
            part = next((mark for mark in marks if isinstance(mark, Part)), WHOLE)
            parts.append(part.text.replace("@", name))
        elif kind == Tensor | None:
            parts.append(f"None if {name} is None else metadata({name})")
        else:  # 1, 1.0 and True are equal, and not the same number
            parts.append(name if kind in (bool, str) else f"{name}, type({name})")
    made: dict[str, Any] = {}
    exec(_FIND.format(names=", ".join(record._fields), parts=", ".join([*parts, *relations])), globals(), made)
    return made["find"]


def prepare(
    signature: Hashable | None, describe: Callable[..., Any], arguments: tuple, backends: tuple[Backend, ...], backend: str
) -> Prepared:
    """Describe a call and choose its backend; remembered for the calls that follow, unless `signature` is None.

    Raises:
        InvalidArgument, UnsupportedProblem: as `describe` and `dispatch.choose`.
    """
    before = _generation
    with untraced():
        prepared = Prepared(choose(backends, describe(*arguments), backend))
    if signature is not None and before == _generation:  # else another thread has changed what may be chosen
        # only an endless stream of new shapes fills the memory
        if len(_PREPARED) >= _MAX_PREPARED:
            _PREPARED.clear()
        _PREPARED[signature] = prepared
    return prepared


def forget() -> None:
    """Forget every prepared call, so that backends are chosen again, because one of them was disabled."""
    global _generation
    _generation += 1
    _PREPARED.clear()
    native.forget()


def traced() -> bool:
    """Whether a compiler or `torch.jit.trace` traces the call: sizes may be symbols then, and nothing is remembered."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def metadata(tensor: Tensor) -> tuple:
    """The part of a signature that describes an optional tensor."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def wait_for_known_calls(device: torch.device | str, seconds: float = 120.0) -> bool:
    """Wait until C++ replays calls, so that times are those of later calls too; whether it does.

    On a machine's first use C++ is compiled in the background, for some 20 s, while Python makes every call. False without a GPU or a compiler,
    and where it takes longer than `seconds`.
    """
    if torch.device(device).type != "cuda":
        return False
    return native.finish(forget, seconds)
