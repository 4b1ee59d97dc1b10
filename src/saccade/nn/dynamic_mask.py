"""Self-attention with trainable dynamic masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.dynamic_mask.api import dynamic_mask_attention
from saccade.dynamic_mask.decode.cache import DynamicMaskCache
from saccade.dynamic_mask.scores.api import layer_scores
from saccade.engine.arguments import FLOATING, check_choice, check_count, check_keep, shown
from saccade.engine.kinds import check_kinds
from saccade.errors import InvalidArgument
from saccade.nn.checks import check_backend, check_epsilon, check_heads, check_made, check_size, check_tokens
from saccade.nn.module import Module


class DynamicMaskAttention(Module):
    """Self-attention in which each query attends to its `keep` best-scored visible keys, in O(S * keep).

        s_j = exp(A * softplus(W_dt v_j))          one score per key head, from the values of all key heads
        O = softmax(Q K^T / sqrt(D) + s) V         over the kept keys (`saccade.dynamic_mask_attention`)

    The scores carry a gradient to A, W_dt and the values. Parameters are named as in the Doge models (`q_proj`, `k_proj`,
    `v_proj`, `A`, `dt_proj`, `o_proj`, `q_norm`, `k_norm`), so that their weights can be loaded unchanged.

    Args:
        embed_dim: E.
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H (default H).
        head_dim: D (default E / H).
        keep: keys that each query keeps.
        sinks: how many first keys it also keeps, whatever their scores.
        window: how many of the newest keys it also keeps, whatever their scores.
        form: "exp" as above, or "linear", `s_j = A * softplus(W_dt v_j)`, as in later versions of the authors' code. The kept
            keys are the same up to rounding where A > 0 or A < 0; their weights are not.
        bias: whether projections add a bias.
        norm_eps: epsilon of the root-mean-square norms of queries and keys, per head.
        backend: as in `saccade.dynamic_mask_attention`.
        device: of the parameters, torch's default unless given.
        dtype: of the parameters, torch's default unless given.

    Raises:
        InvalidArgument: a size, form or input shape is invalid.

    Source:
        "Trainable Dynamic Mask Sparse Attention" (paper 004), Eq. 3 and Listing 1. A starts at 0, where all scores tie and
        attention is a sliding window of `keep` keys.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        keep: int,
        sinks: int = 0,
        window: int = 0,
        form: str = "exp",
        bias: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            check_heads(embed_dim, num_heads)
        else:
            for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("head_dim", head_dim)):
                check_size(name, size)
        check_made(device, dtype, bias)
        check_backend(backend)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_size("num_kv_heads", kv_heads)
        if num_heads % kv_heads:
            raise InvalidArgument(f"num_kv_heads is {kv_heads}; it must divide num_heads, {num_heads}")
        check_choice("form", form, ("exp", "linear"))
        check_epsilon("norm_eps", norm_eps)
        self.num_heads, self.num_kv_heads, self.form, self.backend = num_heads, kv_heads, form, backend
        self.keep, self.sinks, self.window = check_keep(keep), check_count("sinks", sinks, 0), check_count("window", window, 0)
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

    def reset_parameters(self) -> None:
        """Make all scores equal again; projections and norms are modules with their own `reset_parameters`."""
        nn.init.zeros_(self.A)

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
            hidden: `[B, S, E]`.
            position_embeddings: (cos, sin) of rotary embedding, `[B, S, D]` or `[S, D]`, of these tokens.
            lengths: as in `dynamic_mask_attention`.
            document_ids: as in `dynamic_mask_attention`.
            cache: the tokens before these, with the same `keep`, `sinks` and `window`; these tokens are added to it (excludes document_ids). Only under
                torch.no_grad(), because the contents of a cache get no gradient.

        Raises:
            InvalidArgument: a bad argument, or a cache that does not fit this module.
            UnsupportedProblem: the cache is given keys that require a gradient; or the named backend cannot run this call.
        """
        check_tokens(hidden, self.q_proj.in_features, "hidden")
        if cache is not None and not isinstance(cache, DynamicMaskCache):
            raise InvalidArgument(f"cache is {shown(cache)}; it must be a saccade.DynamicMaskCache or None")
        if position_embeddings is not None:
            _check_rotary(position_embeddings, (hidden.shape[0], hidden.shape[1], self.head_dim), hidden.device)
        if cache is not None and document_ids is not None:
            raise InvalidArgument("cache and document_ids are both given; a cache holds one document per row")
        rule = self.keep, self.sinks, self.window
        if cache is not None and (cache.keep, cache.sinks, cache.window) != rule:
            held = cache.keep, cache.sinks, cache.window
            raise InvalidArgument(f"(keep, sinks, window) are {held} in the cache and {rule} in this module; they must agree")
        query = self.q_norm(self._by_head(self.q_proj(hidden))).transpose(1, 2)
        key = self.k_norm(self._by_head(self.k_proj(hidden))).transpose(1, 2)
        values = self.v_proj(hidden)
        value = self._by_head(values).transpose(1, 2)
        if position_embeddings is not None:
            query, key = (_rotated(x, *position_embeddings) for x in (query, key))
        options: dict[str, Any] = {"lengths": lengths, "enable_gqa": self.num_heads != self.num_kv_heads, "backend": self.backend}
        scores = self.scores(values)
        if cache is not None:
            out = cache.attend(query, key, value, scores, **options)
        else:
            options |= {"keep": self.keep, "sinks": self.sinks, "window": self.window, "document_ids": document_ids}
            found = dynamic_mask_attention(query, key, value, scores, **options)
            out = found if isinstance(found, Tensor) else found[0]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        """`[B, S, heads, D]` of a projection, with as many heads as it has: fewer than the module's if heads are sharded over GPUs."""
        return x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim))

    def scores(self, values: Tensor) -> Tensor:
        """`saccade.dynamic_mask_scores`: float32 `[B, Hkv, S]` from the values of all key heads, `[B, S, Hkv * D]`."""
        return layer_scores(values, self.dt_proj, self.A, self.form)


def _check_rotary(given: Any, shape: tuple[int, int, int], device: torch.device) -> None:
    """Raise unless these are (cos, sin), each `[B, S, D]`, `[1, S, D]` or `[S, D]`."""
    wanted = f"it must be (cos, sin), two floating-point tensors {list(shape)} or {list(shape[1:])} on {device}"
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InvalidArgument(f"position_embeddings is {shown(given)}; {wanted}")
    if shape[2] % 2:
        raise InvalidArgument(
            f"position_embeddings is given with head_dim {shape[2]}; rotary embedding pairs halves, so it must be even"
        )
    for part in given:
        check_kinds(position_embeddings=part)
        if not isinstance(part, Tensor) or part.dtype not in FLOATING or part.device != device:
            raise InvalidArgument(f"position_embeddings holds {shown(part)}; {wanted}")
        if tuple(part.shape) not in (shape, (1, *shape[1:]), shape[1:]):
            raise InvalidArgument(f"position_embeddings holds a tensor {list(part.shape)}; {wanted}")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[B, H, S, D]`, pairing the two halves of D as in Llama, in the dtype of x."""
    cos, sin = (t.unsqueeze(-3) if t.dim() == 3 else t for t in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
