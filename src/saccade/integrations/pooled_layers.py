"""The last layer of an encoder of transformers, for only the pooled token: keys and values of every token, all else of one.

A layer becomes one of these by a change of its class. A function on the instance would stay bound to the original layer when
`nn.DataParallel` copies the model. The parts (projections, norms, dropout, the MLP) are the layer's own and are called as modules, so
hooks and adapters on them keep working.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import UnsupportedProblem
from saccade.integrations.transformers import is_registered

POSITION = "saccade_pooled_position"
"""The argument by which a text tower tells its layers where the pooled token is, `[B]`; it travels with the call and not on the
module, as a checkpointed layer runs again in backward, maybe after another call."""

# arguments of a call that one query cannot serve
_REFUSED = {
    "past_key_values": "a cache of keys and values",
    "cu_seq_lens_q": "sequences packed into one row",
    "cu_seq_lens_k": "sequences packed into one row",
}


def rows(x: Tensor, position: Tensor | None) -> Tensor:
    """The pooled token of each sequence, `[B, 1, C]` of `[B, T, C]`: the first, or the one at `position`, `[B]`."""
    if position is None:
        return x[:, :1]
    return x[torch.arange(x.shape[0], device=x.device), position].unsqueeze(1)


def mask_row(mask: Tensor | None, position: Tensor | None, keys: int, like: Tensor, additive: bool) -> Tensor | None:
    """The row of a mask `[B or 1, H or 1, T, T]` that belongs to the pooled token, `[B, H or 1, 1, T]`.

    A tower that gives a position is causal, and may leave its mask to the attention function. One query has no triangle, so the row is made here:
    True, or 0 with `additive`, up to the position.
    """
    if mask is not None and mask.dim() != 4:
        raise UnsupportedProblem(
            f"the last layer got a mask of shape {list(mask.shape)}; the pooled token alone needs 4 dimensions"
        )
    if position is None:
        return None if mask is None else mask[:, :, :1]
    if mask is not None:
        batch = torch.arange(len(position), device=position.device)
        return mask.expand(len(position), -1, -1, -1)[batch, :, position].unsqueeze(2)
    visible = (torch.arange(keys, device=position.device) <= position[:, None])[:, None, None]
    if not additive:
        return visible
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)


def attend(
    attention: Any,
    code: Any,
    projections: tuple[nn.Module, nn.Module, nn.Module],
    tokens: Tensor,
    mask: Tensor | None,
    head_dim: int,
    scale: float,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention of the pooled token to all tokens, `[B, 1, H * D]`, by the function that the model is set to.

    `code` is the module of transformers in which the layer is written: it has the table of attention functions, and "eager".
    """
    position = kwargs.pop(POSITION, None)
    for name, meaning in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedProblem(f"the last layer computes the pooled token alone, which excludes {meaning} ({name})")
    chosen = attention.config._attn_implementation
    if chosen not in ("eager", "sdpa") and not is_registered(chosen):
        raise UnsupportedProblem(
            f"attn_implementation is {chosen!r}; with the pooled token alone in the last layer it may be 'eager', 'sdpa' or a name that "
            "saccade.integrations.transformers.register made"
        )
    to_query, to_key, to_value = projections
    projected = (to_query(rows(tokens, position)), to_key(tokens), to_value(tokens))
    query, key, value = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in projected)
    row = mask_row(mask, position, tokens.shape[1], query, additive=chosen == "eager")
    function: Callable[..., Any] = code.ALL_ATTENTION_FUNCTIONS.get_interface(chosen, code.eager_attention_forward)
    probability = dropout if attention.training else 0.0
    options = {**kwargs, "is_causal": False}  # the mask row already says it
    out, _ = function(attention, query, key, value, row, dropout=probability, scaling=scale, **options)
    return out.flatten(2)


def bert_forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """A layer of BERT: norms after the sums. Further positions are those of cross-attention, which only decoders have."""
    own = self.attention.self
    out = attend(
        own, self._saccade_code, (own.query, own.key, own.value), hidden_states, attention_mask, own.attention_head_size,
        own.scaling, own.dropout.p, kwargs,
    )  # fmt: skip
    return self.feed_forward_chunk(self.attention.output(out, rows(hidden_states, None)))


def vit_forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """A layer of ViT: norms before, dropout after each half."""
    own = self.attention
    out = attend(
        own, self._saccade_code, (own.q_proj, own.k_proj, own.v_proj), self.layernorm_before(hidden_states), attention_mask,
        own.head_dim, own.scaling, own.attention_dropout, kwargs,
    )  # fmt: skip
    pooled = self.dropout(own.o_proj(out)) + rows(hidden_states, None)
    return self.dropout(self.mlp(self.layernorm_after(pooled))) + pooled


def clip_forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """A layer of CLIP, with norms before attention and the MLP. A text tower later picks the pooled position out of `[B, T, C]`, so it
    gets the one token as an expanded view of that shape."""
    own, position = self.self_attn, kwargs.get(POSITION)
    out = attend(
        own, self._saccade_code, (own.q_proj, own.k_proj, own.v_proj), self.layer_norm1(hidden_states), attention_mask, own.head_dim,
        own.scale, own.dropout, kwargs,
    )  # fmt: skip
    pooled = own.out_proj(out) + rows(hidden_states, position)
    pooled = self.mlp(self.layer_norm2(pooled)) + pooled
    return pooled if position is None else pooled.expand_as(hidden_states)


def norm_forward(self: Any, input: Tensor) -> Tensor:
    """The norm behind a text tower: of the one token that its layers expanded."""
    return nn.LayerNorm.forward(self, input[:, :1]).expand_as(input)


@functools.cache
def pooled_class(base: type, forward: Callable[..., Any]) -> type:
    """`base` with another forward. It has a name of its own, so that it shows when a model is printed."""
    own = {"forward": forward, "__module__": __name__, "_saccade_code": sys.modules[base.__module__]}
    return type(f"Pooled{base.__name__}", (base,), own)
