"""Modules around the functions, thin: projections, residuals and norms, and one call of attention.

Parameter names and layouts are those of torch's own modules (`in_proj_weight`, `out_proj`, `linear1`, `norm1`, ...), so that
`load_state_dict` of a `torch.nn.TransformerEncoder` or `TransformerEncoderLayer` works as it is.

Letters: B batch, S tokens, E width of the model (`embed_dim`), H heads, D = E / H. Everything is batch first, `[B, S, E]`.

Source: "Fast Attention For Short Sequences" (paper 002): packed projections, and a last layer that computes one token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.arguments import check_keep, check_probability
from saccade.cache import DynamicMaskCache
from saccade.errors import InvalidArgument
from saccade.functional import attention, attention_qkvpacked, dynamic_mask_attention
from saccade.nn_nystrom import NystromAttention as NystromAttention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class SelfAttention(nn.Module):
    """Multi-head self-attention on one packed projection: `softmax(Q K^T / sqrt(D)) V W_out`, `[Q K V] = x W_in`.

    Args:
        embed_dim: E, a multiple of num_heads.
        num_heads: H.
        dropout: probability of dropping an attention weight in training.
        bias: whether both projections add a bias.
        backend: as in `saccade.attention`.

    Raises:
        InvalidArgument: a size, probability or input shape with no meaning.
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
        _check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.backend = embed_dim, num_heads, backend
        self.dropout = check_probability("dropout", dropout)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, device=device, dtype=dtype)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        nn.init.xavier_uniform_(self.in_proj_weight)

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
            lengths: int `[B]`, number of real tokens of each row; tokens beyond are not attended to.
            attn_mask: bool (True = attend, the opposite of `torch.nn.MultiheadAttention`) or floating, added to the scores;
                broadcastable to `[B, H, S, S]`.
            is_causal: token j is visible to token i if j <= i.
            cls_only: compute the output of token 0 alone.

        Returns:
            `[B, S, E]`, or `[B, 1, E]` with `cls_only`.
        """
        _check_tokens(x, self.embed_dim)
        dropout_p = self.dropout if self.training else 0.0
        if cls_only:
            query, key, value = self._project_cls(x)
            row = attn_mask if attn_mask is None or attn_mask.dim() < 2 else attn_mask[..., :1, :]
            heads = attention(query, key, value, row, dropout_p, is_causal, lengths=lengths, backend=self.backend)
            tokens = _only(heads).transpose(1, 2)
        else:
            qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
            tokens = _only(attention_qkvpacked(qkv, attn_mask, dropout_p, is_causal, lengths=lengths, backend=self.backend))
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


class EncoderLayer(nn.Module):
    """One transformer encoder layer: `torch.nn.TransformerEncoderLayer(batch_first=True)`, argument by argument and in its result.

    Post-norm (`norm_first=False`): `x = norm1(x + SA(x)); x = norm2(x + FF(x))`.
    Pre-norm: `x = x + SA(norm1(x)); x = x + FF(norm2(x))`. `FF(x) = linear2(dropout(activation(linear1(x))))`.

    Args:
        d_model: E. nhead: H, a divisor of E. dim_feedforward: width inside FF.
        dropout: after both sublayers, inside FF, and on the attention weights.
        activation: "relu", "gelu" or a function of a tensor.
        backend: as in `saccade.attention`.

    Raises:
        InvalidArgument: a size, probability, activation or input shape with no meaning.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(d_model, nhead, dropout, bias, backend=backend, device=device, dtype=dtype)
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.dropout, self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = _activation(activation)
        self.norm_first = norm_first

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        cls_only: bool = False,
    ) -> Tensor:
        """`[B, S, E]` to `[B, S, E]`, or to `[B, 1, E]` with `cls_only`; arguments as in `SelfAttention.forward`."""
        attended = self.self_attn(
            self.norm1(x) if self.norm_first else x, lengths, attn_mask=attn_mask, is_causal=is_causal, cls_only=cls_only
        )
        x = (x[:, :1] if cls_only else x) + self.dropout1(attended)
        if self.norm_first:
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x)
        return self.norm2(x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class Encoder(nn.Module):
    """A stack of copies of one `EncoderLayer`, as `torch.nn.TransformerEncoder`, that can stop at the CLS token.

    When only token 0 is read (classification, sentence embedding by CLS), `cls_only=True` lets the last layer project one
    query, attend with Tq = 1, and run the residual, norms and feed-forward on one token. Outputs and gradients equal those of
    the whole stack followed by `[:, :1]` (paper 002); with dropout they agree in distribution, not draw by draw.

    Args:
        layer: the layer to copy `num_layers` times.
        num_layers: at least 1.
        norm: a final norm, None for none.
    """

    def __init__(self, layer: EncoderLayer, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        if num_layers < 1:
            raise InvalidArgument(f"num_layers is {num_layers}; it must be at least 1")
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.norm = norm

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        cls_only: bool = False,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """`[B, S, E]` to `[B, S, E]`, or to `[B, 1, E]` with `cls_only`; other arguments as in `SelfAttention.forward`."""
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(x, lengths, attn_mask=attn_mask, is_causal=is_causal, cls_only=cls_only and i == last)
        return x if self.norm is None else self.norm(x)


class AttentionPooling(nn.Module):
    """One learned query attends to all tokens: `softmax(q K^T / sqrt(D)) V W_out`, `[K V] = x W_kv`, q a parameter `[H, D]`.

    There is no projection of q: it is learned, and a linear map of it would only be learned twice.

    Args:
        embed_dim: E, a multiple of num_heads.
        num_heads: H.
        dropout: probability of dropping an attention weight in training.
        bias: whether both projections add a bias.
        backend: as in `saccade.attention`.
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
        _check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.backend = embed_dim, num_heads, backend
        self.dropout = check_probability("dropout", dropout)
        self.query = nn.Parameter(torch.empty(num_heads, embed_dim // num_heads, device=device, dtype=dtype))
        self.kv_proj = nn.Linear(embed_dim, 2 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        nn.init.trunc_normal_(self.query, std=0.02)  # near 0: training starts from the mean of the tokens

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """`[B, S, E]` to `[B, E]`; `lengths` int `[B]`, tokens beyond are not attended to."""
        _check_tokens(x, self.embed_dim)
        key, value = _split_key_value(self.kv_proj(x), self.num_heads)
        query = self.query.to(key.dtype)[:, None, :].expand(x.shape[0], -1, -1, -1)
        dropout_p = self.dropout if self.training else 0.0
        pooled = _only(attention(query, key, value, dropout_p=dropout_p, lengths=lengths, backend=self.backend))
        return self.out_proj(pooled.flatten(1))

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout:g}, backend={self.backend!r}"


def _split_key_value(packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    # unbind, not two slices: its backward writes one packed gradient where slices would add two zero-padded ones
    key, value = packed.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return key, value


def _only(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _activation(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if callable(activation):
        return activation
    if activation not in _ACTIVATIONS:
        raise InvalidArgument(f"activation is {activation!r}; allowed are {', '.join(map(repr, _ACTIVATIONS))} or a function")
    return _ACTIVATIONS[activation]


def _check_heads(embed_dim: int, num_heads: int) -> None:
    if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise InvalidArgument(
            f"embed_dim is {embed_dim} and num_heads {num_heads}; embed_dim must be a positive multiple of num_heads"
        )


def _check_tokens(x: Tensor, embed_dim: int) -> None:
    if x.dim() != 3 or x.shape[-1] != embed_dim:
        raise InvalidArgument(f"x has shape {list(x.shape)}; it must be [B, S, {embed_dim}]")


class DynamicMaskAttention(nn.Module):
    """Self-attention whose keys compete to be kept: each query attends to its `keep` best-scored visible keys, O(S * keep).

        s_j = exp(A * softplus(W_dt v_j))          one score a key head, from the values of all key heads
        O = softmax(Q K^T / sqrt(D) + s) V         over the keys kept (`saccade.dynamic_mask_attention`)

    The scores carry a gradient to A, W_dt and the values. Parameters are named as in the Doge models (`q_proj`, `k_proj`, `v_proj`,
    `A`, `dt_proj`, `o_proj`, `q_norm`, `k_norm`), so that their weights load as they are.

    Args:
        embed_dim: E. num_heads: H. num_kv_heads: Hkv, a divisor of H (default H). head_dim: D (default E / H).
        keep: keys that each query keeps.
        form: "exp" as above, or "linear", `s_j = A * softplus(W_dt v_j)`, which later versions of the authors' code use; the kept
            keys are the same up to rounding where A > 0 or A < 0, the weights on them are not.
        bias: whether projections add a bias. norm_eps: of the root-mean-square norms of queries and keys, by head.
        backend: as in `saccade.dynamic_mask_attention`.

    Source:
        "Trainable Dynamic Mask Sparse Attention" (paper 004), Eq. 3 and Listing 1. A starts at 0: every score ties, and attention is
        a sliding window of `keep`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        keep: int,
        form: str = "exp",
        bias: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            _check_heads(embed_dim, num_heads)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise InvalidArgument(f"num_kv_heads is {kv_heads}; it must divide num_heads, {num_heads}")
        if form not in ("exp", "linear"):
            raise InvalidArgument(f"form is {form!r}; allowed are 'exp' and 'linear'")
        self.num_heads, self.num_kv_heads, self.form, self.backend = num_heads, kv_heads, form, backend
        self.keep = check_keep(keep)
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias, **made)
        self.k_proj = nn.Linear(embed_dim, kv_heads * self.head_dim, bias=bias, **made)
        self.v_proj = nn.Linear(embed_dim, kv_heads * self.head_dim, bias=bias, **made)
        self.A = nn.Parameter(torch.zeros(kv_heads, **made))
        self.dt_proj = nn.Linear(kv_heads * self.head_dim, kv_heads, bias=bias, **made)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias, **made)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps, **made)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps, **made)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: DynamicMaskCache | None = None,
    ) -> Tensor:
        """`[B, S, E]` to `[B, S, E]`.

        Args:
            position_embeddings: (cos, sin) of rotary embedding, `[B, S, D]` or `[S, D]`, of these tokens.
            lengths, document_ids: as in `dynamic_mask_attention`.
            cache: tokens before these, of the same `keep`; it then takes these too (excludes document_ids). Under torch.no_grad() alone:
                what a cache holds gets no gradient.
        """
        if hidden.dim() != 3 or hidden.shape[2] != self.q_proj.in_features:
            raise InvalidArgument(f"hidden has shape {list(hidden.shape)}; it must be [B, S, {self.q_proj.in_features}]")
        if cache is not None and document_ids is not None:
            raise InvalidArgument("cache and document_ids are both given; a cache holds one document a row")
        if cache is not None and cache.keep != self.keep:
            raise InvalidArgument(f"the cache keeps {cache.keep} entries, this module {self.keep}; they must agree")
        batch, tokens, _ = hidden.shape
        heads = (batch, tokens, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden).view(heads)).transpose(1, 2)
        values = self.v_proj(hidden)
        value = values.view(heads).transpose(1, 2)
        if position_embeddings is not None:
            query, key = (_rotated(x, *position_embeddings) for x in (query, key))
        options: dict[str, Any] = {"lengths": lengths, "enable_gqa": self.num_heads != self.num_kv_heads, "backend": self.backend}
        scores = self.scores(values)
        if cache is not None:
            out = cache.attend(query, key, value, scores, **options)
        else:
            found = dynamic_mask_attention(query, key, value, scores, keep=self.keep, document_ids=document_ids, **options)
            out = found if isinstance(found, Tensor) else found[0]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def scores(self, values: Tensor) -> Tensor:
        """float32 `[B, Hkv, S]` from the values of all key heads, `[B, S, Hkv * D]`."""
        steps = self.A.float() * F.softplus(self.dt_proj(values).float())
        return (steps.exp() if self.form == "exp" else steps).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[B, H, S, D]`, halves paired (as Llama's)."""
    cos, sin = (t.unsqueeze(-3) if t.dim() == 3 else t for t in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
