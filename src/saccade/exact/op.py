"""torch.library schemas and fake implementations of `attention`; the real implementations are looked up by the name of the
backend.

There is one opaque op for each direction. `Library.define` with a plain `autograd.Function` around it costs about a third of
`custom_op` with `register_autograd` per call (10.9 against 31.9 us on one slow CPU core), which is visible on short sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.engine.alternatives import Alternatives
from saccade.engine.layout import empty_like_heads, unpack
from saccade.engine.namespace import fragment
from saccade.engine.tracing import eager, register
from saccade.exact import flops, op_again
from saccade.exact.args import AttentionArgs, Launchers
from saccade.exact.backends import BACKENDS
from saccade.exact.standin import STAND_IN

_CALL = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? lengths, Tensor? seed, float dropout_p, bool is_causal, float scale"

_library = fragment()
_library.define(f"attention_forward({_CALL}, str backend) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor? out, Tensor lse, {_CALL}, bool bias_grad, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_packed_backward(Tensor dout, Tensor? dlse, Tensor? out, Tensor lse, Tensor qkv, Tensor? mask, Tensor? bias, Tensor? lengths, "
    "Tensor? seed, float dropout_p, bool is_causal, float scale, bool bias_grad, str backend) -> (Tensor, Tensor)"
)


def _join(alternatives: Alternatives, chain: tuple[str, ...]) -> Launchers:
    def forward(args: AttentionArgs) -> Any:
        return alternatives.attempt(chain, args.query, args.key, lambda found: found.forward(args))

    def backward(args: AttentionArgs, *given: Any, **options: Any) -> Any:
        return alternatives.attempt(chain, args.query, args.key, lambda found: found.backward(args, *given, **options))

    return Launchers(forward, backward)


launchers = Alternatives("attention", BACKENDS, ("reference",), STAND_IN, _join).launchers
_by_name = {backend.name: backend for backend in BACKENDS}


def forward(args: AttentionArgs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of a backend with its own kernels; called through the op where the call is traced or otherwise observed."""
    if eager(*args[:7]):
        return launchers(backend).forward(args)
    return _FORWARD(*args[:10], backend)


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor, bias_grad: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dbias); dbias is only valid if `bias_grad` is set."""
    if eager(dout, dlse, *args[:7]):
        return launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=None)
    return _BACKWARD(dout, dlse, out, lse, *args[:10], bias_grad, backend)


def packed_backward(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    qkv: Tensor,
    bias_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """(dqkv, dbias); dbias is only valid if `bias_grad` is set."""
    if eager(dout, dlse, qkv, *args[3:7]):
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        *_, dbias = launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=dqkv)
        return dqkv, dbias
    return _PACKED_BACKWARD(dout, dlse, out, lse, qkv, *args[3:10], bias_grad, backend)


def _attention_forward(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, backend):
    call = (query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, backend, "forward")
    found = op_again.made(call)
    if found is not None:
        return found
    args = AttentionArgs(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, op_again.launches_for(call))
    results = launchers(backend).forward(args)
    op_again.offer_forward(_by_name[backend.rpartition(":")[2]], call, args, results)
    return results


def _attention_backward(
    dout, dlse, out, lse, query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, bias_grad, backend
):
    call = (
        dout, dlse, out, lse, query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, bias_grad, backend, "backward"
    )  # fmt: skip
    found = op_again.made(call)
    if found is not None:
        return found
    args = AttentionArgs(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, op_again.launches_for(call))
    dq, dk, dv, dbias = launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=None)
    results = dq, dk, dv, lse.new_empty(0) if dbias is None else dbias
    op_again.offer_backward(_by_name[backend.rpartition(":")[2]], call, args, results)
    return results


def _attention_packed_backward(
    dout, dlse, out, lse, qkv, mask, bias, lengths, seed, dropout_p, is_causal, scale, bias_grad, backend
):
    args = AttentionArgs(*unpack(qkv), mask, bias, lengths, seed, dropout_p, is_causal, scale)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    *_, dbias = launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=dqkv)
    return dqkv, lse.new_empty(0) if dbias is None else dbias


def _fake_forward(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, backend):
    batch, heads, q_len, _ = query.shape
    return empty_like_heads(query, value.shape[3]), query.new_empty((batch, heads, q_len), dtype=torch.float32)


def _fake_dbias(lse: Tensor, bias: Tensor | None, bias_grad: bool) -> Tensor:
    return torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if bias is not None and bias_grad else lse.new_empty(0)


def _fake_backward(
    dout, dlse, out, lse, query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, bias_grad, backend
):
    return empty_like_heads(query), empty_like_heads(key), empty_like_heads(value), _fake_dbias(lse, bias, bias_grad)


def _fake_packed_backward(dout, dlse, out, lse, qkv, mask, bias, lengths, seed, dropout_p, is_causal, scale, bias_grad, backend):
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device), _fake_dbias(lse, bias, bias_grad)


_FORWARD = register(_library, "attention_forward", _attention_forward, _fake_forward, flops.forward)
_BACKWARD = register(_library, "attention_backward", _attention_backward, _fake_backward, flops.backward)
_PACKED_BACKWARD = register(
    _library, "attention_packed_backward", _attention_packed_backward, _fake_packed_backward, flops.packed_backward
)
