"""torch.library schemas and fakes of the operations, and their implementations looked up by backend name.

One opaque boundary per direction. `Library.define` with a plain `autograd.Function` around it costs about a third of
`custom_op` with `register_autograd` per call (10.9 against 31.9 us on one slow CPU core), which is visible on short sequences.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.contract import AttentionArgs, Backend

_CALL = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? lengths, Tensor? seed, float dropout_p, bool is_causal, float scale"

_library = torch.library.Library("saccade", "DEF")
_library.define(f"attention_forward({_CALL}, str backend) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor? out, Tensor lse, {_CALL}, bool bias_grad, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_packed_backward(Tensor dout, Tensor? dlse, Tensor? out, Tensor lse, Tensor qkv, Tensor? mask, Tensor? bias, Tensor? lengths, "
    "Tensor? seed, float dropout_p, bool is_causal, float scale, bool bias_grad, str backend) -> (Tensor, Tensor)"
)


def empty_like_heads(tensor: Tensor, last_dim: int | None = None) -> Tensor:
    """A new dense tensor of the shape of `[B, H, T, D]`, with time outside heads in memory if `tensor` has it so.

    This is the layout models want back: a view of `[B, T, H, D]` in gives a view of a contiguous `[B, T, H, D]` out.
    """
    strides = strides_like_heads(tensor, last_dim)
    return torch.empty_strided(
        (*tensor.shape[:3], tensor.shape[3] if last_dim is None else last_dim), strides, dtype=tensor.dtype, device=tensor.device
    )


def strides_like_heads(tensor: Tensor, last_dim: int | None = None) -> tuple[int, int, int, int]:
    """Strides of `empty_like_heads`."""
    _, heads, time, dim = tensor.shape
    dim = dim if last_dim is None else last_dim
    if tensor.stride(1) < tensor.stride(2):
        return time * heads * dim, dim, heads * dim, 1
    return heads * time * dim, time * dim, dim, 1


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value as `[B, H, S, D]` views of a packed `[B, S, 3, H, D]`."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


@functools.cache
def load(backend: Backend) -> Any:
    """The launchers of a backend, whose kernels are imported at the first call."""
    assert backend.launchers is not None, f"backend {backend.name} is plain torch and has no launchers"
    return backend.launchers()


@functools.cache
def _launchers(backend: str) -> Any:
    from saccade.alternatives import launchers  # late: it imports the families, which import this module

    return launchers("attention", backend)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def eager(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors that nobody traces, fakes, maps over or records.

    Then the implementation may be called in place of the op, whose dispatch costs 5 of the 16 us of a small call.
    """
    return (
        {type(t) for t in tensors} <= _PLAIN
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def forward(args: AttentionArgs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of a backend with its own kernels, through the op where somebody watches."""
    if eager(*args[:7]):
        return _launchers(backend).forward(args)
    return attention_forward(*args[:10], backend)


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor, bias_grad: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dbias); dbias means nothing unless `bias_grad`."""
    if eager(dout, dlse, *args[:7]):
        return _launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=None)
    return attention_backward(dout, dlse, out, lse, *args[:10], bias_grad, backend)


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
    """(dqkv, dbias); dbias means nothing unless `bias_grad`."""
    if eager(dout, dlse, qkv, *args[3:7]):
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        *_, dbias = _launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=dqkv)
        return dqkv, dbias
    return attention_packed_backward(dout, dlse, out, lse, qkv, *args[3:10], bias_grad, backend)


def _attention_forward(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, backend):
    args = AttentionArgs(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale)
    return _launchers(backend).forward(args)


def _attention_backward(
    dout, dlse, out, lse, query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, bias_grad, backend
):
    args = AttentionArgs(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale)
    dq, dk, dv, dbias = _launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=None)
    return dq, dk, dv, lse.new_empty(0) if dbias is None else dbias


def _attention_packed_backward(
    dout, dlse, out, lse, qkv, mask, bias, lengths, seed, dropout_p, is_causal, scale, bias_grad, backend
):
    args = AttentionArgs(*unpack(qkv), mask, bias, lengths, seed, dropout_p, is_causal, scale)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    *_, dbias = _launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=dqkv)
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


for _name, _implementation, _fake in (
    ("attention_forward", _attention_forward, _fake_forward),
    ("attention_backward", _attention_backward, _fake_backward),
    ("attention_packed_backward", _attention_packed_backward, _fake_packed_backward),
):
    _library.impl(_name, _implementation, "CPU")
    _library.impl(_name, _implementation, "CUDA")
    torch.library.register_fake(f"saccade::{_name}", _fake, lib=_library)

attention_forward = torch.ops.saccade.attention_forward.default
attention_backward = torch.ops.saccade.attention_backward.default
attention_packed_backward = torch.ops.saccade.attention_packed_backward.default
