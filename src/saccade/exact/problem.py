"""The description of a call of `attention`, the checks of its arguments, and broadcasting as in torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.engine.arguments import check_flag, check_lengths, check_mask, check_shapes, check_tensors
from saccade.engine.kinds import check_kinds, check_kinds_but_sharded
from saccade.engine.problem import Problem, compiled_or_captured, describe, replayed_by_cpp, shape_of_mask
from saccade.engine.window import Window, check_alone, check_window, restricting, shown_window
from saccade.errors import InvalidArgument
from saccade.exact.args import AttentionArgs, windows_of
from saccade.exact.causal_bias import is_causal_bias
from saccade.hardware import arch_of

SHORT_TOKENS = 128  # the most tokens of the backend `short`; `long` takes longer rows, and shorter ones too


def describe_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    lengths: Tensor | None,
    return_lse: bool,
    packed: bool,
    needs_grad: bool,
    window: Window | None = None,
    key_mask: Tensor | None = None,
) -> Problem:
    """Check the arguments of `attention` and describe the call; of windows with a bias for each, as the one batch that
    `in_one_batch` makes of them.

    Raises:
        InvalidArgument: as `describe`.
    """
    window = check_window(window)
    problem = describe(
        "attention", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, packed, needs_grad,
    )  # fmt: skip
    if window is not None:
        check_alone(window, "attn_mask", attn_mask)
        # C++ replays no call with a window
        return replace(problem, window=restricting(window, problem.is_causal), host_counts=not compiled_or_captured(query))
    if attn_mask is not None and _has_bias_for_each_window(problem, tuple(attn_mask.shape)):
        images, windows = problem.batch_shape
        shape = tuple(attn_mask.shape[-4:])
        problem = replace(problem, batch_shape=(images * windows,), rank=4, windows=windows, mask_shape=shape)
        problem = replayed_by_cpp(problem, attn_mask)
    return problem if key_mask is None else replace(problem, key_mask=True)


def with_key_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor,
    is_causal: bool,
    enable_gqa: bool,
    window: Window | None,
) -> tuple[Tensor | None, Tensor | None]:
    """(attn_mask, key_mask) of a call: one boolean mask and None; or a bias and the mask of keys beside it.

    Raises:
        InvalidArgument: key_mask is not bool `[*batch, Tk]`, or is given with an argument that excludes it.
    """
    check_kinds(query=query, key=key, value=value, key_mask=key_mask)
    check_tensors(query, key, value)
    if must_broadcast(query, key, value, enable_gqa):
        query, key, value = broadcast(query, key, value, enable_gqa)  # the masks have the shape of the result
    _check_key_mask(query, key, key_mask)
    if key_mask.device != query.device:
        raise InvalidArgument(f"key_mask is on {key_mask.device}, query on {query.device}; they must be the same")
    if (by_flag := check_flag("is_causal", is_causal)) or is_causal_bias(attn_mask):
        causal = "is_causal=True" if by_flag else "a causal attn_mask"
        raise InvalidArgument(f"key_mask and {causal} are both given; put both into one boolean attn_mask, or give lengths")
    if (window := check_window(window)) is not None:
        raise InvalidArgument(f"key_mask and {shown_window(window)} are both given; put both into attn_mask")
    check_kinds(attn_mask=attn_mask)
    if check_mask(query, key, attn_mask, False, query.shape[-3]) == "bias":
        return attn_mask, key_mask
    rows = key_mask[..., None, None, :]
    return (rows if attn_mask is None else attn_mask & rows), None


def _check_key_mask(query: Tensor, key: Tensor, key_mask: Tensor) -> None:
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        kind = f"has dtype {key_mask.dtype}" if isinstance(key_mask, Tensor) else f"is a {type(key_mask).__name__}"
        raise InvalidArgument(f"key_mask {kind}; it must be a bool torch.Tensor [B, Tk], True = visible, or None")
    if query.dim() < 4 or key.dim() < 4:
        raise InvalidArgument(f"key_mask needs query and key of rank 4 or more, got {list(query.shape)} and {list(key.shape)}")
    wanted = [*query.shape[:-3], key.shape[-2]]
    if list(key_mask.shape) != wanted:
        raise InvalidArgument(f"key_mask has shape {list(key_mask.shape)}; it must be {wanted} for query {list(query.shape)}")


def check_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    lengths: Tensor | None,
    key_mask: Tensor | None,
    enable_gqa: bool,
) -> None:
    """Check the shapes of whole DTensors `[B, H, T, D]`, as a part may broadcast where the whole does not: one row of two beside two of four."""
    if not must_broadcast(query, key, value, enable_gqa):
        check_shapes(query, key, value, check_flag("enable_gqa", enable_gqa))
    check_mask(query, key, attn_mask, False, query.shape[1])
    check_lengths(query, lengths)
    if key_mask is not None:
        _check_key_mask(query, key, key_mask)


def mask_of_keys(key_mask: Tensor) -> Tensor:
    """A mask of keys `[*batch, Tk]` as kernels are given it, `[B, 1, 1, Tk]`: a view where the layout allows one."""
    return key_mask.flatten(0, -2)[:, None, None]


def problem_of(args: AttentionArgs, return_lse: bool = False) -> Problem:
    """The description of a call from the record of its kernels, for work that is done once for each signature."""
    query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, *_ = args
    added = mask if bias is None else bias
    return Problem(
        operation="attention",
        batch_shape=(query.shape[0],),
        heads=query.shape[1],
        kv_heads=key.shape[1],
        q_len=query.shape[2],
        kv_len=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        dtype=query.dtype,
        device_type=query.device.type,
        device_index=query.device.index,
        arch=arch_of(query.device),
        rank=4,
        last_strides=(query.stride(3), key.stride(3), value.stride(3)),
        scale=scale,
        is_causal=is_causal,
        dropout_p=0.0 if seed is None else dropout_p,
        mask=None if added is None else "bool" if bias is None else "bias",
        key_mask=mask is not None and bias is not None,
        mask_shape=None if added is None else shape_of_mask(added),
        bias_dtype=None if bias is None or bias.dtype == query.dtype else bias.dtype,
        lengths=lengths is not None,
        return_lse=return_lse,
        windows=windows_of(bias, query.shape[0]),
    )


def is_row(tensor: Tensor) -> bool:
    """Whether all queries share a row of a mask or bias."""
    shape = shape_of_mask(tensor)
    return len(shape) < 2 or shape[-2] == 1


def _has_bias_for_each_window(problem: Problem, shape: tuple[int, ...]) -> bool:
    """Whether query is `[images, W, H, Tq, D]` with W > 0, and the bias `[W, ...]` or `[1, W, ...]`."""
    if problem.rank != 5 or problem.mask != "bias" or problem.batch_shape[1] == 0:
        return False
    return shape[:-4] in ((), (1,)) and shape[-4:-3] == problem.batch_shape[1:]


def in_one_batch(tensor: Tensor) -> Tensor:
    """`[images, W, H, T, D]` as `[images * W, H, T, D]`, and a bias `[1, W, H, Tq, Tk]` as `[W, H, Tq, Tk]`: a view where the
    layout allows one."""
    return tensor if tensor.dim() < 5 else tensor.flatten(0, 1)


def by_window(problem: Problem, tensor: Tensor) -> Tensor:
    """`[images, W, ...]` of a result `[images * W, ...]`."""
    return tensor.unflatten(0, (problem.batch // problem.windows, problem.windows))


def must_broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether batch, rank or heads differ in a way that torch broadcasts. False if they cannot be: `describe_attention` says
    why."""
    if not all(isinstance(x, Tensor) and x.dim() >= 2 for x in (query, key, value)):
        return False
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return False
    wanted = _broadcast_shapes(query, key, value, enable_gqa)
    return wanted is not None and any(x.shape[:-2] != shape for x, shape in zip((query, key, value), wanted, strict=True))


def broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views with the same rank, batch and number of heads (or heads per group). Only valid if `must_broadcast` is true."""
    wanted = _broadcast_shapes(query, key, value, enable_gqa) or ()
    query, key, value = (x.expand(*shape, *x.shape[-2:]) for x, shape in zip((query, key, value), wanted, strict=True))
    return query, key, value


def _broadcast_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[torch.Size, ...] | None:
    leading = [x.shape[:-2] for x in (query, key, value)]
    if enable_gqa and min(map(len, leading)) > 0 and leading[0][-1] != leading[1][-1] == leading[2][-1]:
        batch = _joined([shape[:-1] for shape in leading])
        return None if batch is None else tuple(torch.Size((*batch, shape[-1])) for shape in leading)
    joined = _joined(leading)
    return None if joined is None else (joined,) * 3


def _joined(shapes: list[torch.Size]) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def check_packed(qkv: Tensor) -> None:
    """Check the input of `attention_qkvpacked`: `[B, S, 3, H, D]` with contiguous last dim."""
    check_kinds_but_sharded(qkv=qkv)
    if not isinstance(qkv, Tensor):
        raise InvalidArgument(f"qkv is a {type(qkv).__name__}; it must be a torch.Tensor of shape [B, S, 3, H, D]")
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise InvalidArgument(f"qkv has shape {list(qkv.shape)}; it must be [B, S, 3, H, D]")
    if qkv.stride(-1) != 1 and qkv.shape[-1] != 1:
        raise InvalidArgument(f"qkv has strides {qkv.stride()}; the last one must be 1, call .contiguous() on it")
