"""One autograd.Function per operation (two for attention: separate and packed inputs).

Old-style Functions (ctx in forward) on purpose: the `setup_context` form costs three times as much per call.
Second derivatives, jvp and vmap raise; nothing here returns a silent zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade import ops, ops_dynamic_mask, ops_nm_sparse
from saccade.calls import uncast
from saccade.first_order import first_order
from saccade.kernels.aside import FAILURES
from saccade.kernels.contract import AttentionArgs, NMSparseArgs
from saccade.ops import eager
from saccade.saved import save, saved


class Attention(torch.autograd.Function):
    """`(out, lse) = attention(query, key, value)` with the backend's own backward."""

    @staticmethod
    def forward(ctx, query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, plan, backend, saves_output):
        args = AttentionArgs(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, plan)
        out, lse = ops.forward(args, backend)
        save(ctx, query, key, value, mask, bias, lengths, seed, lse, out if saves_output else None)
        ctx.numbers = args[7:]
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        query, key, value, mask, bias, lengths, seed, lse, out = saved(ctx)
        if dout is None and dlse is None:
            return (None,) * 13
        if dout is None:
            dout = query.new_zeros(()).expand(*query.shape[:3], value.shape[3])
        bias_grad = bias is not None and ctx.needs_input_grad[4]
        args = AttentionArgs(query, key, value, mask, bias, lengths, seed, *ctx.numbers)
        dq, dk, dv, dbias = ops.backward(args, dout, dlse, out, lse, bias_grad, ctx.backend)
        return dq, dk, dv, None, dbias if bias_grad else None, *(None,) * 8


class AttentionPacked(torch.autograd.Function):
    """The same for `qkv` of shape `[B, S, 3, H, D]`; the gradient is one packed tensor, written in place of a concatenation."""

    @staticmethod
    def forward(ctx, qkv, mask, bias, lengths, seed, dropout_p, is_causal, scale, plan, backend, saves_output):
        args = AttentionArgs(*ops.unpack(qkv), mask, bias, lengths, seed, dropout_p, is_causal, scale, plan)
        out, lse = ops.forward(args, backend)
        save(ctx, qkv, mask, bias, lengths, seed, lse, out if saves_output else None)
        ctx.numbers = args[7:]
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        qkv, mask, bias, lengths, seed, lse, out = saved(ctx)
        if dout is None and dlse is None:
            return (None,) * 11
        if dout is None:
            batch, time, _, heads, dim = qkv.shape
            dout = qkv.new_zeros(()).expand(batch, heads, time, dim)
        bias_grad = bias is not None and ctx.needs_input_grad[2]
        args = AttentionArgs(*ops.unpack(qkv), mask, bias, lengths, seed, *ctx.numbers)
        dqkv, dbias = ops.packed_backward(args, dout, dlse, out, lse, qkv, bias_grad, ctx.backend)
        return dqkv, None, dbias if bias_grad else None, *(None,) * 8


class DynamicMask(torch.autograd.Function):
    """`(out, lse) = dynamic_mask_attention(query, key, value, key_scores)` for keys kept by the positions `start..stop`."""

    @staticmethod
    def forward(ctx, query, key, value, key_scores, start, stop, most, scale, backend):
        out, lse = ops_dynamic_mask.forward(query, key, value, key_scores, start, stop, most, scale, backend)
        save(ctx, query, key, value, key_scores, start, stop, out, lse)
        ctx.numbers = (most, scale, backend)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        *call, out, lse = saved(ctx)
        dq, dk, dv, dscores = _dynamic_mask_gradients(dout, dlse, out, lse, (*call, *ctx.numbers))
        return dq, dk, dv, None if call[3] is None else dscores, *(None,) * 5


class CausalDynamicMask(torch.autograd.Function):
    """`(out, lse, faulty)` by a call that selects too (`ops_dynamic_mask.causal_call`); numbers: adds_scores, keep, scale, backend."""

    @staticmethod
    def forward(ctx, query, key, value, key_scores, lengths, call, numbers):
        out, lse, intervals, faulty = call(query, key, value, key_scores, lengths)
        adds_scores, *ctx.numbers = numbers
        save(ctx, query, key, value, key_scores if adds_scores else None, intervals, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse, faulty

    @staticmethod
    def unrecorded(query, key, value, key_scores, lengths, call, numbers):
        """The same where no gradient is asked for."""
        out, lse, _, faulty = call(query, key, value, key_scores, lengths)
        return out, lse, faulty

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None, _: None):
        query, key, value, key_scores, intervals, out, lse = saved(ctx)
        found = None
        if dout is not None and eager(dout, dlse):
            try:
                found = ctx.call.backward(dout, dlse, out, lse, query, key, value, key_scores, intervals)
            except FAILURES:
                if ":" not in ctx.numbers[-1]:  # a backend asked for by its name
                    raise
        if found is None:
            call = (query, key, value, key_scores, *intervals.unbind(0), *ctx.numbers)
            found = _dynamic_mask_gradients(dout, dlse, out, lse, call)
        dq, dk, dv, dscores = found
        return dq, dk, dv, None if key_scores is None else dscores, None, None, None


def _dynamic_mask_gradients(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, call: tuple
) -> tuple[Tensor | None, ...]:
    """Of query, key, value and key_scores; call: the arguments of `ops_dynamic_mask.forward`."""
    if dout is None and dlse is None:
        return (None,) * 4
    if dout is None:
        dout = torch.zeros_like(out)
    with uncast(out):  # somebody may run backward inside autocast
        return ops_dynamic_mask.backward(dout, dlse, out, lse, *call)


class NMSparse(torch.autograd.Function):
    """`(out, lse) = nm_sparse_attention(query, key, value)`, differentiated for the selection that this forward made."""

    @staticmethod
    def forward(
        ctx, query, key, value, mask, bias, block_mask, seed, keep, group, dropout_p, is_causal, scale, backend, stores, bias_grad
    ):
        args = NMSparseArgs(query, key, value, mask, bias, block_mask, seed, keep, group, dropout_p, is_causal, scale)
        out, lse, kept = ops_nm_sparse.forward(args, stores, backend)
        save(ctx, query, key, value, mask, bias, block_mask, seed, out, lse, kept if stores else None)
        ctx.numbers = args[7:]
        ctx.backend, ctx.bias_grad = backend, bias_grad
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        *tensors, out, lse, kept = saved(ctx)
        if dout is None and dlse is None:
            return (None,) * 15
        if dout is None:
            dout = torch.zeros_like(out)
        args = NMSparseArgs(*tensors, *ctx.numbers)
        if kept is None:
            *_, kept = ops_nm_sparse.forward(args, True, ctx.backend)
        dq, dk, dv, dbias = ops_nm_sparse.backward(args, dout, dlse, out, lse, kept, ctx.bias_grad, ctx.backend)
        return dq, dk, dv, None, dbias if ctx.bias_grad else None, *(None,) * 10
