"""torch.library schemas and fakes of `nm_sparse_attention`: forward and backward, one opaque op each.

The backward of every backend is that of `masked`, which has a faster form for sm_90. It takes the selection that the forward stored, one bit a score, and does not
derive it from scores of its own: another kernel sums `Q K^T` in another order (tile shapes, matrix instructions, TF32), so scores that
nearly tie could be ranked the other way, and P, dS and the saved lse would then belong to different sets of keys. Bits are exact for
any forward. Where they cost too much memory between forward and backward, `recompute_selection` drops them and backward runs the
same forward kernel once more: the same binary on the same numbers, so the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.contract import NMSparseArgs
from saccade.ops import eager, empty_like_heads

_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? block_mask, Tensor? seed, int keep, int group, "
    "float dropout_p, bool is_causal, float scale"
)
GRADIENTS = "masked"  # the backend whose backward serves all

_library = torch.library.Library("saccade", "FRAGMENT")
_library.define(f"nm_sparse_forward({_CALL}, bool stores, str backend) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"nm_sparse_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor kept, {_CALL}, bool bias_grad, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

_recomputing = False


@contextlib.contextmanager
def recompute_selection(enabled: bool = True) -> Iterator[None]:
    """Calls of `nm_sparse_attention` inside keep no selection for backward, which runs their forward once more to get it.

    Saves one bit a score, `B * H * Tq * Tk / 8` bytes a call, between forward and backward; costs one forward. Gradients are the same
    bits. Around whole layers, `torch.utils.checkpoint` does the same.
    """
    global _recomputing
    before, _recomputing = _recomputing, enabled
    try:
        yield
    finally:
        _recomputing = before


def keeps_selection() -> bool:
    """Whether a forward stores its selection for backward."""
    return not _recomputing


def words_of(kv_len: int, group: int) -> int:
    """int32 words of one query's selection; see `NMSparseLaunchers`."""
    return -(-(-(-kv_len // group) * (1 << (group - 1).bit_length())) // 32)


def forward(args: NMSparseArgs, stores: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, kept); kept is empty unless `stores`."""
    run = _forward if eager(*args[:7]) else torch.ops.saccade.nm_sparse_forward
    return run(*args, stores, backend)


def backward(
    args: NMSparseArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, kept: Tensor, bias_grad: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias); dbias is empty unless `bias_grad`. backend: of the forward."""
    run = _backward if eager(dout, dlse, out, lse, kept, *args[:7]) else torch.ops.saccade.nm_sparse_backward
    return run(dout, dlse, out, lse, kept, *args, bias_grad, backend)


@functools.cache
def _launchers(backend: str) -> Any:
    from saccade.alternatives import launchers  # late: it imports the families, which import this module's siblings

    return launchers("nm_sparse_attention", backend)


def _forward(query, key, value, mask, bias, block_mask, seed, keep, group, dropout_p, is_causal, scale, stores, backend):
    args = NMSparseArgs(query, key, value, mask, bias, block_mask, seed, keep, group, dropout_p, is_causal, scale)
    return _launchers(backend).forward(args, stores)


def _backward(dout, dlse, out, lse, kept, *call):
    *arguments, bias_grad, backend = call
    chosen_by_auto = ":" in backend
    found = _launchers(f"auto:{GRADIENTS}" if chosen_by_auto else GRADIENTS)
    dq, dk, dv, dbias = found.backward(NMSparseArgs(*arguments), dout, dlse, out, lse, kept, bias_grad=bias_grad)
    return dq, dk, dv, lse.new_empty(0) if dbias is None else dbias


def _fake_forward(query, key, value, mask, bias, block_mask, seed, keep, group, dropout_p, is_causal, scale, stores, backend):
    batch, heads, q_len, _ = query.shape
    words = (batch, heads, q_len, words_of(key.shape[2], group)) if stores else (0,)
    out, lse = empty_like_heads(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    return out, lse, query.new_empty(words, dtype=torch.int32)


def _fake_backward(dout, dlse, out, lse, kept, *call):
    *arguments, bias_grad, _ = call
    args = NMSparseArgs(*arguments)
    dbias = lse.new_empty(0) if args.bias is None or not bias_grad else args.bias.new_empty(args.bias.shape)
    return *(empty_like_heads(x) for x in args[:3]), dbias


for _name, _implementation, _fake in (
    ("nm_sparse_forward", _forward, _fake_forward),
    ("nm_sparse_backward", _backward, _fake_backward),
):
    _library.impl(_name, _implementation, "CPU")
    _library.impl(_name, _implementation, "CUDA")
    torch.library.register_fake(f"saccade::{_name}", _fake, lib=_library)
