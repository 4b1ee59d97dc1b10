"""Checks the arguments that users pass, and turns numbers and flags into plain Python ones.

Plans are remembered by the values of a call's numbers. A tensor hashes by identity: if one were accepted as a number, its value
at the first call would be used in all later ones. So anything but a plain number is refused, and refused calls are not
remembered.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from saccade.errors import InvalidArgument

_INFINITE = float("inf")
_LEAST_SCALE = 2.0**-126  # the smallest normal number of float32
# floats that torch computes with: float8 is for storage
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# sizes of a traced program, and numbers made of them
_SYMBOLIC = (torch.SymInt, torch.SymFloat)


# the tracing states that `untraced` has paused
_paused: list[Any] = []


_set_trace = torch._C._set_tracing_state  # type: ignore[attr-defined]


def untraced() -> contextlib.AbstractContextManager[None]:
    """A context in which sizes are numbers while `torch.jit.trace` runs. Otherwise they would be tensors, and describing a call
    needs numbers."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() or not torch.jit.is_tracing() else _pause()


@contextlib.contextmanager
def _pause() -> Iterator[None]:
    _paused.append(torch._C._get_tracing_state())
    _set_trace(None)
    try:
        yield
    finally:
        _set_trace(_paused.pop())


def check_scale(scale: Any, head_dim: int) -> float:
    """`scale` as a float; None means `1 / sqrt(D)`."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    allowed = "it must be a finite number, or None for 1/sqrt(D)"
    number = real_number(scale)
    if number is None:
        hint = "; to learn or compute it, multiply query by it and pass scale=1.0" if isinstance(scale, Tensor) else ""
        raise InvalidArgument(f"scale is {shown(scale)}; {allowed}{hint}")
    # not math.isfinite, which torch.compile cannot trace for dynamic sizes
    if not -_INFINITE < number < _INFINITE:
        raise InvalidArgument(f"scale is {scale!r}; {allowed}")
    return number


def check_probability(name: str, value: Any) -> float:
    """A dropout probability as a float, in [0, 1)."""
    number = real_number(value)
    if number is None or not 0.0 <= number < 1.0:
        raise InvalidArgument(f"{name} is {shown(value)}; allowed is 0 <= {name} < 1")
    return number


def check_flag(name: str, value: Any) -> bool:
    """True or False. A number equal to one of them is accepted, since both find the same remembered plan."""
    if isinstance(value, bool):
        return value
    if isinstance(value, torch.SymBool):
        return bool(value)
    if _is_traced(value):
        value = _traced(value)
    if isinstance(value, numbers.Real) or type(value).__module__ == "numpy":
        plain = value.item() if hasattr(value, "item") and not getattr(value, "shape", None) else value
        if isinstance(plain, numbers.Real) and plain in (0, 1):
            return bool(plain)
    raise InvalidArgument(f"{name} is {shown(value)}; it must be True or False")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of some words."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise InvalidArgument(f"{name} is {shown(value)}; allowed are {', '.join(map(repr, words))}")
    return value


def check_keep(keep: Any) -> int:
    """How many keys to keep, as an int."""
    return check_count("keep", keep, 1)


def check_count(name: str, count: Any, least: int) -> int:
    """A number of keys, as an int."""
    whole = None
    if not isinstance(count, bool):
        if isinstance(count, (int, torch.SymInt)):
            whole = count
        elif isinstance(count, numbers.Integral):
            whole = int(count)
        elif _is_traced(count) and not count.is_floating_point():
            whole = int(_traced(count))
    if whole is None or whole < least:
        raise InvalidArgument(f"{name} is {shown(count)}; it must be a whole number of keys, at least {least}")
    return whole  # type: ignore[return-value]


def real_number(value: Any) -> float | None:
    """A plain number as a float, None for anything else."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, _SYMBOLIC):
        return value  # type: ignore[return-value]
    if _is_traced(value):
        value = _traced(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return None


def _is_traced(value: Any) -> bool:
    """Whether this is a number that `torch.jit.trace` presents as a tensor: a size, or a result computed from sizes."""
    return bool(_paused) and isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad


def _traced(value: Tensor) -> Any:
    """The number. torch warns that the trace holds it as a constant, as it does wherever a tensor becomes a number."""
    _set_trace(_paused[-1])
    try:
        return value.item()
    finally:
        _set_trace(None)


def shown(value: Any) -> str:
    """A value as messages show it."""
    if not isinstance(value, Tensor):
        return repr(value)
    # nested tensors and uninitialized parameters have no shape
    return (
        f"a torch.Tensor of shape {list(value.shape)}"
        if type(value) in (Tensor, torch.nn.Parameter) and not value.is_nested
        else f"a {type(value).__name__}"
    )


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that query, key and value are tensors of one floating dtype on one device."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dim() < 2:
            raise InvalidArgument(f"{name} has shape {list(tensor.shape)}; it must be [B, H, T, D], or at least [T, D]")
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidArgument(f"dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}; they must be the same")
    if query.dtype not in FLOATING:
        raise InvalidArgument(f"query, key and value are {query.dtype}; they must be floating point, of at least 16 bits")
    if not query.device == key.device == value.device:
        raise InvalidArgument(
            f"devices differ: query {query.device}, key {key.device}, value {value.device}; they must be the same"
        )


def is_normal_scale(scale: float) -> bool:
    """Whether a scale is positive and normal in float32. Kernels set hidden scores to -inf before they multiply by the scale: a scale of 0 would
    make them NaN, and a negative one +inf."""
    return scale >= _LEAST_SCALE


def check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, int]:
    """Check that the shapes of query, key and value fit together; returns (H, Hkv)."""

    # takes 3 us of host time, so only called for errors
    def shapes() -> str:
        return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"

    if query.shape[-1] != key.shape[-1]:
        raise InvalidArgument(f"head dims of query and key differ: {shapes()}")
    if key.shape[-2] != value.shape[-2]:
        raise InvalidArgument(f"key and value have different lengths: {shapes()}")
    if not query.dim() == key.dim() == value.dim():
        raise InvalidArgument(f"ranks differ: {shapes()}; each must be [B, H, T, D]")
    if query.dim() < 3:
        return 1, 1
    heads, kv_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if kv_heads != value_heads:
        raise InvalidArgument(f"key has {kv_heads} heads, value {value_heads}; they must agree ({shapes()})")
    if heads != kv_heads:
        check_grouped(heads, kv_heads, enable_gqa, "[B, H, T, D]", shapes)
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise InvalidArgument(f"batch dimensions differ: {shapes()}")
    return heads, kv_heads


