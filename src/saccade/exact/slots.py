"""The common parts of calls of `attention` and `attention_varlen` that C++ replays: where C++ has their tensors, and how backward is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import native
from saccade.engine.prepare import Prepared
from saccade.exact.ops import Ops
from saccade.native.described import Place

_ROWS, _GRADIENTS = ("query", "key", "value"), ("dquery", "dkey", "dvalue")
# tensors that stand for several; those of the first two lie in it one behind another
_PARTS = {"qkv": _ROWS, "dqkv": _GRADIENTS, "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k")}


def slots(names: Iterable[str], third: int = 0) -> dict[str, Place]:
    """The place of each tensor of a call, whose names are given in the order in which C++ has them. third: bytes from query to key in `qkv`."""
    found: dict[str, Place] = {}
    for slot, name in enumerate(names):
        step = 0 if name == "cu_seqlens" else third
        found |= {part: (slot, i * step) for i, part in enumerate(_PARTS.get(name, (name,)))}
    return found


def third_of(qkv: Tensor) -> int:
    """Bytes from query to key in a packed tensor `[.., 3, H, D]`."""
    return qkv.stride(-3) * qkv.element_size()


def numbers_of(ops: Ops, args: Any) -> dict[str, Any]:
    """The fields of a record that are no tensors, by name."""
    return dict(zip(ops.fields.names[ops.tensors : ops.fields.whole], args[ops.tensors :], strict=False))


class Backward(NamedTuple):
    """The backward of calls of one kind.

    key: of the calls, as C++ has it. inputs: names of their tensors. numbers: what `numbers_of` finds. varying: names of numbers that C++ hands over
    after the tensors. fold, unfold: of the tensors by name, and of the gradients, if kernels are given other views of them.

    It lives as long as the process, so it holds no tensor of the call that was described.
    """

    ops: Ops
    prepared: Prepared
    key: Any
    inputs: tuple[str, ...]
    has_seed: bool
    numbers: dict[str, Any]
    varying: tuple[str, ...] = ()
    fold: Callable[[dict[str, Any]], dict[str, Any]] = dict
    unfold: Callable[[tuple], tuple] = tuple

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """The gradients. C++ calls this for an incoming gradient with a layout not seen before. It also describes the launches for later calls."""
        chosen, bias_grad = self.prepared.backend, self.prepared.problem.bias_grad
        names = (*self.inputs, "lse", "dout", *["out"] * chosen.saves_output, *["seed"] * self.has_seed)
        tensors = dict(zip((*names, *self.varying), given, strict=True))
        qkv, dout = tensors.get("qkv"), tensors["dout"]
        into = None if qkv is None else torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        found = self.fold(self._parts(tensors))
        fields = {name: found.get(name) for name in self.ops.fields.names[: self.ops.tensors]}
        args = self.ops.record(**fields, **(self.numbers | {name: found[name] for name in self.varying}))
        folded, out, lse = found["dout"], found.get("out"), found["lse"]
        with torch.no_grad():
            *gradients, dbias = self.ops.launchers(self.prepared.op_name).backward(
                args, folded, None, out, lse, bias_grad=bias_grad, packed=into
            )
        if chosen.describe_backward is not None and native.calls is not None and folded.data_ptr() == dout.data_ptr():
            places = self._places(names, qkv, into, bias_grad)
            planned = chosen.describe_backward(args, folded, out, lse, tuple(gradients), places)
            if planned is not None:
                native.calls.remember_backward(self.key, dout, planned)
        rows = self.unfold(tuple(gradients)) if into is None else (into,)
        return rows if dbias is None else (*rows, dbias.view(tensors["bias"].shape))

    def _parts(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors, and those that one of them stands for."""
        found = dict(tensors)
        if "qkv" in found:
            found |= zip(_ROWS, self.ops.rows.unpack(found["qkv"]), strict=True)
        if "cu_seqlens" in found:
            found |= dict.fromkeys(_PARTS["cu_seqlens"], found["cu_seqlens"])
        return found

    def _places(self, names: tuple[str, ...], qkv: Tensor | None, into: Tensor | None, bias_grad: bool) -> dict[str, Place]:
        rows = _GRADIENTS if into is None else ("dqkv",)
        every = (*names, *rows, *["dbias"] * bias_grad, "scratch")
        places = slots(every, 0 if qkv is None else third_of(qkv))
        if into is not None:
            slot, step = every.index("dqkv"), third_of(into)
            places |= {name: (slot, i * step) for i, name in enumerate(_GRADIENTS)}
        return places
