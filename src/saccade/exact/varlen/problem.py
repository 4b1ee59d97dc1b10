"""A call of `attention_varlen`: checks of its arguments, and its description without the data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.engine.arguments import FLOATING, check_flag, check_grouped, check_probability, check_scale, check_tensors
from saccade.engine.calls import values_known
from saccade.engine.kinds import check_kinds, check_kinds_but_sharded
from saccade.engine.problem import DTYPE_NAMES, compiled_or_captured
from saccade.engine.window import Window, check_alone, check_window, restricting, shown_window
from saccade.env import check_lengths
from saccade.errors import InvalidArgument
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, FULL_BOTTOM_RIGHT, HIDE_LATER, UPPER_LEFT
from saccade.hardware import arch_of

_CAUSAL = {FULL: "", UPPER_LEFT: "causal", BOTTOM_RIGHT: "causal, bottom-right", FULL_BOTTOM_RIGHT: "bottom-right"}


@dataclass(frozen=True)
class VarlenProblem:
    """A call without its data and without the number of tokens, which changes from batch to batch.

    same_lengths: queries and keys share one tensor of cu_seqlens. bias: None, or its dtype. window: None if it hides nothing.
    """

    heads: int
    kv_heads: int
    max_q: int
    max_k: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str
    device_index: int | None
    arch: int
    scale: float
    causal: int = FULL
    dropout_p: float = 0.0
    bias: torch.dtype | None = None
    bias_grad: bool = False
    needs_grad: bool = False
    return_lse: bool = False
    same_lengths: bool = True
    packed: bool = False
    host_counts: bool = True
    window: Window | None = None
    operation: str = "attention_varlen"

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the call."""
        return torch.device(self.device_type) if self.device_index is None else torch.device(self.device_type, self.device_index)

    # attributes that dispatch reads from every description
    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (1,)

    @property
    def q_len(self) -> int:
        return self.max_q

    @property
    def kv_len(self) -> int:
        return self.max_k

    def __str__(self) -> str:
        heads = f"H={self.heads}" + (f" Hkv={self.kv_heads}" if self.kv_heads != self.heads else "")
        flags = (
            (self.causal != FULL, _CAUSAL[self.causal]),
            (self.window is not None, shown_window(self.window or (None, None))),
            (self.bias is not None, "bias+grad" if self.bias_grad else "bias"),
            (not self.same_lengths, "cross lengths"),
            (self.dropout_p > 0, f"dropout={self.dropout_p:g}"),
            (self.return_lse, "lse"),
            (self.packed, "packed"),
            (self.needs_grad, "grad"),
        )
        said = [heads, f"longest {self.max_q} x {self.max_k}", f"D={self.head_dim}", DTYPE_NAMES.get(self.dtype, str(self.dtype))]
        said += [text for present, text in flags if present]
        said.append(f"sm_{self.arch}" if self.arch else self.device_type)
        return f"{self.operation}({' '.join(said)})"


def describe_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    causal: int,
    scale: float | None,
    enable_gqa: bool,
    attn_bias: Tensor | None,
    return_lse: bool,
    needs_grad: bool,
    packed: bool,
    host_counts: bool = True,
    window: Window | None = None,
) -> VarlenProblem:
    """Check the arguments of `attention_varlen` and describe the call. host_counts: what `on_the_host` says of the cu_seqlens.

    Raises:
        InvalidArgument: with the values given and what is allowed.
    """
    check_kinds(query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, attn_bias=attn_bias)
    check_tensors(query, key, value)
    heads, kv_heads = _check_shapes(query, key, value, check_flag("enable_gqa", enable_gqa))
    max_q, max_k = _check_longest("max_seqlen_q", max_seqlen_q), _check_longest("max_seqlen_k", max_seqlen_k)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_offsets(name, offsets, query)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise InvalidArgument(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} numbers, cu_seqlens_k {cu_seqlens_k.shape[0]}; both need one more than sequences"
        )
    _check_bias(attn_bias, query, heads, max_q, max_k)
    window = check_window(window)
    check_alone(window, "attn_bias", attn_bias)
    bias_grad = attn_bias is not None and attn_bias.requires_grad and needs_grad
    return VarlenProblem(
        heads=heads,
        kv_heads=kv_heads,
        max_q=max_q,
        max_k=max_k,
        head_dim=query.shape[2],
        value_dim=value.shape[2],
        dtype=query.dtype,
        device_type=query.device.type,
        device_index=query.device.index,
        arch=arch_of(query.device),
        scale=check_scale(scale, query.shape[2]),
        causal=causal,
        dropout_p=check_probability("dropout_p", dropout_p),
        bias=None if attn_bias is None else attn_bias.dtype,
        bias_grad=bias_grad,
        needs_grad=needs_grad,
        return_lse=check_flag("return_lse", return_lse),
        same_lengths=cu_seqlens_q is cu_seqlens_k,
        packed=packed,
        host_counts=host_counts,
        window=restricting(window, causal in HIDE_LATER),
    )


