"""Numbers and flags that users give, as plain Python ones.

A plan is remembered by the values of a call's numbers. A tensor hashes by identity instead: were one accepted, the value it held at the
first call would serve all later ones. So whatever is no plain number is refused, and nothing refused is remembered.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from saccade.errors import InvalidArgument

_INFINITE = float("inf")
_SYMBOLIC = (torch.SymInt, torch.SymFloat)  # sizes of a traced program, and numbers made of them


# what `torch.jit.trace` was about when `untraced` paused it
_paused: list[Any] = []


_set_trace = torch._C._set_tracing_state  # type: ignore[attr-defined]


def untraced() -> contextlib.AbstractContextManager[None]:
    """While `torch.jit.trace` runs, sizes are numbers inside, where otherwise they are tensors: what describes a call needs numbers."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() or not torch.jit.is_tracing() else _pause()


@contextlib.contextmanager
def _pause() -> Iterator[None]:
    _paused.append(torch._C._get_tracing_state())
    _set_trace(None)
    try:
        yield
    finally:
        _set_trace(_paused.pop())


def check_scale(scale: Any, head_dim: int) -> float:
    """`scale` as a float; None is `1 / sqrt(D)`."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    allowed = "it must be a finite number, or None for 1/sqrt(D)"
    number = _real(scale)
    if number is None:
        hint = "; to learn or compute it, multiply query by it and pass scale=1.0" if isinstance(scale, Tensor) else ""
        raise InvalidArgument(f"scale is {_shown(scale)}; {allowed}{hint}")
    if not -_INFINITE < number < _INFINITE:  # not math.isfinite, which torch.compile does not trace for sizes that vary
        raise InvalidArgument(f"scale is {scale!r}; {allowed}")
    return number


def check_probability(name: str, value: Any) -> float:
    """A probability of dropping, below 1, as a float."""
    number = _real(value)
    if number is None or not 0.0 <= number < 1.0:
        raise InvalidArgument(f"{name} is {_shown(value)}; allowed is 0 <= {name} < 1")
    return number


def check_flag(name: str, value: Any) -> bool:
    """True or False. A number that equals one of them counts as it, since both find the same remembered plan."""
    if isinstance(value, bool):
        return value
    if isinstance(value, torch.SymBool):
        return bool(value)
    if _is_traced(value):
        value = _traced(value)
    if isinstance(value, numbers.Real) or type(value).__module__ == "numpy":
        plain = value.item() if hasattr(value, "item") and not getattr(value, "shape", None) else value
        if isinstance(plain, numbers.Real) and plain in (0, 1):
            return bool(plain)
    raise InvalidArgument(f"{name} is {_shown(value)}; it must be True or False")


def check_keep(keep: Any) -> int:
    """How many keys to keep, as an int."""
    whole = None
    if not isinstance(keep, bool):
        if isinstance(keep, (int, torch.SymInt)):
            whole = keep
        elif isinstance(keep, numbers.Integral):
            whole = int(keep)
        elif _is_traced(keep) and not keep.is_floating_point():
            whole = int(_traced(keep))
    if whole is None or whole < 1:
        raise InvalidArgument(f"keep is {_shown(keep)}; it must be a whole number of keys, at least 1")
    return whole  # type: ignore[return-value]


def _real(value: Any) -> float | None:
    """A plain number as a float, None for anything else."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, _SYMBOLIC):
        return value  # type: ignore[return-value]
    if _is_traced(value):
        value = _traced(value)
    return float(value) if isinstance(value, numbers.Real) else None


def _is_traced(value: Any) -> bool:
    """Whether this is a number that `torch.jit.trace` shows as a tensor: sizes, and what is computed of them."""
    return bool(_paused) and isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad


def _traced(value: Tensor) -> Any:
    """That number; torch warns that the trace holds it as a constant, as it does wherever a tensor becomes a number."""
    _set_trace(_paused[-1])
    try:
        return value.item()
    finally:
        _set_trace(None)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a torch.Tensor of shape {list(value.shape)}"
    return repr(value)