def check_grouped(heads: int, kv_heads: int, enable_gqa: bool, layout: str, shapes: Callable[[], str]) -> None:
    """Check that query heads may share key heads. layout, shapes: for messages."""
    divides = kv_heads > 0 and heads % kv_heads == 0
    if enable_gqa and not divides:
        raise InvalidArgument(f"{heads} query heads are no multiple of {kv_heads} key heads ({shapes()})")
    if not enable_gqa:
        # a user who passes tokens before heads meets this error with token counts, so the message names the layout
        advice = "pass enable_gqa=True to share them" if divides else f"they must agree, in tensors {layout}"
        raise InvalidArgument(f"query has {heads} heads, key and value {kv_heads}; {advice} ({shapes()})")


def check_mask(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, heads: int) -> str | None:
    """Check `attn_mask`; returns "bool", "bias" or None."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise InvalidArgument(f"attn_mask is a {type(attn_mask).__name__}; it must be a torch.Tensor or None")
    if is_causal:
        raise InvalidArgument(
            f"attn_mask (shape {list(attn_mask.shape)}) and is_causal=True are both given; put the causal mask into attn_mask"
        )
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATING:
        raise InvalidArgument(
            f"attn_mask has dtype {attn_mask.dtype}; allowed are bool (True = attend) and floating point (added to the scores)"
        )
    if attn_mask.device != query.device:
        raise InvalidArgument(f"attn_mask is on {attn_mask.device}, query on {query.device}; they must be the same")
    full = (*query.shape[:-3], heads, query.shape[-2], key.shape[-2]) if query.dim() >= 3 else (query.shape[-2], key.shape[-2])
    sizes = tuple(attn_mask.shape)
    if len(sizes) > len(full) or any(a not in (1, b) for a, b in zip(reversed(sizes), reversed(full), strict=False)):
        of_keys = len(full) == 4 and sizes == (full[0], full[3])
        advice = "; a mask of the keys of each batch row is [B, 1, 1, Tk]" if of_keys else ""
        raise InvalidArgument(f"attn_mask has shape {list(sizes)}; it must broadcast to {list(full)}{advice}")
    return "bool" if attn_mask.dtype == torch.bool else "bias"


def check_lengths(query: Tensor, lengths: Tensor | None, name: str = "query", rank: int = 4) -> None:
    """Check the type, shape and device of `lengths` for a query `[B, H, T, D]`, or for another tensor `[B, ...]` of that name and rank. Values
    are not checked."""
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise InvalidArgument(f"lengths is a {type(lengths).__name__}; it must be an integer torch.Tensor of shape [B]")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(f"lengths has dtype {lengths.dtype}; allowed are int32 and int64")
    if query.dim() != rank or tuple(lengths.shape) != (query.shape[0],):
        raise InvalidArgument(f"lengths has shape {list(lengths.shape)}; it must be [B] for {name} {list(query.shape)}")
    if lengths.device != query.device:
        raise InvalidArgument(f"lengths is on {lengths.device}, {name} on {query.device}; they must be the same")


def check_length_values(lengths: Tensor, kv_len: int) -> None:
    """Raise unless every length lies in 0..Tk. Waits for the device: call it once per tensor, not once per layer."""
    if lengths.numel() == 0:
        return
    given = lengths.tolist() if lengths.is_cpu else torch.stack(torch.aminmax(lengths)).tolist()
    low, high = min(given), max(given)
    if low < 0 or high > kv_len:
        raise InvalidArgument(f"lengths range from {low} to {high}; allowed is 0 to Tk = {kv_len}")
