"""Counts what a rank receives through `torch.distributed`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_IDLE = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")  # move nothing


class Traffic(TorchDispatchMode):
    """A context that counts the collectives which this process starts, and the bytes that it receives from others by them.

    calls: how often each op of torch's was called. received: bytes; what a rank sends to itself counts only in an all-to-all. An
        all-reduce counts twice its tensor, as a ring makes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        space, _, short = name.partition("::")
        if space in _NAMESPACES and short not in _IDLE:
            self.calls[short] += 1
            self.received += _received(short, args, result)
        return result


def _bytes(found: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(found) if isinstance(x, Tensor))


def _received(op: str, args: Any, result: Any) -> int:
    if op.startswith(("all_reduce", "allreduce")):
        return 2 * _bytes(args[0])
    # ops of c10d write into their first argument, functional ones return what they make
    made, given = (args[0], args[1]) if op.endswith("_") else (result, args[0])
    if "gather" in op:
        return _bytes(made) - _bytes(given)
    if "reduce_scatter" in op:
        return _bytes(given) - _bytes(made)
    return _bytes(made)
