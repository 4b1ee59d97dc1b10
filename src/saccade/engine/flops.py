"""FLOP formulas of the ops, for `torch.utils.flop_counter.FlopCounterMode`: counted as torch counts its own attention.

That module imports Triton, so it is not imported here: formulas are handed over once something else has imported it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

from saccade.engine.record import Fields

_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[Any, Callable[..., int]] = {}


def count_by(packet: Any, formula: Callable[..., int]) -> None:
    """Let torch's counter use `formula` for an op. It takes the arguments of the op, and its outputs as `out_val`."""
    _FORMULAS[packet] = formula
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        _hand_over(counter)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def forward_flops(pairs: int, dim: int, value_dim: int) -> int:
    """The two products of forward, `Q K^T` and `P V`; pairs: of a query and a key, over all batch rows and query heads."""
    return 2 * pairs * (dim + value_dim)


def backward_flops(pairs: int, dim: int, value_dim: int) -> int:
    """The five products of backward: the scores again, dP, dV, dQ and dK."""
    return 2 * pairs * (3 * dim + 2 * value_dim)


def pairs_of(query: Tensor, key: Tensor) -> int:
    """Pairs of a query and a key in `[B, H, Tq, D]` and `[B, Hkv, Tk, D]`. Pairs that a mask hides count, as in torch."""
    batch, heads, q_len, _ = query.shape
    return batch * heads * q_len * key.shape[2]


def by_pairs(
    fields: Fields, pairs: Callable[[Any], int], before: int = 0, unpack: Callable[[Tensor], tuple[Tensor, ...]] | None = None
) -> Callable[..., int]:
    """The formula of an op that takes the fields of a record: of forward, or of backward if it takes `before` tensors first.

    pairs: of a query and a key, for the record of a call. unpack: query, key and value of a first argument that holds all three.
    """
    # fields with defaults come after the op's own arguments
    names = (*fields.names[: fields.plain], *([None] * (2 if before else 1)), *fields.names[fields.plain :])
    if unpack is not None:
        names = ("qkv", *names[3:])
    found = backward_flops if before else forward_flops

    def formula(*given: Any, out_val: Any = None, **named: Any) -> int:
        pairs_of_names = zip(names, given[before:], strict=False)
        call = {name: x for name, x in pairs_of_names if name is not None} | {
            name: named[name] for name in names if name in named
        }
        if unpack is not None:
            call |= dict(zip(fields.names[:3], unpack(call.pop("qkv")), strict=True))
        args = fields.record(**call)
        return found(pairs(args), args.query.shape[-1], args.value.shape[-1])

    return formula


def _hand_over(counter: ModuleType) -> None:
    for packet, formula in _FORMULAS.items():
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(formula)


class _Waiting(importlib.abc.MetaPathFinder):
    """An import hook that finds no module. When torch's counter is imported, it removes itself and hands over the formulas after
    that import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hand_over(module: ModuleType) -> None:
                execute(module)
                _hand_over(module)

            spec.loader.exec_module = execute_and_hand_over  # type: ignore[method-assign]
        return spec
