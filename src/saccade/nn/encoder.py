"""Encoder layers and stacks: torch's `TransformerEncoder` with the attention of this library."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.engine.arguments import check_flag, shown
from saccade.errors import InvalidArgument
from saccade.nn.attention import SelfAttention
from saccade.nn.checks import check_epsilon, check_heads, check_module, check_size, check_tokens
from saccade.nn.module import Module

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class EncoderLayer(Module):
    """One transformer encoder layer: the arguments and results are those of `torch.nn.TransformerEncoderLayer(batch_first=True)`.

    Post-norm (`norm_first=False`): `x = norm1(x + SA(x)); x = norm2(x + FF(x))`.
    Pre-norm: `x = x + SA(norm1(x)); x = x + FF(norm2(x))`. `FF(x) = linear2(dropout(activation(linear1(x))))`.

    Args:
        d_model: E.
        nhead: H, a divisor of E.
        dim_feedforward: width inside FF.
        dropout: dropout probability after both sublayers, inside FF, and on the attention weights.
        activation: "relu", "gelu" or a function of a tensor.
        layer_norm_eps: epsilon of both layer norms.
        norm_first: pre-norm, else post-norm.
        bias: whether projections and layer norms have a bias.
        backend: as in `saccade.attention`.
        device: of the parameters, torch's default unless given.
        dtype: of the parameters, torch's default unless given.

    Raises:
        InvalidArgument: a size, probability, activation or input shape is invalid.

    Source: "Attention Is All You Need" (Vaswani et al. 2017), sections 3.1 and 3.3 with Eq. 2, for the post-norm layer.
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
        check_heads(d_model, nhead, "d_model", "nhead")
        self.self_attn = SelfAttention(d_model, nhead, dropout, bias, backend=backend, device=device, dtype=dtype)
        check_size("dim_feedforward", dim_feedforward)
        check_epsilon("layer_norm_eps", layer_norm_eps)
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.dropout, self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = _activation(activation)
        self.norm_first = check_flag("norm_first", norm_first)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        cls_only: bool = False,
    ) -> Tensor:
        """One layer.

        Args:
            x: `[B, S, E]`.
            lengths: as in `SelfAttention.forward`.
            attn_mask: as in `SelfAttention.forward`.
            is_causal: as in `SelfAttention.forward`.
            cls_only: as in `SelfAttention.forward`.

        Returns:
            `[B, S, E]`, or `[B, 1, E]` with `cls_only`.
        """
        check_tokens(x, self.self_attn.embed_dim)
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


class Encoder(Module):
    """A stack of copies of one `EncoderLayer`, like `torch.nn.TransformerEncoder`, that can compute only the CLS token at the
    end.

    Use `cls_only=True` if only token 0 is read, as in classification or sentence embedding by CLS. The last layer then projects
    one query, attends with Tq = 1, and runs the residual, norms and feed-forward on one token. Outputs and gradients equal those of
    the whole stack followed by `[:, :1]` (paper 002); with dropout they agree only in distribution.

    Args:
        layer: the layer to copy `num_layers` times.
        num_layers: at least 1.
        norm: a final norm, or None.

    Raises:
        InvalidArgument: num_layers is no whole number, or below 1.

    Source: "Fast Attention For Short Sequences" (paper 002), which remarks that the last layer needs only the CLS query.
    """

    def __init__(self, layer: EncoderLayer, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        check_size("num_layers", num_layers)
        check_module("layer", layer)
        if norm is not None:
            check_module("norm", norm)
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
        """All layers.

        Args:
            x: `[B, S, E]`.
            lengths: as in `SelfAttention.forward`.
            cls_only: compute only the output of token 0, in the last layer.
            attn_mask: as in `SelfAttention.forward`.
            is_causal: as in `SelfAttention.forward`.

        Returns:
            `[B, S, E]`, or `[B, 1, E]` with `cls_only`.
        """
        cls_only, last = check_flag("cls_only", cls_only), len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(x, lengths, attn_mask=attn_mask, is_causal=is_causal, cls_only=cls_only and i == last)
        return x if self.norm is None else self.norm(x)


def _activation(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if callable(activation) and not isinstance(activation, type):
        return activation
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise InvalidArgument(
            f"activation is {shown(activation)}; allowed are {', '.join(map(repr, _ACTIVATIONS))} or a function"
        )
    return _ACTIVATIONS[activation]
