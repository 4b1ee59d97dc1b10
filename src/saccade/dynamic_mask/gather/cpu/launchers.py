"""Dynamic mask attention on a CPU, in C++ that is compiled for the processor at the first call (`cpp/`).

    for each block of 64 queries (in parallel)
        S^T = K[list] (scale * Q)^T + score        a key a row, a query a lane; rows of K and V are read in place
        hide the keys that some query of the block does not see, softmax, times V[list]

Numbers are float32 whatever the dtype; a result does not depend on the number of threads. Backward recomputes the weights.
Source: paper 004, Eq. 6 to 10 (attention restricted to the kept keys, and its gradients).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade import native
from saccade.errors import InvalidArgument
from saccade.native import library

FOLDER = Path(__file__).parent / "cpp"
# of the rows of K and V, for all processors
_LANES = 16
_BLOCK = 64  # queries, `BLOCK` of cpp/problem.hpp
# Tasks of backward: each adds to its own copy of dK and dV. More tasks would cost more memory than they gain.
_TASKS = 16


class _Problem(ctypes.Structure):
    """`Problem` of cpp/problem.hpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "bias", "start", "stop")),
        *((name, c_int64) for name in ("rows", "group", "q_len", "kv_len", "dim", "value_dim")),
        ("scale", c_float),
    )


class _Gradients(ctypes.Structure):
    """`Gradients` of cpp/backward.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("dout", "delta", "dquery", "dkey", "dvalue", "dbias")),
        ("segments", c_int64),
    )


class _Call:
    """The tensors of a call as C++ takes them; holds them while it runs."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor | None, start: Tensor, stop: Tensor, scale: float
    ):
        _check("query", query, (key.shape[0], query.shape[1], query.shape[2], key.shape[3]))
        _check("value", value, (*key.shape[:3], value.shape[3]))
        if query.shape[1] % key.shape[1]:
            raise InvalidArgument(f"{query.shape[1]} heads of queries are no multiple of {key.shape[1]} heads of keys")
        for name, each, dtype in (("key_scores", key_scores, None), ("start", start, torch.int32), ("stop", stop, torch.int32)):
            if each is not None:
                _check(name, each, key.shape[:3], dtype)
        self.query, self.key, self.value = (_rows(x) for x in (query, key, value))
        self.bias = None if key_scores is None else key_scores.float().contiguous()
        self.start, self.stop = start.contiguous(), stop.contiguous()
        rows = key.shape[0] * key.shape[1]
        self.problem = _Problem(
            *(_address(x) for x in (self.query, self.key, self.value, self.bias, self.start, self.stop)),
            rows, query.shape[1] // key.shape[1], query.shape[2], key.shape[2], self.query.shape[3], self.value.shape[3], scale,
        )  # fmt: skip


def causal_intervals(key_scores: Tensor, keep: int, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(start, stop), int32 `[B, Hkv, Tk]`, as `saccade.dynamic_mask.selection.intervals.causal_intervals` without documents."""
    batch, heads, kv_len = key_scores.shape
    if lengths is not None:
        _check("lengths", lengths, (batch,))
    if keep < 1:
        raise InvalidArgument(f"keep is {keep}; at least one key is kept")
    scores = key_scores.detach().float().contiguous()
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    stop = torch.empty_like(scores, dtype=torch.int32)
    addresses = (_address(scores), _address(lengths), _address(stop))
    _run("saccade_expiry", *addresses, batch * heads, heads, kv_len, keep, _threads())
    return torch.arange(kv_len, dtype=torch.int32, device=scores.device).expand(scores.shape), stop


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor | None,
    start: Tensor,
    stop: Tensor,
    max_new_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out `[B, H, Tq, D]` in the dtype of query and lse `[B, H, Tq]`, float32."""
    if 0 in (*query.shape[:3], key.shape[2]):
        lse = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
        return query.new_zeros(*query.shape[:3], value.shape[3]), lse
    call = _Call(query, key, value, key_scores, start, stop, scale)
    out = query.new_empty(*query.shape[:3], call.value.shape[3], dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    _run("saccade_forward", ctypes.byref(call.problem), _address(out), _address(lse), _threads())
    return out[..., : value.shape[3]].to(query.dtype), lse


def backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor | None,
    start: Tensor, stop: Tensor, max_new_keys: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dscores) in the dtypes of their tensors; dscores is empty without `key_scores`."""
    if 0 in (*query.shape[:3], key.shape[2]):
        dscores = query.new_empty(0) if key_scores is None else torch.zeros_like(key_scores)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), dscores
    call = _Call(query, key, value, key_scores, start, stop, scale)
    for name, each in (("dout", dout), ("out", out)):
        _check(name, each, (*query.shape[:3], value.shape[3]))
    if dlse is not None:
        _check("dlse", dlse, query.shape[:3])
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse.float()
    problem, douts, delta = call.problem, _rows(dout), delta.contiguous()
    segments = min(-(-_TASKS // problem.rows), -(-problem.q_len // _BLOCK))
    dquery = torch.empty_like(call.query)
    dkey, dvalue, dscores = (
        x.new_zeros(segments, *x.shape) for x in (call.key, call.value, lse[:0] if call.bias is None else call.bias)
    )
    found = (douts, delta, dquery, dkey, dvalue, None if call.bias is None else dscores)
    gradients = _Gradients(*map(_address, found), segments)
    _run("saccade_backward", ctypes.byref(problem), ctypes.byref(gradients), _threads())
    return (
        dquery[..., : query.shape[3]].to(query.dtype),
        dkey.sum(0)[..., : key.shape[3]].to(key.dtype),
        dvalue.sum(0)[..., : value.shape[3]].to(value.dtype),
        query.new_empty(0) if key_scores is None else dscores.sum(0).to(key_scores.dtype),
    )


def _check(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """C++ gets addresses, so a tensor with too few elements would be read beyond its end. The op may be called with any tensors."""
    if tuple(tensor.shape) != tuple(shape) or tensor.device.type != "cpu" or (dtype is not None and tensor.dtype != dtype):
        wanted = f"{'' if dtype is None else f'{dtype} of '}shape {list(shape)} on a CPU"
        raise InvalidArgument(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}; this call needs {wanted}"
        )


def _rows(tensor: Tensor) -> Tensor:
    """Contiguous float32, the last dim padded with zeros to a multiple of the widest vector."""
    rows = tensor.detach().float()
    missing = -rows.shape[3] % _LANES
    return (F.pad(rows, (0, missing)) if missing else rows).contiguous()


def _threads() -> int:
    """torch's number of threads; negative in a forked child, whose OpenMP lacks the threads that it still counts."""
    return -torch.get_num_threads() if native.forked else torch.get_num_threads()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "saccade_expiry": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int),
    "saccade_forward": (POINTER(_Problem), c_void_p, c_void_p, c_int),
    "saccade_backward": (POINTER(_Problem), POINTER(_Gradients), c_int),
}


def _run(name: str, *arguments: Any) -> None:
    """Call a function of the library, without Python's lock."""
    function = getattr(library.load(FOLDER), name)
    function.argtypes = _SIGNATURES[name]
    if function(*arguments):
        raise MemoryError(f"{name} could not allocate its lists of keys")
