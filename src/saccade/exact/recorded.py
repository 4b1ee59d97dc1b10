"""The common parts of calls of `attention` and `attention_varlen` that C++ replays: when one is recorded, and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.prepare import Prepared
from saccade.exact.ops import Ops
from saccade.exact.problem import mask_of_keys
from saccade.native.described import BY_LISTS
from saccade.native.recording import Recorder


def key_of(call: tuple, by_lists: bool = False) -> tuple[int, ...] | None:
    """The key of a call in C++; None if C++ cannot replay it. by_lists: whether it is a packed batch that goes by lists of lengths."""
    key: tuple[int, ...] | None = native.calls.key(call)
    return (*key, BY_LISTS) if key and by_lists else key


def begin_recording(prepared: Prepared, call: tuple, by_lists: bool = False) -> Recorder | None:
    """A recorder for a call of a kind that C++ does not know yet; None if C++ cannot replay it. by_lists: as of `key_of`."""
    if native.calls is None:
        native.start(prepare.forget)
        return None
    key = key_of(call, by_lists)
    return None if key is None or key in prepared.recorded else Recorder()


def numbers_of(ops: Ops, args: Any) -> dict[str, Any]:
    """The fields of a record that are not tensors, by name."""
    return dict(zip(ops.fields.names[ops.tensors : ops.fields.whole], args[ops.tensors :], strict=False))


class Backward(NamedTuple):
    """The backward of calls of one kind.

    key: of the calls in C++. inputs: names of their tensors. numbers: what `numbers_of` finds. varying: names of numbers that C++ hands over
    after the tensors. fold, unfold: of the tensors by name, and of the gradients, if kernels are given other views of them.

    It lives as long as the process, so it holds no tensor of the call that was recorded.
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
        """The gradients. C++ calls this for an incoming gradient with a layout not seen before. The launches are recorded for later calls."""
        names = (*self.inputs, "lse", "dout", *["out"] * self.prepared.backend.saves_output, *["seed"] * self.has_seed)
        tensors = dict(zip((*names, *self.varying), given, strict=True))
        qkv, dout = tensors.get("qkv"), tensors["dout"]
        into = None if qkv is None else torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        found = self.fold(self._parts(tensors))
        fields = {name: found.get(name) for name in self.ops.fields.names[: self.ops.tensors]}
        args = self.ops.record(**fields, **(self.numbers | {name: found[name] for name in self.varying}))
        backward, bias_grad = self.ops.launchers(self.prepared.op_name).backward, self.prepared.problem.bias_grad
        with torch.no_grad(), Recorder() as recorder:
            # the gradient was copied, or a graph is being captured, which has launches of its own
            recorder.refused = found["dout"].data_ptr() != dout.data_ptr() or (
                dout.is_cuda and torch.cuda.is_current_stream_capturing()
            )
            *gradients, dbias = backward(
                args, found["dout"], None, found.get("out"), found["lse"], bias_grad=bias_grad, packed=into
            )
        rows = self.unfold(tuple(gradients)) if into is None else (into,)
        results = rows if dbias is None else (*rows, dbias.view(tensors["bias"].shape))
        given = given[: len(names)]
        planned = recorder.planned((*given, *results), len(given))
        if planned is not None and native.calls is not None:
            native.calls.remember_backward(self.key, given, planned)
        return results

    def _parts(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors, and those that one of them replaces."""
        found = dict(tensors)
        if "qkv" in found:
            found |= zip(("query", "key", "value"), self.ops.rows.unpack(found["qkv"]), strict=True)
        if "cu_seqlens" in found:
            found |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), found["cu_seqlens"])
        if "key_mask" in found:
            found["mask"] = mask_of_keys(found["key_mask"])
        return found
