"""Thin modules around the functions: projections and one call of attention.

Parameter names and layouts are those of torch's own modules (`in_proj_weight`, `out_proj`, `linear1`, `norm1`, ...), so that
`load_state_dict` works with the state of a `torch.nn.TransformerEncoder` or `TransformerEncoderLayer`.

Letters: B batch, S tokens, E width of the model (`embed_dim`), H heads, D = E / H. Everything is batch first, `[B, S, E]`.

Source: "Fast Attention For Short Sequences" (paper 002): packed projections, and a last layer that computes one token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.engine.arguments import check_flag, check_probability
from saccade.engine.kinds import check_kinds
from saccade.engine.sharded import is_dtensor
from saccade.errors import InvalidArgument
from saccade.exact.api import attention, attention_qkvpacked
from saccade.nn.checks import check_backend, check_heads, check_made, check_tokens, only
from saccade.nn.module import Module


class SelfAttention(Module):
    """Multi-head self-attention on one packed projection: `softmax(Q K^T / sqrt(D)) V W_out`, `[Q K V] = x W_in`.

    Args:
        embed_dim: E, a multiple of num_heads.
        num_heads: H.
        dropout: probability of dropping an attention weight in training.
        bias: whether both projections add a bias.
        backend: as in `saccade.attention`.
        device: of the parameters, torch's default unless given.
        dtype: of the parameters, torch's default unless given.

    Raises:
        InvalidArgument: a size, probability or input shape is invalid.

    Source:
        "Fast Attention For Short Sequences" (paper 002), whose kernel takes packed QKV.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_made(device, dtype, bias)
        check_backend(backend)
        self.embed_dim, self.num_heads, self.backend = embed_dim, num_heads, backend
        self.dropout = check_probability("dropout", dropout)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, device=device, dtype=dtype)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the packed projection again; `out_proj` is a module with its own `reset_parameters`."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        cls_only: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            x: `[B, S, E]`.
            lengths: int `[B]`, number of real tokens of each row; tokens beyond it are not attended to.
            attn_mask: bool (True = attend, the opposite of `torch.nn.MultiheadAttention`) or floating, added to the scores;
                broadcastable to `[B, H, S, S]`.
            is_causal: token j is visible to token i if j <= i.
            cls_only: compute only the output of token 0.

        Returns:
            `[B, S, E]`, or `[B, 1, E]` with `cls_only`.
        """
        check_tokens(x, self.embed_dim)
        dropout_p = self.dropout if self.training else 0.0
        if check_flag("cls_only", cls_only):
            check_kinds(attn_mask=attn_mask)
            query, key, value = self._project_cls(x)
            heads = attention(
                query, key, value, _first_row(attn_mask, x.shape[1]), dropout_p, is_causal, lengths=lengths, backend=self.backend
            )
            tokens = only(heads).transpose(1, 2)
        else:
            qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
            tokens = only(attention_qkvpacked(qkv, attn_mask, dropout_p, is_causal, lengths=lengths, backend=self.backend))
        return self.out_proj(tokens.flatten(2))

    def _project_cls(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width, heads = self.embed_dim, self.num_heads
        bias_q, bias_kv = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split([width, 2 * width])
        weight_q, weight_kv = self.in_proj_weight.split([width, 2 * width])
        query = F.linear(x[:, :1], weight_q, bias_q).unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = _split_key_value(F.linear(x, weight_kv, bias_kv), heads)
        return query, key, value

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout:g}, backend={self.backend!r}"


class AttentionPooling(Module):
    """One learned query attends to all tokens: `softmax(q K^T / sqrt(D)) V W_out`, `[K V] = x W_kv`, q a parameter `[H, D]`.

    q has no projection: it is a parameter, so a linear map of it would be redundant. Its attention has one query.

    Args:
        embed_dim: E, a multiple of num_heads.
        num_heads: H.
        dropout: probability of dropping an attention weight in training.
        bias: whether both projections add a bias.
        backend: as in `saccade.attention`.
        device: of the parameters, torch's default unless given.
        dtype: of the parameters, torch's default unless given.

    Raises:
        InvalidArgument: a size, probability or input shape is invalid.

    Source:
        "Fast Attention For Short Sequences" (paper 002), "separate fwd/bwd kernels for a case where len(q)=1".
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_made(device, dtype, bias)
        check_backend(backend)
        self.embed_dim, self.num_heads, self.backend = embed_dim, num_heads, backend
        self.dropout = check_probability("dropout", dropout)
        self.query = nn.Parameter(torch.empty(num_heads, embed_dim // num_heads, device=device, dtype=dtype))
        self.kv_proj = nn.Linear(embed_dim, 2 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the query again; both projections are modules with their own `reset_parameters`."""
        # near 0, so that training starts from the mean of the tokens
        nn.init.trunc_normal_(self.query, std=0.02)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """`[B, S, E]` to `[B, E]`; `lengths` int `[B]`, tokens beyond it are not attended to."""
        check_tokens(x, self.embed_dim)
        key, value = _split_key_value(self.kv_proj(x), self.num_heads)
        query = self.query.to(key.dtype)[:, None, :].expand(x.shape[0], -1, -1, -1)
        if is_dtensor(key) and is_dtensor(query):
            query = _placed_as(key, query)
        dropout_p = self.dropout if self.training else 0.0
        pooled = only(attention(query, key, value, dropout_p=dropout_p, lengths=lengths, backend=self.backend))
        return self.out_proj(pooled.flatten(1))

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout:g}, backend={self.backend!r}"


def _first_row(mask: Tensor | None, tokens: int) -> Tensor | None:
    """The part of a mask for token 0."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return mask
    if mask.shape[-2] not in (1, tokens):
        raise InvalidArgument(f"attn_mask has shape {list(mask.shape)}; it must broadcast to [B, H, {tokens}, {tokens}]")
    return mask[..., :1, :]


def _placed_as(key: Any, query: Any) -> Tensor:
    """The query with the placements of the key. It is replicated before, so each rank takes a part of what it has."""
    return query.redistribute(placements=key.placements)


def _split_key_value(packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    # unbind, not two slices: its backward writes one packed gradient, and slices would add two zero-padded ones
    key, value = packed.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return key, value
