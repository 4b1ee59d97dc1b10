"""`attention` of jagged nested tensors `[B, H, j, D]`: the same batch packed, without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.errors import InvalidArgument
from saccade.exact.varlen.api import attention_varlen


def attention_nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    lengths: Tensor | None,
    window: tuple[int | None, int | None] | None,
    key_mask: Tensor | None,
    return_lse: bool,
    backend: str,
) -> Tensor:
    """A jagged nested tensor like query, by `attention_varlen`; torch's function takes the same tensors.

    Raises:
        InvalidArgument: some of the tensors are not nested, not jagged, or ragged in another dim than the third; or a mask, lengths or the
            log-sum-exp is asked for, which have no nested form.
    """
    for name, given in (("attn_mask", attn_mask), ("lengths", lengths), ("key_mask", key_mask)):
        if given is not None:
            raise InvalidArgument(f"{name} is given with nested tensors, which have lengths of their own; it must be None")
    if return_lse:
        raise InvalidArgument("return_lse is True with nested tensors; saccade.attention_varlen returns it, [H, T]")
    packed = [_packed(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    if packed[1][1] is not packed[2][1] and not torch.equal(packed[1][1], packed[2][1]):
        raise InvalidArgument("key and value are nested tensors of different lengths; both must have the same")
    (tokens, offsets, longest), (keys, key_offsets, longest_key) = packed[0], packed[1]
    # all tokens together are a bound that no sequence exceeds
    bound, bound_key = (x.shape[0] if found is None else int(found) for x, found in ((tokens, longest), (keys, longest_key)))
    ends = offsets.to(torch.int32)
    # one tensor stays one tensor, so that its lists by length are made once
    key_ends = ends if key_offsets is offsets else key_offsets.to(torch.int32)
    out = attention_varlen(
        tokens,
        keys,
        packed[2][0],
        ends,
        key_ends,
        bound,
        bound_key,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        backend=backend,
    )
    assert isinstance(out, Tensor), "the log-sum-exp was not asked for"
    return torch.nested.nested_tensor_from_jagged(out, offsets, max_seqlen=longest).transpose(1, 2)


def _packed(name: str, tensor: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """(tokens `[T, H, D]`, offsets, longest sequence if it is known)."""
    wanted = "query, key and value must all be nested tensors of the layout torch.jagged and of shape [B, H, j, D]"
    if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.layout != torch.jagged:
        raise InvalidArgument(
            f"{name} is {'dense' if isinstance(tensor, Tensor) and not tensor.is_nested else 'of another layout'}; {wanted}"
        )
    if tensor.dim() != 4 or type(tensor.shape[1]) is not int:
        raise InvalidArgument(f"{name} has shape {list(tensor.shape)}; {wanted}")
    if tensor.lengths() is not None:  # type: ignore[attr-defined]
        raise InvalidArgument(
            f"{name} has tokens between its sequences that belong to none, as torch.nested.narrow leaves them; pass what "
            "torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged) makes of the nested tensor x [B, j, E]"
        )
    by_token = tensor.transpose(1, 2)
    return by_token.values(), tensor.offsets(), _longest(tensor)  # type: ignore[attr-defined]


def _longest(tensor: Any) -> int | None:
    """The longest sequence of a nested tensor; None if a program is compiled and the tensor was made without it.

    `_get_max_seqlen` would write it into the traced tensor, and backward would meet another tensor than it was made for.
    """
    return tensor._maybe_max_seqlen if torch.compiler.is_compiling() else int(tensor._get_max_seqlen())
