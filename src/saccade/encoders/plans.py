"""Facts that are kept between calls of a captured model: how calls of one signature run, facts about the model, and how outputs are built."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Build = Callable[[Sequence[Tensor]], Any]  # the output of a model, of its tensors


class Plan(NamedTuple):
    """How calls of one signature run while the model stays as it is.

    reason: why they run as stock; empty if they are captured. names: the tensors of a batch. size: of the graph, a number of rows and a form. trains:
    whether backward is captured too. is_tuple: whether a tuple is asked for.
    """

    reason: str
    names: tuple[str, ...] = ()
    size: tuple[int, Any] = (0, ())
    trains: bool = False
    is_tuple: bool = False


class Changed(Exception):
    """The model has changed since the last call, or the graph of a call is not captured yet: the call is made again."""


class Facts(NamedTuple):
    """The facts about a model and its config that calls need, read anew when they may have changed.

    reason: why every call runs as stock; empty if nothing speaks against packing. longest: positions, None if there is no end. reads_first: whether
    the first column of a batch is read behind the encoder. pooler: what is applied to the padded last layer. most: tokens that a sequence may have.
    has_window: whether a layer has a sliding window.
    """

    reason: str
    longest: int | None
    reads_first: bool
    return_dict: bool
    pooler: Any
    most: int
    has_window: bool


def signature(given: dict[str, Any], ignored: str) -> tuple | None:
    """The facts about arguments from which a `Plan` follows: for tensors all but their numbers. None if there is an argument of another kind, except
    the one that is ignored."""
    found: list[Any] = [torch.is_grad_enabled()]
    for name, x in given.items():
        if type(x) is Tensor:
            found.append((name, x.shape, x.dtype, x.device, x.requires_grad))
        elif x is None or x is True or x is False:
            found.append((name, x))
        elif name != ignored:
            return None
    return tuple(found)


def builder(kind: type[Any], names: list[str]) -> Build:
    """A function that makes an output of a type from tensors of these names.

    An output of transformers is a dict and a dataclass, whose constructor lists its fields again and again: 13 us for two tensors. Here its fields are
    listed once, and it is built in 1 us, if the result is the same.
    """

    def called(tensors: Sequence[Tensor]) -> Any:
        return kind(**dict(zip(names, tensors, strict=True)))

    if not (issubclass(kind, OrderedDict) and hasattr(kind, "__dataclass_fields__")):
        return called
    fields_of: Any = dataclasses.fields
    empty = dict.fromkeys([field.name for field in fields_of(kind)])
    put = OrderedDict.__setitem__

    def filled(tensors: Sequence[Tensor]) -> Any:
        found: Any = kind.__new__(kind)
        fields = found.__dict__
        fields.update(empty)
        for name, x in zip(names, tensors, strict=True):
            fields[name] = x
            put(found, name, x)
        return found

    example = [torch.empty(0) for _ in names]
    return filled if _same(called(example), filled(example)) else called


def _same(x: Any, y: Any) -> bool:
    """Whether two outputs hold the same objects under the same names, in the same order."""
    return all(
        [*map(id, a.values())] == [*map(id, b.values())] and [*a] == [*b]
        for a, b in ((OrderedDict(x), OrderedDict(y)), (vars(x), vars(y)))
    )
