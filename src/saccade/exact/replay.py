"""Calls of `attention` that C++ replays (`saccade.native`): which calls qualify, and how Python describes them to C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.layout import shares_memory, strides_like_heads
from saccade.engine.prepare import Prepared
from saccade.engine.problem import replayable
from saccade.engine.switch import is_disabled
from saccade.exact.args import AttentionArgs
from saccade.exact.op import OPS
from saccade.exact.problem import by_window, in_one_batch
from saccade.exact.recorded import Backward, begin_recording, numbers_of
from saccade.native.recording import Recorder


def begin(prepared: Prepared, call: tuple) -> Recorder | None:
    """A recorder for a call that C++ is to replay: once for each kind of calls that C++ distinguishes."""
    return None if prepared.refused or not call[0].is_cuda or prepare.traced() else begin_recording(prepared, call)


def record(
    prepared: Prepared,
    call: tuple,
    inputs: tuple[Tensor, ...],
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None,
    recorder: Recorder,
) -> None:
    """Describe a call that Python has made to C++.

    call: all arguments of the public function, in their order. inputs: the tensors among them, query, key and value or one packed
        tensor, then the mask or bias if there is one, then the lengths, then the mask of keys given with a bias.
    """
    if is_disabled():  # another thread may have disabled the library during the call, and forgotten all calls
        return
    problem, chosen, told = prepared.problem, prepared.backend, False
    prepared.recorded.remember(native.calls.key(call), True)
    if replayable(problem) and chosen.own_dropout and args.lengths is None:
        told = _record_torch(prepared, call, inputs, args)
    elif replayable(problem) and chosen.replays and lse is not None and (args.bias is None or not shares_memory(args.bias)):
        told = _record_ours(prepared, call, inputs, args, out, lse, recorder)
    prepared.refused = not told


def _record_torch(prepared: Prepared, call: tuple, inputs: tuple[Tensor, ...], args: AttentionArgs) -> bool:
    """Describe a call that torch's own function computes; whether C++ can replay it."""
    problem, added = prepared.problem, args.mask if args.bias is None else args.bias
    grouped = problem.heads != problem.kv_heads
    if inputs[0].dim() == 5 or not prepared.backend.takes_as_it_is(args) or (grouped and added is not None) or problem.key_mask:
        return False
    seen = hidden = None
    if args.mask is not None:
        seen, hidden = (torch.tensor(x, dtype=args.query.dtype, device=args.query.device) for x in (0.0, float("-inf")))
    native.calls.remember_torch(call, float(problem.dropout_p), problem.is_causal, problem.scale, grouped, seen, hidden)
    return True


def _record_ours(
    prepared: Prepared, call: tuple, inputs: tuple[Tensor, ...], args: AttentionArgs, out: Tensor, lse: Tensor, recorder: Recorder
) -> bool:
    """Describe a call that our own kernels compute; whether C++ can replay it."""
    problem, chosen = prepared.problem, prepared.backend
    packed, seed = problem.packed, () if args.seed is None else (args.seed,)
    names, given = _names(args, packed), inputs
    # tensors that the kernel took in place of the given ones: lengths converted to int32, one row of an expanded mask
    replaced = ("lengths", "mask")
    inputs = tuple([getattr(args, name) if name in replaced else x for name, x in zip(names, given, strict=True)])
    lengths, mask = [names.index(name) if name in names else -1 for name in replaced]
    wide = lengths >= 0 and inputs[lengths] is not given[lengths]
    expanded = mask if mask >= 0 and inputs[mask] is not given[mask] else -1
    forward = recorder.planned((*inputs, out, lse, *seed), len(inputs))
    if forward is None:
        return False
    empty = [_like(x, packed) for x in (inputs[:1] if packed else args[:3])] if problem.needs_grad else []
    if problem.bias_grad and args.bias is not None:
        empty.append(torch.empty(args.bias.shape, dtype=args.bias.dtype, device="meta"))
    if problem.windows:
        empty = [by_window(problem, x) for x in empty[:3]] + [x.view(given[3].shape) for x in empty[3:]]
    form = (packed, chosen.saves_output, bool(seed), lengths, problem.kv_len, wide, expanded, problem.return_lse)
    folds = (_in_one_batch, lambda rows: tuple([by_window(problem, x) for x in rows])) if problem.windows else (dict, tuple)
    backward = Backward(OPS, prepared, native.calls.key(call), names, bool(seed), numbers_of(OPS, args), (), *folds)
    native.calls.remember(call, out.transpose(1, 2) if packed else out, lse, forward, empty, backward, form)
    return True


def _names(args: AttentionArgs, packed: bool) -> tuple[str, ...]:
    """Names of the tensors among the arguments of the public function, in their order. A mask given with a bias is a mask of keys, which is the last."""
    rows = ("qkv",) if packed else ("query", "key", "value")
    beside = args.mask is not None and args.bias is not None
    added = [name for name in ("mask", "bias", "lengths") if getattr(args, name) is not None and not (beside and name == "mask")]
    return (*rows, *added, *["key_mask"] * beside)


def _like(tensor: Tensor, packed: bool) -> Tensor:
    """A tensor without data that has the layout of a gradient."""
    if packed:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, strides_like_heads(tensor), dtype=tensor.dtype, device="meta")


def _in_one_batch(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of images and windows as kernels take them."""
    rows = ("query", "key", "value", "mask", "bias", "dout", "out")
    folded = {name: in_one_batch(x) for name, x in tensors.items() if name in rows}
    return tensors | folded | {"lse": tensors["lse"].flatten(0, 1)}
