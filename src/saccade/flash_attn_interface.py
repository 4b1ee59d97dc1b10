"""The functions of flash-attn 2 by their names and argument orders, so that `import saccade.flash_attn_interface as flash_attn` serves code written for it.

Tensors are laid out as in flash-attn: `[B, S, H, D]`, packed `[T, H, D]`. A causal mask and a window are aligned with the last key (lower right), and -1 is no
limit of a window. Arguments without a counterpart here raise `InvalidArgument`: ALiBi slopes, soft caps, paged keys, and the sinks that FlashAttention-3 calls
`s_aux`. With `deterministic=True` on a GPU, a kernel of ours computes every call that needs a gradient, since torch's kernels add dq in varying order. If none of
ours supports the call, it is refused. `torch.use_deterministic_algorithms(True)` holds for every call. Source: Dao, FlashAttention-2 (2023), and the signatures of
its package.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from saccade.engine.arguments import check_flag, shown
from saccade.engine.calls import autocast, gradient_needed
from saccade.engine.kinds import check_kinds
from saccade.engine.prepare import prepare
from saccade.engine.window import Window, check_window, ends_of, in_window
from saccade.errors import InvalidArgument
from saccade.exact.api import attention
from saccade.exact.backends import BACKENDS
from saccade.exact.problem import describe_attention
from saccade.exact.varlen.api import attend
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, FULL_BOTTOM_RIGHT

# kernels of ours add every gradient in a fixed order
_DETERMINISTIC = tuple(b for b in BACKENDS if b.launchers is not None and not b.is_reference)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """`saccade.attention_varlen` in the layout of flash-attn.

    Args:
        q: `[Tq, H, D]`.
        k: `[Tk, Hkv, D]`; Hkv may divide H.
        v: `[Tk, Hkv, D]`.
        cu_seqlens_q: int32 `[B + 1]`, 0, then the end of each sequence of q.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: at least the longest sequence of q; an int, or an integer tensor without dimensions, which waits for the device.
        max_seqlen_k: the same for k and v.
        dropout_p: probability of dropping a weight.
        softmax_scale: factor on the scores, `1/sqrt(D)` by default.
        causal: a query sees keys up to its own position, aligned with the last key.
        window_size: `(left, right)`, keys that a query sees on each side; -1 for no limit.
        softcap: must be 0.0.
        alibi_slopes: must be None.
        deterministic: gradients are the same bits every run.
        return_attn_probs: also return lse, as `(out, lse, None)`.
        block_table: must be None.
        s_aux: must be None.

    Returns:
        out `[Tq, H, D]`, or `(out, lse, None)` with lse float32 `[H, Tq]`.

    Raises:
        InvalidArgument: a bad argument, or one without a counterpart here.
        UnsupportedProblem: on a GPU with `deterministic=True`, a call that needs a gradient and that no kernel of ours supports.
    """
    _refuse(softcap, alibi_slopes, block_table, s_aux)
    causal, window = check_flag("causal", causal), _window(window_size)
    q, k, v = autocast(q, k, v)
    found = attend(
        (
            q, k, v, cu_seqlens_q, cu_seqlens_k, _longest(max_seqlen_q), _longest(max_seqlen_k), dropout_p, _alignment(causal, window), softmax_scale, True,
            None, window, return_attn_probs, _backend_of_packed(deterministic, q, k, v),
        )
    )  # fmt: skip
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`saccade.attention_varlen_qkvpacked` with the argument order of flash-attn.

    Args:
        qkv: `[T, 3, H, D]`.
        cu_seqlens: int32 `[B + 1]`, 0, then the end of each sequence.
        max_seqlen: as `max_seqlen_q` of `flash_attn_varlen_func`.
        dropout_p: as in `flash_attn_varlen_func`.
        softmax_scale: as in `flash_attn_varlen_func`.
        causal: as in `flash_attn_varlen_func`.
        window_size: as in `flash_attn_varlen_func`.
        softcap: as in `flash_attn_varlen_func`.
        alibi_slopes: as in `flash_attn_varlen_func`.
        deterministic: as in `flash_attn_varlen_func`.
        return_attn_probs: as in `flash_attn_varlen_func`.

    Returns:
        out `[T, H, D]`, or `(out, lse, None)` with lse float32 `[H, T]`.

    Raises:
        InvalidArgument: a bad argument, or one without a counterpart here.
        UnsupportedProblem: on a GPU with `deterministic=True`, a call that needs a gradient and that no kernel of ours supports.
    """
    _refuse(softcap=softcap, alibi_slopes=alibi_slopes)
    _check_shape("qkv", qkv, ("T", 3, "H", "D"))
    causal, window = check_flag("causal", causal), _window(window_size)
    longest = _longest(max_seqlen)
    (qkv,) = autocast(qkv)
    found = attend(
        (
            *qkv.unbind(1), cu_seqlens, cu_seqlens, longest, longest, dropout_p, _alignment(causal, window), softmax_scale, False,
            None, window, return_attn_probs, _backend_of_packed(deterministic, qkv),
        ),
        qkv,
    )  # fmt: skip
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """`saccade.attention` in the layout of flash-attn. If Tq differs from Tk, a causal mask and a window take a mask `[Tq, Tk]`.

    Args:
        q: `[B, Tq, H, D]`.
        k: `[B, Tk, Hkv, D]`; Hkv may divide H.
        v: `[B, Tk, Hkv, D]`.
        dropout_p: as in `flash_attn_varlen_func`.
        softmax_scale: as in `flash_attn_varlen_func`.
        causal: as in `flash_attn_varlen_func`.
        window_size: as in `flash_attn_varlen_func`.
        softcap: as in `flash_attn_varlen_func`.
        alibi_slopes: as in `flash_attn_varlen_func`.
        deterministic: as in `flash_attn_varlen_func`.
        return_attn_probs: as in `flash_attn_varlen_func`.
        s_aux: must be None.

    Returns:
        out `[B, Tq, H, D]`, or `(out, lse, None)` with lse float32 `[B, H, Tq]`.

    Raises:
        InvalidArgument: a bad argument, or one without a counterpart here.
        UnsupportedProblem: on a GPU with `deterministic=True`, a call that needs a gradient and that no kernel of ours supports.
    """
    _refuse(softcap, alibi_slopes, s_aux=s_aux)
    causal, window = check_flag("causal", causal), _window(window_size)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_shape(name, tensor, ("B", "S", "H", "D"))
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    q_len, k_len = query.shape[2], key.shape[2]
    mask = None
    if (causal or window is not None) and q_len != k_len:
        # `attention` aligns a causal mask and a window with the first key
        rows = torch.arange(k_len - q_len, k_len, device=q.device)[:, None]
        keys = torch.arange(k_len, device=q.device)
        mask = in_window(rows, keys, *ends_of(window))
        mask = mask & (keys <= rows) if causal else mask
        window = None
    call = (query, key, value, mask, dropout_p, causal and mask is None, softmax_scale, query.shape[1] != key.shape[1])
    backend = _backend_of_dense(deterministic, call, window, return_attn_probs)
    found = attention(*call, window=window, return_lse=return_attn_probs, backend=backend)
    return (found[0].transpose(1, 2), found[1], None) if isinstance(found, tuple) else found.transpose(1, 2)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` from one packed projection.

    Args:
        qkv: `[B, S, 3, H, D]`.
        dropout_p: as in `flash_attn_varlen_func`.
        softmax_scale: as in `flash_attn_varlen_func`.
        causal: as in `flash_attn_varlen_func`.
        window_size: as in `flash_attn_varlen_func`.
        softcap: as in `flash_attn_varlen_func`.
        alibi_slopes: as in `flash_attn_varlen_func`.
        deterministic: as in `flash_attn_varlen_func`.
        return_attn_probs: as in `flash_attn_varlen_func`.

    Returns:
        out `[B, S, H, D]`, or `(out, lse, None)` with lse float32 `[B, H, S]`.

    Raises:
        InvalidArgument: a bad argument, or one without a counterpart here.
        UnsupportedProblem: on a GPU with `deterministic=True`, a call that needs a gradient and that no kernel of ours supports.
    """
    _check_shape("qkv", qkv, ("B", "S", 3, "H", "D"))
    query, key, value = qkv.unbind(2)
    return flash_attn_func(
        query, key, value, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def _backend_of_packed(deterministic: bool, *tensors: Tensor) -> str:
    """The backend of a packed call."""
    if not check_flag("deterministic", deterministic) or not gradient_needed(*tensors) or not tensors[0].is_cuda:
        return "auto"
    return "ragged"


def _backend_of_dense(deterministic: bool, call: tuple, window: Window | None, return_lse: bool) -> str:
    """The same for a dense call: the first of our kernels that takes it.

    Raises:
        UnsupportedProblem: none does; lists every reason.
    """
    query, key, value, mask, dropout_p, causal, scale, grouped = call
    if not check_flag("deterministic", deterministic) or not gradient_needed(query, key, value) or not query.is_cuda:
        return "auto"
    query, key, value = autocast(query, key, value)
    arguments = (query, key, value, mask, dropout_p, causal, scale, grouped, None, return_lse, False, True, window)
    return prepare(None, describe_attention, arguments, _DETERMINISTIC, "auto").backend.name


def _check_shape(name: str, tensor: Any, dims: tuple[str | int, ...]) -> None:
    """Raise unless the tensor has these dims; one that is a number has that size."""
    check_kinds(**{name: tensor})
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    wrong = tensor.dim() != len(dims) or any(
        isinstance(dim, int) and size != dim for size, dim in zip(tensor.shape, dims, strict=True)
    )
    if wrong:
        raise InvalidArgument(f"{name} has shape {list(tensor.shape)}; it must be [{', '.join(map(str, dims))}]")


def _longest(length: Any) -> Any:
    """A bound of lengths, which may be a tensor, as in flash-attn: transformers passes one if only `position_ids` separate the sequences."""
    whole = isinstance(length, Tensor) and length.dtype in (torch.int32, torch.int64) and length.dim() == 0
    return int(length) if whole else length


def _window(window_size: Any) -> Window | None:
    """The window of a call."""
    pair = window_size if isinstance(window_size, (tuple, list)) and len(window_size) == 2 else None
    ends = None if pair is None else [None if isinstance(end, numbers.Integral) and end == -1 else end for end in pair]
    try:
        return check_window((pair,) if ends is None else ends)
    except InvalidArgument as error:
        allowed = "it must be (left, right), each a whole number of tokens of at least 0, or -1 for no limit"
        raise InvalidArgument(f"window_size is {shown(window_size)}; {allowed}") from error


def _alignment(causal: bool, window: Window | None) -> int:
    if causal:
        return BOTTOM_RIGHT
    return FULL if window is None else FULL_BOTTOM_RIGHT


def _refuse(softcap: Any, alibi_slopes: Any, block_table: Any = None, s_aux: Any = None) -> None:
    if softcap is not None and not (isinstance(softcap, (int, float)) and softcap == 0):
        raise InvalidArgument(f"softcap is {shown(softcap)}; saccade does not cap scores, allowed is 0.0")
    if alibi_slopes is not None:
        raise InvalidArgument("alibi_slopes is given; pass the bias itself to saccade.attention_varlen(attn_bias=) instead")
    if block_table is not None:
        raise InvalidArgument("block_table is given; saccade has no paged keys and values")
    if s_aux is not None:
        # transformers passes a model's sinks only to functions that name the argument, and otherwise drops them silently
        raise InvalidArgument("s_aux is given; saccade has no attention sinks, allowed is None")
