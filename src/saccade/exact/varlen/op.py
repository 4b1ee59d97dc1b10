"""torch.library schemas and fakes of `attention_varlen`: forward and backward, one opaque op each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from saccade.engine.alternatives import Alternatives
from saccade.engine.namespace import fragment
from saccade.engine.tracing import eager, register
from saccade.exact.varlen import flops, op_again
from saccade.exact.varlen.args import VarlenArgs, VarlenLaunchers
from saccade.exact.varlen.backends import BACKENDS
from saccade.exact.varlen.standin import STAND_IN

_OPTIONS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? bias, Tensor? seed, SymInt max_q, SymInt max_k, float dropout_p, int causal, float scale"
_CALL = f"Tensor query, Tensor key, Tensor value, {_OPTIONS}"

_library = fragment()
_library.define(f"attention_varlen_forward({_CALL}, str backend) -> (Tensor, Tensor)")
_library.define(
    f"attention_varlen_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL}, bool bias_grad, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_varlen_packed_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor qkv, {_OPTIONS}, bool bias_grad, "
    "str backend) -> (Tensor, Tensor)"
)


def _join(alternatives: Alternatives, chain: tuple[str, ...]) -> VarlenLaunchers:
    def forward(args: VarlenArgs) -> Any:
        return alternatives.attempt(chain, *_shapes(args), lambda found: found.forward(args))

    def backward(args: VarlenArgs, *given: Any, **options: Any) -> Any:
        return alternatives.attempt(chain, *_shapes(args), lambda found: found.backward(args, *given, **options))

    return VarlenLaunchers(forward, backward)


def _shapes(args: VarlenArgs) -> tuple[Any, Any]:
    """What a failure is remembered by, of query and key: the number of tokens changes with each batch."""
    (_, heads, dim), kv_heads = args.query.shape, args.key.shape[1]
    query = SimpleNamespace(shape=(1, heads, args.max_q, dim), dtype=args.query.dtype)
    return query, SimpleNamespace(shape=(1, kv_heads, args.max_k, dim), dtype=args.query.dtype)


_by_name = {backend.name: backend for backend in BACKENDS}
launchers = Alternatives("attention_varlen", BACKENDS, ("reference",), STAND_IN, _join).launchers


def forward(args: VarlenArgs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of a backend with its own kernels, through the op where somebody watches."""
    run = _forward if eager(*args[:7]) else _FORWARD
    return run(*args[:-1], backend)


def backward(
    args: VarlenArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias); dbias is empty unless `bias_grad`."""
    run = _backward if eager(dout, dlse, out, lse, *args[:7]) else _BACKWARD
    return run(dout, dlse, out, lse, *args[:-1], bias_grad, backend)


def packed_backward(
    qkv: Tensor, args: VarlenArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """(dqkv, dbias); dbias is empty unless `bias_grad`."""
    run = _packed_backward if eager(dout, dlse, out, lse, qkv, *args[3:7]) else _PACKED_BACKWARD
    return run(dout, dlse, out, lse, qkv, *args[3:-1], bias_grad, backend)


def _forward(query, key, value, cu_seqlens_q, cu_seqlens_k, bias, seed, max_q, max_k, dropout_p, causal, scale, backend):
    args = VarlenArgs(query, key, value, cu_seqlens_q, cu_seqlens_k, bias, seed, max_q, max_k, dropout_p, causal, scale)
    return launchers(backend).forward(args)


def _known_forward(*call):
    """`_forward` of compiled programs, which C++ makes again."""
    found = op_again.made(op_again.forward_call(*call))
    if found is not None:
        return found
    results = _forward(*call)
    op_again.offer_forward(_by_name[call[-1].rpartition(":")[2]], call, results)
    return results


def _known_backward(*call):
    found = op_again.made(op_again.backward_call(*call))
    if found is not None:
        return found
    results = _backward(*call)
    op_again.offer_backward(_by_name[call[-1].rpartition(":")[2]], call, results)
    return results


def _backward(dout, dlse, out, lse, *call):
    *arguments, bias_grad, backend = call
    args = VarlenArgs(*arguments)
    dq, dk, dv, dbias = launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=None)
    return dq, dk, dv, lse.new_empty(0) if dbias is None else dbias


def _packed_backward(dout, dlse, out, lse, qkv, *call):
    *arguments, bias_grad, backend = call
    args = VarlenArgs(*qkv.unbind(1), *arguments)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    *_, dbias = launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=dqkv)
    return dqkv, lse.new_empty(0) if dbias is None else dbias


def _fake_forward(query, key, value, *call):
    tokens, heads, _ = query.shape
    return _like(query), query.new_empty((heads, tokens), dtype=torch.float32)


def _fake_backward(dout, dlse, out, lse, *call):
    *arguments, bias_grad, _ = call
    args = VarlenArgs(*arguments)
    return *(_like(x) for x in args[:3]), _fake_dbias(lse, args.bias, bias_grad)


def _fake_packed_backward(dout, dlse, out, lse, qkv, cu_seqlens_q, cu_seqlens_k, bias, *call):
    return _like(qkv), _fake_dbias(lse, bias, call[-2])


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _fake_dbias(lse: Tensor, bias: Tensor | None, bias_grad: bool) -> Tensor:
    return _like(bias) if bias is not None and bias_grad else lse.new_empty(0)


_FORWARD = register(_library, "attention_varlen_forward", _known_forward, _fake_forward, flops.forward)
_BACKWARD = register(_library, "attention_varlen_backward", _known_backward, _fake_backward, flops.backward)
_PACKED_BACKWARD = register(
    _library, "attention_varlen_packed_backward", _packed_backward, _fake_packed_backward, flops.packed_backward
)
