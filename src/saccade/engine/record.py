"""Reads the record of an operation: the one place that lists its arguments.

A record is a NamedTuple. Its annotations say what each field is (`Tensor`, `Tensor | None`, or a number), and marks add what a type cannot say. An
operation has two records. From the arguments of its public function follow the signature of prepared calls and the placements of shards. From those of
its kernels follow schemas, fakes, autograd.Functions and FLOP formulas (`Fields`).
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor

_GRADIENT, _SYMBOL = "has a gradient", "may be a symbol"

Differentiable = Annotated[Tensor, _GRADIENT]
DifferentiableOrNone = Annotated[Tensor | None, _GRADIENT]
# a size, which a traced program may not know
Size = Annotated[int, _SYMBOL]
# marks of the last fields, which no op takes: backward gets the value of forward, or only the launchers set it for their kernels
BACKWARD_TOO, LAUNCHERS_ONLY = "backward gets it", "only launchers set it"


class Same(NamedTuple):
    """A mark: an autograd.Function takes None for this tensor if it is the tensor of another field."""

    field: str


_KINDS: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "int", float: "float"}


class Fields:
    """The fields of a record, whose tensors come first: query, key and value, the others, the numbers, then what no op takes.

    tensors, plain, count, whole: how many fields are tensors, how many an op takes before its own arguments and in all, and how many an
    autograd.Function takes. extra: the place of the one tensor with a gradient after query, key and
    value. same: pairs of places from `Same`.
    """

    def __init__(self, record: Any):
        self.record = record
        self.names, kinds, marks = zip(*annotated(record), strict=True)
        ours = [BACKWARD_TOO in marked or LAUNCHERS_ONLY in marked for marked in marks]
        self.count = len(ours) - sum(ours)
        self.whole = self.count + sum(BACKWARD_TOO in marked for marked in marks)
        # of the fields that an op takes: name -> type in its schema
        self.types = {
            name: _type(*of) for name, of in zip(self.names[: self.count], zip(kinds, marks, strict=True), strict=False)
        }
        written = list(self.types.values())
        # fields with defaults are the last arguments of an op, after its own
        self.plain = sum(name not in record._field_defaults for name in self.types)
        self.tensors = sum(kind.startswith("Tensor") for kind in written)
        self.extra = next(i for i, marked in enumerate(marks) if i > 2 and _GRADIENT in marked)
        same = [(i, mark.field) for i, marked in enumerate(marks) for mark in marked if isinstance(mark, Same)]
        self.same = [(i, self.names.index(name)) for i, name in same]
        assert self.names[:3] == ("query", "key", "value"), record
        assert not any(kind.startswith("Tensor") for kind in written[self.tensors :]), record
        assert not any(ours[: self.count]), record

    def schema(self, packed: bool = False) -> str:
        """The parameters of an op, without those that have defaults; with one `qkv` in place of query, key and value if `packed`."""
        written = [f"{kind} {name}" for name, kind in self.types.items() if name not in self.record._field_defaults]
        return ", ".join(["Tensor qkv", *written[3:]] if packed else written)

    def defaults(self) -> list[str]:
        """The parameters with defaults. They are the last of an op, so that programs exported without them still run."""
        found = self.record._field_defaults
        return [f"{kind} {name}={found[name]}" for name, kind in self.types.items() if name in found]


def annotated(record: Any) -> list[tuple[str, Any, tuple]]:
    """Name, type and marks of each field."""
    hints = get_type_hints(record, include_extras=True)
    found = []
    for name in record._fields:
        kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        found.append((name, kind, tuple(marks)))
    return found


def _type(kind: Any, marks: tuple) -> str:
    return "SymInt" if _SYMBOL in marks else _KINDS[kind]
