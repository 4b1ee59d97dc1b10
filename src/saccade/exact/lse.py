"""Attention with its log-sum-exp on a CPU: forward is torch's flash kernel, backward runs over blocks of queries, and neither
stores all scores.

torch's own backward kernel is not used. It accepts no gradient of the lse and returns none of the bias. It weights the keys by
exp(score - lse), which is wrong by whole factors next to a bias of -1e9, because lse is rounded. Times were measured on one core of
a processor that multiplies only float32. There blocks in plain torch take 1.2 times as long as that kernel in float32, and a fifth
of its time in bfloat16. A column of ones beside the values would bring the gradient of the lse into that kernel; blocks take 1.05
times as long as this.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine.calls import uncast
from saccade.engine.first_order import first_order
from saccade.engine.flops import backward_flops, count_by, pairs_of
from saccade.engine.layout import repeat_heads
from saccade.engine.namespace import NAMESPACE, fragment, packet
from saccade.engine.ranges import shown_as_ours
from saccade.engine.saved import save, saved
from saccade.engine.tracing import eager

_HIDDEN = float("-inf")
# scores that a thread holds at once (1 MiB of float32): the fastest of 2**16 to 2**20 at 512 and 2,048 keys
_BLOCK = 2**18

# queries of a block under is_causal: few enough to skip most of the keys that the block cannot see
_CAUSAL_QUERIES = 128

_library = fragment()
_library.define(
    "lse_backward(Tensor? dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor? added, Tensor lse, "
    "bool is_causal, float scale, bool added_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)


@shown_as_ours
class WithLse(torch.autograd.Function):
    """`(out, lse)` of `[B, H, T, D]`; `added` is torch's attn_mask with four dims: boolean, or floating with a gradient."""

    @staticmethod
    def forward(ctx, query, key, value, added, is_causal, scale):
        out, lse = with_lse(query, key, value, added, is_causal, scale)
        save(ctx, query, key, value, added, lse)
        ctx.numbers = (is_causal, scale)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        if dout is None and dlse is None:
            return (None,) * 6
        tensors = saved(ctx)
        run = _backward if eager(dout, dlse, *tensors) else _OP
        added_grad = ctx.needs_input_grad[3]
        call = (*tensors, *ctx.numbers, added_grad)
        with uncast(tensors[0]):  # a user may run backward inside autocast
            dq, dk, dv, dadded = run(dout, dlse, *call)
        return dq, dk, dv, dadded if added_grad else None, None, None


def with_lse(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of torch's CPU kernel; 0 and -inf for a query that sees no key."""
    batch, heads, q_len, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    if 0 in (batch, heads, q_len, key.shape[2]):
        return torch.zeros_like(query), query.new_full((batch, heads, q_len), _HIDDEN, dtype=wide)
    unseen = None
    if added is not None:
        visible = added if added.dtype == torch.bool else added != _HIDDEN
        unseen = ~visible.any(dim=-1)
        if added.dtype == torch.bool:
            added = torch.zeros(added.shape, dtype=query.dtype, device=added.device).masked_fill(~added, _HIDDEN)
        added = added.expand(*added.shape[:-1], key.shape[2])
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=added, scale=scale
    )
    return out, lse if unseen is None else lse.masked_fill(unseen, _HIDDEN)


