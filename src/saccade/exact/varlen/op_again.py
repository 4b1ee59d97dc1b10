"""Calls of the ops of `attention_varlen` that C++ makes again (`saccade.native`), as compiled programs make them, for any batch of a kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.backend import Backend
from saccade.exact.varlen.args import VarlenArgs
from saccade.launch.aside import failure_of
from saccade.native.described import KEYS, QUERIES, Described, Place

_ALIGNMENTS = ("full", "upper", "lower")
_INPUTS = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
# keys of calls that C++ cannot make
_REFUSED: set[tuple] = set()


def forward_call(query, key, value, cu_q, cu_k, bias, seed, max_q, max_k, dropout_p, causal, scale, backend) -> tuple | None:
    """A forward call as C++ looks it up; None with a bias."""
    if bias is not None:
        return None
    options = dropout_p, _ALIGNMENTS[causal], scale, backend, "forward"
    return (max_q, max_k, query, key, value, cu_q, cu_k, seed, *options)


def backward_call(
    dout, dlse, out, lse, query, key, value, cu_q, cu_k, bias, seed, max_q, max_k, dropout_p, causal, scale, bias_grad, backend
) -> tuple | None:
    """The same for backward; None with a bias or a gradient of lse."""
    if bias is not None or dlse is not None:
        return None
    options = dropout_p, _ALIGNMENTS[causal], scale, backend, "backward"
    return (max_q, max_k, query, key, value, cu_q, cu_k, dout, out, lse, seed, *options)


def made(call: tuple | None) -> tuple[Tensor, ...] | None:
    """The results of a call of a kind that C++ knows."""
    return None if native.calls is None or call is None else native.calls.compute(*call)


def offer_forward(chosen: Backend, given: tuple, results: tuple[Tensor, Tensor]) -> None:
    """Describe a forward call that Python has made."""
    call, args = forward_call(*given), VarlenArgs(*given[:-1])
    if call is None or chosen.describe_launches is None or chosen.limits is None or not _may_offer(chosen, call, args):
        return
    out, lse = results
    names = (*_INPUTS, *["seed"] * (args.seed is not None), "out", "lse")
    launches = chosen.describe_launches(args, out, lse, _places(names))
    shapes = (_like(out, QUERIES.slot), (lse.new_empty(0, device="meta"), (lse.shape[0], QUERIES.slot)))
    _remember(call, shapes, launches, (), (), chosen.limits(args))


def offer_backward(chosen: Backend, given: tuple, results: tuple[Tensor, ...]) -> None:
    """Describe a backward call that Python has made."""
    call, (dout, _, out, lse), args = backward_call(*given), given[:4], VarlenArgs(*given[4:-2])
    if call is None or chosen.describe_backward is None or chosen.limits is None or not _may_offer(chosen, call, args):
        return
    names = (*_INPUTS, "dout", "out", "lse", *["seed"] * (args.seed is not None), "dquery", "dkey", "dvalue", "none", "scratch")
    planned = chosen.describe_backward(args, dout, out, lse, results[:3], _places(names))
    shapes = *(_like(x, tokens.slot) for x, tokens in zip(results, (QUERIES, KEYS, KEYS), strict=False)), results[3].to("meta")
    if planned is None:
        _remember(call, shapes, None, (), (), ())
    else:
        _remember(call, shapes, planned.launches, planned.scratch, planned.per_query, chosen.limits(args))


def _may_offer(chosen: Backend, call: tuple, args: VarlenArgs) -> bool:
    """Not while a graph is captured, nor what was refused, nor where the launchers ran another backend or tensors had to be copied."""
    query = args.query
    if not query.is_cuda or torch.cuda.is_current_stream_capturing() or any(x.stride(-1) != 1 for x in args[:5]):
        return False
    if native.calls is None:
        native.start(prepare.forget)
        return False
    heads, kv_heads, dim = query.shape[1], args.key.shape[1], query.shape[2]
    ran = chosen.operation, chosen.name, (1, heads, args.max_q, dim), (1, kv_heads, args.max_k, dim), query.dtype
    return native.calls.key(call) not in _REFUSED and failure_of(ran) is None


def _places(names: tuple[str, ...]) -> dict[str, Place]:
    return {name: (slot, 0) for slot, name in enumerate(names)}


def _like(tensor: Tensor, tokens: int) -> tuple[Tensor, tuple[int, ...]]:
    """A result of another number of tokens."""
    return tensor.new_empty(0, device="meta"), (tokens, *tensor.shape[1:])


def _remember(
    call: tuple, results: tuple[Any, ...], launches: list[Described] | None, scratch: tuple, per_query: tuple, limits: tuple
) -> None:
    if launches is not None:
        native.calls.remember_op(call, results, launches, scratch, per_query, limits)
        return
    if len(_REFUSED) >= 4096:  # only a stream of ever new shapes gets here
        _REFUSED.clear()
    _REFUSED.add(native.calls.key(call))
