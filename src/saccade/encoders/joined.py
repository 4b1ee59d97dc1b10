"""One matrix product for several `nn.Linear` modules that read the same tensor, whose weights may lie side by side in one memory.

```
x Wq' + bq, x Wk' + bk, x Wv' + bv  =  the three parts of  x [Wq; Wk; Wv]' + [bq; bk; bv]
```

Parameters that were moved side by side keep a storage of their own, as DLPack gives a slice one. With views of one storage, `torch.save` would write the
whole of it for each, and safetensors would refuse or drop them. Parameters that lie elsewhere are concatenated by a copy, with the same result.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.engine.flops import count_by
from saccade.engine.namespace import NAMESPACE, packet

# joined memory by its address: it lives as long as the `Joined` that made it
_memory: weakref.WeakValueDictionary[int, Joined] = weakref.WeakValueDictionary()
_apart = threading.local()  # `found`: addresses of parameters that a product of this thread had to concatenate
_ALIGNED = 16  # bytes; kernels of torch's compiler copy inputs with a smaller alignment


class Joined:
    """Parameters that lie side by side. Dropping it leaves them where they are."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        with torch.inference_mode(False), torch.no_grad():
            self.memory = torch.cat([x.detach() for x in self.parameters])
            parts = self.memory.split([x.shape[0] for x in self.parameters])
            for x, part in zip(self.parameters, parts, strict=True):
                x.data = torch.from_dlpack(part)
        self.address = self.memory.data_ptr()
        _memory[self.address] = self

    def _here(self) -> list[nn.Parameter]:
        first, last = self.address, self.address + self.memory.nbytes
        return [x for x in self.parameters if first <= x.data_ptr() < last]

    def holds(self) -> bool:
        """Whether a parameter still lies here."""
        return bool(self._here())

    def separate(self) -> None:
        """Give the parameters that still lie here a memory of their own."""
        with torch.inference_mode(False):
            for x in self._here():
                x.data = x.data.clone()


@contextmanager
def looking() -> Iterator[list[tuple[int, ...]]]:
    """The addresses of the parameters that products of this thread put together by a copy meanwhile."""
    found: list[tuple[int, ...]] = []
    _apart.found = found
    try:
        yield found
    finally:
        _apart.found = None


def join(model: nn.Module, wanted: Sequence[tuple[int, ...]]) -> list[Joined]:
    """Move parameters of a model side by side. A group stays unchanged unless each is a plain parameter with its own memory."""
    by_address: dict[int, list[nn.Parameter]] = {}
    for x in model.parameters():
        by_address.setdefault(x.untyped_storage().data_ptr(), []).append(x)
    found = []
    for addresses in dict.fromkeys(wanted):
        groups = [by_address.get(address, []) for address in addresses]
        if len(set(addresses)) == len(addresses) and all(len(group) == 1 and _is_movable(group[0]) for group in groups):
            found.append(Joined([x for (x,) in groups]))
    return found


def _is_movable(x: nn.Parameter) -> bool:
    """Whether the parameter is alone in its memory, so that a part of a larger memory may replace it."""
    own = type(x) is nn.Parameter and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return own and x.nbytes % _ALIGNED == 0 and not (x.device.type == "cpu" and x.is_shared())


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor, without a copy if they lie so."""
    joined = _memory.get(parts[0].data_ptr())
    if joined is not None and joined.memory.dtype == parts[0].dtype:
        address, rows = joined.address, 0
        for x in parts:
            if x.data_ptr() != address or not x.is_contiguous():
                break
            address, rows = address + x.nbytes, rows + x.shape[0]
        else:
            if rows == joined.memory.shape[0]:
                return joined.memory
    found = getattr(_apart, "found", None)
    if found is not None:
        found.append(tuple([x.data_ptr() for x in parts]))
    return torch.cat(list(parts))


@torch.library.custom_op(f"{NAMESPACE}::joined_linear", mutates_args=())
def _linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return F.linear(x, _side_by_side(weights), _side_by_side(biases) if biases else None)


@_linear.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum([w.shape[0] for w in weights]))


@torch.library.custom_op(f"{NAMESPACE}::joined_matmul", mutates_args=())
def _matmul(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [Wq; Wk; Wv], the gradient of what the product read."""
    return x @ _side_by_side(weights)


@_matmul.register_fake
def _(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[0].shape[1])


def _saved(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, biases = inputs
    ctx.save_for_backward(x, *weights)
    ctx.biases = len(biases)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    x, *weights = ctx.saved_tensors
    rows = [w.shape[0] for w in weights]
    dout_rows = dout.reshape(-1, dout.shape[-1])
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad
    dx = packet("joined_matmul")(dout, weights) if needs_x else None
    dweights: list[Tensor | None] = [None] * len(weights)
    if any(needs_weights):
        dweights = list((dout_rows.t() @ x.reshape(-1, x.shape[-1])).split(rows))
    dbiases: list[Tensor | None] = [None] * ctx.biases
    if any(needs_biases):
        dbiases = list(dout_rows.sum(0).split(rows))
    return dx, dweights, dbiases


_linear.register_autograd(_backward, setup_context=_saved)


def _flops(x: Tensor, weights: Sequence[Tensor], *biases: Any, **options: Any) -> int:
    """A product of every row of x with every weight."""
    rows = x.numel() // max(x.shape[-1], 1)
    return 2 * rows * sum([w.numel() for w in weights])


for _name in ("joined_linear", "joined_matmul"):
    count_by(packet(_name), _flops)


def product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """`F.linear` of the weights and biases put together, `[..., sum of their rows]`."""
    if torch.is_autocast_enabled(x.device.type):
        # autocast casts the copy, which torch's compiler makes in the same kernel
        return F.linear(x, torch.cat(list(weights)), torch.cat(list(biases)) if biases else None)
    found: Tensor = _linear(x, weights, biases)
    return found