def describe_as_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    needs_grad: bool,
    window: Window | None = None,
) -> VarlenProblem:
    """The description of a dense batch `[B, H, T, D]` as if its rows were packed one behind another; attn_mask: a bias `[H, Tq, Tk]`."""
    batch = query.shape[0]
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=query.device)
    q, k, v = (x.transpose(1, 2).reshape(batch * x.shape[2], x.shape[1], x.shape[3]) for x in (query, key, value))
    return describe_varlen(
        q, k, v, offsets, offsets, query.shape[2], key.shape[2], dropout_p, UPPER_LEFT if is_causal else FULL, scale, enable_gqa,
        attn_mask, return_lse, needs_grad, False, not compiled_or_captured(query), window,
    )  # fmt: skip


def check_packed_varlen(qkv: Any) -> None:
    """Check the input of `attention_varlen_qkvpacked`: `[T, 3, H, D]`."""
    check_kinds_but_sharded(qkv=qkv)
    if not isinstance(qkv, Tensor):
        raise InvalidArgument(f"qkv is a {type(qkv).__name__}; it must be a torch.Tensor of shape [T, 3, H, D]")
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise InvalidArgument(f"qkv has shape {list(qkv.shape)}; it must be [T, 3, H, D]")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, int]:
    shapes = [list(x.shape) for x in (query, key, value)]
    said = f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}"
    if not query.dim() == key.dim() == value.dim() == 3:
        raise InvalidArgument(f"query, key and value must be packed, [tokens, heads, head dim]; got {said}")
    if query.shape[2] != key.shape[2]:
        raise InvalidArgument(f"head dims of query and key differ: {said}")
    if key.shape[:2] != value.shape[:2]:
        raise InvalidArgument(f"key and value differ in tokens or heads: {said}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads:
        check_grouped(heads, kv_heads, enable_gqa, "[tokens, heads, head dim]", lambda: said)
    return heads, kv_heads


def _check_longest(name: str, longest: Any) -> int:
    if isinstance(longest, Tensor):
        raise InvalidArgument(f"{name} is a torch.Tensor; it must be an int, so that no call waits for the device")
    if isinstance(longest, bool) or not isinstance(longest, (int, torch.SymInt)) or longest < 0:
        raise InvalidArgument(f"{name} is {longest!r}; it must be an int, at least 0 and at least the longest sequence")
    return longest  # type: ignore[return-value]


def _check_offsets(name: str, offsets: Any, query: Tensor) -> None:
    wanted = "it must be an int32 tensor [B + 1] on the device of query: 0, then the end of each sequence"
    if not isinstance(offsets, Tensor):
        raise InvalidArgument(f"{name} is a {type(offsets).__name__}; {wanted}")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1 or offsets.shape[0] < 1:
        raise InvalidArgument(
            f"{name} is {offsets.dtype} of shape {list(offsets.shape)}; {wanted} (int64 is converted at each call)"
        )
    if offsets.device != query.device:
        raise InvalidArgument(f"{name} is on {offsets.device}, query on {query.device}; they must be one")


def _check_bias(bias: Any, query: Tensor, heads: int, max_q: int, max_k: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor) or bias.dtype not in FLOATING:
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise InvalidArgument(f"attn_bias is {kind}; it must be a floating-point tensor [H, max_seqlen_q, max_seqlen_k]")
    if tuple(bias.shape) != (heads, max_q, max_k):
        raise InvalidArgument(
            f"attn_bias has shape {list(bias.shape)}; it must be [H, max_seqlen_q, max_seqlen_k] = {[heads, max_q, max_k]}"
        )
    if bias.device != query.device:
        raise InvalidArgument(f"attn_bias is on {bias.device}, query on {query.device}; they must be one")


def on_the_host(query: Tensor, *offsets: Any) -> bool:
    """Whether the host may read the offsets of a call. It may not while a program is compiled, captured or traced, as that will run with other offsets
    too. Nor may it if torch.func maps over them or makes them functional."""
    if compiled_or_captured(query) or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    # anything but a tensor is refused when the call is described
    return torch._C._functorch.peek_interpreter_stack() is None or not any(isinstance(x, Tensor) and _mapped(x) for x in offsets)


def _mapped(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return functorch.is_batchedtensor(tensor) or functorch.is_functionaltensor(tensor)


def checked_offsets(name: str, offsets: Tensor, tokens: int, longest: int) -> Tensor:
    """`offsets` as contiguous int32, their values checked if they can be read without waiting for a device, or if SACCADE_CHECK_LENGTHS=1 asks for it.

    An unchecked value never causes a read outside of the tensors: kernels clamp it.
    """
    if not torch.compiler.is_compiling() and values_known(offsets) and (offsets.device.type == "cpu" or check_lengths()):
        _check_values(name, offsets, tokens, longest)
    return offsets.to(torch.int32).contiguous()


def _check_values(name: str, offsets: Tensor, tokens: int, longest: int) -> None:
    ends = offsets.tolist()
    if ends[0] != 0:
        raise InvalidArgument(f"{name} begins with {ends[0]}; it must begin with 0")
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    if lengths and min(lengths) < 0:
        at = lengths.index(min(lengths))
        raise InvalidArgument(f"{name} decreases from {ends[at]} to {ends[at + 1]} at sequence {at}; it must not decrease")
    if ends[-1] > tokens:
        raise InvalidArgument(f"{name} ends with {ends[-1]}, beyond the {tokens} tokens given")
    if lengths and max(lengths) > longest:
        limit = name.replace("cu_seqlens", "max_seqlen")
        raise InvalidArgument(f"{name} has a sequence of {max(lengths)} tokens, longer than {limit} = {longest}")