def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    added_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dadded), where dadded is empty unless requested: dS = P * (dP - rowsum(P * dP) + dlse), with dP = dout V^T.

    The sum is taken over P * dP and not over dout * out, because out is rounded to 16 bits. The gradient of a bias that is constant
    over the keys is 0; with dout * out it would be that rounding.
    """
    dtype, wide, group = query.dtype, lse.dtype, query.shape[1] // max(key.shape[1], 1)
    unseen = lse == _HIDDEN
    dout = torch.zeros_like(query, dtype=wide) if dout is None else dout.to(wide).masked_fill(unseen.unsqueeze(-1), 0.0)
    # a query that sees nothing has no gradient, even if dlse is NaN there
    dlse = None if dlse is None else dlse.masked_fill(unseen, 0.0).unsqueeze(-1)
    query, dout = (query.to(wide) * scale).contiguous(), dout.contiguous()
    key, value = (repeat_heads(x.to(wide), group).contiguous() for x in (key, value))
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    dadded = torch.zeros_like(added, dtype=wide) if added is not None and added_grad else None
    for batch, heads, time in _blocks(query.shape, key.shape[2], is_causal):
        seen = slice(0, min(time.stop, key.shape[2]) if is_causal else None)  # keys the block may see
        q, g = (x[batch, heads, time].flatten(0, 1) for x in (query, dout))
        k, v = (x[batch, heads, seen].flatten(0, 1) for x in (key, value))
        scores = torch.bmm(q, k.transpose(1, 2)).view(-1, heads.stop - heads.start, q.shape[1], k.shape[1])
        rule = None if added is None else _part(added, batch, heads, time)
        if is_causal:
            rule = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril_(time.start)
        weights = _weights(scores, rule, unseen[batch, heads, time].unsqueeze(-1)).flatten(0, 1)
        dv[batch, heads, seen].flatten(0, 1).baddbmm_(weights.transpose(1, 2), g)
        dscores = torch.bmm(g, v.transpose(1, 2)).mul_(weights)
        shift = dscores.sum(-1, keepdim=True)
        shift = shift if dlse is None else shift.sub_(dlse[batch, heads, time].flatten(0, 1))
        dscores.addcmul_(weights, shift, value=-1)
        torch.bmm(dscores, k, out=dq[batch, heads, time].flatten(0, 1))
        dk[batch, heads, seen].flatten(0, 1).baddbmm_(dscores.transpose(1, 2), q)
        if dadded is not None:
            part = _part(dadded, batch, heads, time)
            part += dscores.view_as(scores).sum_to_size(part.shape)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) if group > 1 else x for x in (dk, dv))
    dadded = query.new_empty(0, dtype=dtype) if added is None or dadded is None else dadded.to(added.dtype)
    return dq.mul_(scale).to(dtype), dk.to(dtype), dv.to(dtype), dadded


def _weights(scores: Tensor, rule: Tensor | None, unseen: Tensor) -> Tensor:
    """The softmax of scores `[b, h, t, Tk]`, computed in place. The whole row is present, so the weights add up to 1 under any
    bias."""
    if rule is None:
        return scores.softmax(-1)
    scores = scores.masked_fill_(~rule, _HIDDEN) if rule.dtype == torch.bool else scores.add_(rule)
    return scores.softmax(-1).masked_fill_(unseen, 0.0)


def _blocks(shape: torch.Size, kv_len: int, is_causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """(batch rows, heads, queries) of each block: as many whole heads and rows as fit, or a part of the queries of one head."""
    batch, heads, q_len, _ = shape
    if 0 in (batch, heads, q_len, kv_len):
        return
    queries = max(1, _BLOCK * torch.get_num_threads() // kv_len)
    if is_causal and q_len > _CAUSAL_QUERIES:
        queries = min(queries, _CAUSAL_QUERIES)
    t, h = min(queries, q_len), min(max(1, queries // q_len), heads)
    b = max(1, queries // (q_len * heads))
    for i in range(0, batch, b):
        for j in range(0, heads, h):
            for k in range(0, q_len, t):
                yield slice(i, min(i + b, batch)), slice(j, min(j + h, heads)), slice(k, min(k + t, q_len))


def _part(added: Tensor, *where: slice) -> Tensor:
    """The part of a tensor `[B or 1, H or 1, Tq or 1, Tk or 1]` that a block sees."""
    return added[tuple(slice(None) if extent == 1 else part for extent, part in zip(added.shape, where, strict=False))]


def _fake_backward(dout, dlse, query, key, value, added, lse, is_causal, scale, added_grad):
    dense = [x.new_empty(x.shape) for x in (query, key, value)]
    return *dense, torch.empty_like(added) if added is not None and added_grad else query.new_empty(0)


_library.impl("lse_backward", _backward, "CPU")
torch.library.register_fake(f"{NAMESPACE}::lse_backward", _fake_backward, lib=_library)
count_by(
    packet("lse_backward"),
    lambda dout, dlse, query, key, value, *_, **named: backward_flops(pairs_of(query, key), query.shape[3], value.shape[3]),
)
_OP = packet("lse_backward").default
