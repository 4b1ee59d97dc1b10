"""`triangle_attention`: the function of that name in cuequivariance_torch, with its arguments in their order, by `saccade.attention`.

    from saccade.integrations.triangle import triangle_attention      # in place of: from cuequivariance_torch import triangle_attention

cuequivariance_torch need not be installed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.arguments import check_flag, check_tensors
from saccade.engine.kinds import check_kinds
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.exact.triangle import attend_rows


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> Tensor:
    """`softmax(scale Q K^T + bias, over keys of the mask) V` of the N rows of a structure, which share the bias.

    Args:
        q: `[B, N, H, Q, D]`; for B = 1 also `[N, H, Q, D]`, and then the others have one dim less, too.
        k: `[B, N, H, K, D]`.
        v: `[B, N, H, K, D]`.
        bias: `[B, 1, H, Q, K]`, floating, in any dtype; its gradient is summed over the N rows in a fixed order.
        mask: `[B, N, 1, 1, K]`, True or not 0 where a key of the row is visible.
        scale: factor on the products, `1/sqrt(D)` by default.
        return_aux: must be False: the log-sum-exp and largest score of each row are for NVIDIA's own kernels.

    Returns:
        `[B, N, H, Q, D]`. A query that sees no key gets 0. In cuequivariance_torch hidden keys have a score of -1e9, so such a query gets the mean
        of the values.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.
        UnsupportedProblem: return_aux is True.

    Source:
        the attention of "Highly accurate protein structure prediction with AlphaFold" (Jumper et al. 2021), algorithms 13 and 14 of its supplement.
    """
    check_kinds(q=q, k=k, v=v, bias=bias, mask=mask)
    check_tensors(q, k, v)
    if check_flag("return_aux", return_aux):
        raise UnsupportedProblem("return_aux is True; saccade.attention(..., return_lse=True) gives the log-sum-exp of each row")
    rank = q.dim()
    if rank == 4:
        q, k, v = q[None], k[None], v[None]
        bias = bias[None] if isinstance(bias, Tensor) else bias
        mask = mask[None] if isinstance(mask, Tensor) else mask
    if q.dim() != 5 or not q.dim() == k.dim() == v.dim():
        raise InvalidArgument(
            f"q, k and v have {rank}, {k.dim()} and {v.dim()} dims; all must have five, [B, N, H, Q, D], or four"
        )
    structures, rows, heads, q_len, _ = q.shape
    if not structures == k.shape[0] == v.shape[0]:
        raise InvalidArgument(
            f"q, k and v are of {structures}, {k.shape[0]} and {v.shape[0]} structures; all must have as many, [B, N, H, T, D]"
        )
    kv_len = k.shape[3]
    _check_shape("bias", bias, (structures, 1, heads, q_len, kv_len), rank)
    if mask is not None:
        _check_shape("mask", mask, (structures, rows, 1, 1, kv_len), rank)
        mask = mask[:, :, 0, 0].to(torch.bool)
    if not bias.is_floating_point():
        raise InvalidArgument(f"bias has dtype {bias.dtype}; it must be floating, which is added to the scores")
    out = attend_rows(q, k, v, bias[:, 0], mask, scale, "auto")
    return out[0] if rank == 4 else out


def _check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...], rank: int) -> None:
    """Raise unless a tensor has the wanted shape. rank: how many of its dims the caller gave."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(
            f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor of shape {list(wanted[5 - rank :])}"
        )
    if tuple(tensor.shape) != wanted:
        raise InvalidArgument(f"{name} has shape {list(tensor.shape[5 - rank :])}; it must be {list(wanted[5 - rank :])}")
