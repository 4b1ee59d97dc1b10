"""The ops and autograd.Functions of `attention_varlen`, declared from its record."""

from __future__ import annotations

from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from saccade.engine.layout import TOKENS
from saccade.engine.op_replay import OpReplay
from saccade.engine.record import Fields
from saccade.exact.ops import Ops
from saccade.exact.varlen.args import ALIGNMENTS, VarlenArgs
from saccade.exact.varlen.backends import BACKENDS
from saccade.exact.varlen.reference import attend
from saccade.native.described import KEYS, QUERIES


def _shapes(args: VarlenArgs) -> tuple[Any, Any]:
    """Shapes of query and key under which a failure is remembered: the number of tokens changes with each batch."""
    (_, heads, dim), kv_heads = args.query.shape, args.key.shape[1]
    query = SimpleNamespace(shape=(1, heads, args.max_q, dim), dtype=args.query.dtype)
    return query, SimpleNamespace(shape=(1, kv_heads, args.max_k, dim), dtype=args.query.dtype)


def _pairs(args: VarlenArgs) -> int:
    """Pairs of a query and a key of one sequence. Every sequence counts as the longest if lengths have no values, as in torch."""
    offsets, heads = (args.cu_seqlens_q, args.cu_seqlens_k), args.query.shape[1]
    if not all(type(ends) in (Tensor, torch.nn.Parameter) and not ends.is_meta for ends in offsets):
        return heads * (offsets[0].shape[0] - 1) * args.max_q * args.max_k
    return heads * int((offsets[0].diff().long() * offsets[1].diff().long()).sum())


def _replay_of(direction: str, before: tuple[str, ...], after: tuple[str, ...], layouts: Any) -> OpReplay:
    """C++ takes the sizes that change from batch to batch first, then tensors, then numbers. It replays no call with a bias or a gradient of lse.

    before, after: what the op takes before and after the fields of the record.
    """
    fields = Fields(VarlenArgs)
    types = {name: fields.types[name] for name in fields.names[: fields.plain]}
    given = (*before, *types, *after)
    refused = [given.index(name) for name in ("bias", "dlse") if name in given]
    kinds = {kind: [name for name in types if types[name] == kind and name != "bias"] for kind in ("SymInt", "Tensor", "Tensor?")}
    tensors = (*kinds["Tensor"], *[name for name in before if name != "dlse"], *kinds["Tensor?"])
    numbers = [name for name in types if not types[name].startswith(("SymInt", "Tensor"))]
    names = (*kinds["SymInt"], *tensors, *numbers, "backend")
    take, causal = itemgetter(*map(given.index, names)), names.index("causal")

    def call(arguments: tuple) -> tuple | None:
        for i in refused:
            if arguments[i] is not None:
                return None
        found = take(arguments)
        return (*found[:causal], ALIGNMENTS[found[causal]], *found[causal + 1 :], direction)

    return OpReplay(call, layouts)


def _like(tensor: Tensor, tokens: int) -> tuple[Tensor, tuple[int, ...]]:
    """A result of another number of tokens."""
    return tensor.new_empty(0, device="meta"), (tokens, *tensor.shape[1:])


def _forward_layouts(results: tuple[Tensor, ...]) -> list:
    out, lse = results
    return [_like(out, QUERIES), (lse.new_empty(0, device="meta"), (lse.shape[0], QUERIES))]


def _backward_layouts(results: tuple[Tensor, ...]) -> list:
    dq, dk, dv, dbias = results
    return [_like(dq, QUERIES), _like(dk, KEYS), _like(dv, KEYS), dbias.to("meta")]


OPS = Ops(
    "attention_varlen", ("Varlen", "VarlenPacked"), VarlenArgs, BACKENDS, TOKENS,
    attend=attend, pairs=_pairs, shapes=_shapes, needs_out=True,
    replays=(
        _replay_of("forward", (), ("backend",), _forward_layouts),
        _replay_of("backward", ("dout", "dlse", "out", "lse"), ("bias_grad", "backend"), _backward_layouts),
    ),
)  # fmt: skip
