"""Layers of timm under `saccade.integrations.timm.patch`. Those that call torch's function call ours; those that form their scores
by hand get another forward."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.engine.torch_sdpa import torch_attention
from saccade.integrations.sdpa import scaled_dot_product_attention

_NAME = "scaled_dot_product_attention"


def _attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention of `[B, H, T, D]`, or of windows `[images, W, H, T, D]`, with the layer's dropout, projected: `[B, T, C]`."""
    if bias is not None:
        bias = bias.to(value.dtype)  # under autocast a bias that an MLP made may have another dtype
    probability = layer.attn_drop.p if layer.training else 0.0
    out = scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value, bias, probability, scale=scale)
    return layer.proj_drop(layer.proj(out.transpose(-3, -2).flatten(-2).flatten(0, -3)))


def _windows(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Attention in windows, each `[images * W, H, N, D]`, with `bias [H, N, N]`, and `mask [W, N, N]` if windows are shifted. A
    shifted call has a bias for each window, which `attention` takes once for all images; timm repeats it for each."""
    bias = bias.unsqueeze(0)
    if mask is not None:
        bias = bias + mask.unsqueeze(1)  # [W, H, N, N]
        query, key, value = (x.unflatten(0, (-1, mask.shape[0])) for x in (query, key, value))
    return _attend(layer, query, key, value, bias, scale)


def _cosine_windows(layer: Any, qkv: Tensor, logit_scale: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """The same with cosines for scores: `qkv [3, images * W, H, N, D]`, `logit_scale [H, 1, 1]`."""
    query, key, value = qkv.unbind(0)
    query = F.normalize(query, dim=-1) * logit_scale.clamp(max=math.log(100)).exp()
    return _windows(layer, query, F.normalize(key, dim=-1), value, bias, mask, 1.0)


def swin(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Swin: windows with a bias of relative positions."""
    qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = qkv.unbind(0)
    return _windows(self, query, key, value, self._get_rel_pos_bias().squeeze(0), mask)


def swin_v2(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Swin V2: cosine attention, and a bias that an MLP makes of relative positions."""
    if self.q_bias is None:
        qkv = self.qkv(x)
    elif self.qkv_bias_separate:
        qkv = self.qkv(x) + torch.cat((self.q_bias, self.k_bias, self.v_bias))
    else:
        qkv = F.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
    heads, area = self.num_heads, x.shape[1]
    table = self.cpb_mlp(self.relative_coords_table).view(-1, heads)
    bias = 16 * torch.sigmoid(table[self.relative_position_index.flatten()].view(area, area, heads).permute(2, 0, 1))
    qkv = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return _cosine_windows(self, qkv, self.logit_scale, bias, mask)


def swin_v2_cr(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The other Swin V2 of timm, by Christoph Reich."""
    qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    bias = self._relative_positional_encodings().squeeze(0)
    return _cosine_windows(self, qkv, self.logit_scale.view(-1, 1, 1), bias, mask)


def gc_vit(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
    """GCViT: windows with a bias of relative positions, whose queries may be those of the whole image."""
    if self.use_global and q_global is not None:
        key, value = self.qkv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        query = q_global.repeat_interleave(x.shape[0] // q_global.shape[0], dim=0)
        query = query.reshape(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)
    else:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return _attend(self, query, key, value, self.rel_pos.get_bias(), self.scale)


def tnt(self: Any, x: Tensor) -> Tensor:
    """TNT: queries and keys of one projection, values of another."""
    query, key = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    value = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    return _attend(self, query, key, value, scale=self.scale)


def cross_vit(self: Any, x: Tensor) -> Tensor:
    """CrossViT: only the first token has a query."""
    projected = (self.wq(x[:, :1]), self.wk(x), self.wv(x))
    query, key, value = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in projected)
    return _attend(self, query, key, value, scale=self.scale)


def volo_class(self: Any, x: Tensor) -> Tensor:
    """VOLO's class attention: only the first token has a query."""
    key, value = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    query = self.q(x[:, :1]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    return _attend(self, query, key, value, scale=self.scale)


def con_vit(self: Any, x: Tensor) -> Tensor:
    """The last layers of ConViT, which are plain self-attention."""
    query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return _attend(self, query, key, value, scale=self.scale)


@dataclass(frozen=True)
class ByHand:
    """A layer of timm that forms its scores itself, or (Swin) repeats a bias: the function that computes it here, and the attributes that it must have."""

    forward: Callable[..., Tensor]
    needs: frozenset[str]


_COMMON = frozenset({"num_heads", "attn_drop", "proj", "proj_drop"})
BY_HAND = {
    "timm.models.swin_transformer.WindowAttention": ByHand(swin, _COMMON | {"qkv", "_get_rel_pos_bias"}),
    "timm.models.swin_transformer_v2.WindowAttention": ByHand(
        swin_v2,
        _COMMON
        | {"qkv", "q_bias", "qkv_bias_separate", "logit_scale", "cpb_mlp", "relative_coords_table", "relative_position_index"},
    ),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": ByHand(
        swin_v2_cr, _COMMON | {"qkv", "logit_scale", "_relative_positional_encodings"}
    ),
    "timm.models.gcvit.WindowAttentionGlobal": ByHand(gc_vit, _COMMON | {"qkv", "rel_pos", "use_global", "scale"}),
    "timm.models.tnt.Attention": ByHand(tnt, _COMMON | {"qk", "v", "scale"}),
    "timm.models.crossvit.CrossAttention": ByHand(cross_vit, _COMMON | {"wq", "wk", "wv", "scale"}),
    "timm.models.volo.ClassAttention": ByHand(volo_class, _COMMON | {"q", "kv", "scale"}),
    "timm.models.convit.MHSA": ByHand(con_vit, _COMMON | {"qkv", "scale"}),
}


@functools.cache
def _torch_with_ours() -> dict[str, Any]:
    """Stand-ins for the modules through which code reaches torch's function, with ours in its place."""
    functional = _changed(F, {_NAME: scaled_dot_product_attention})
    changed_nn = _changed(nn, {"functional": functional})
    return {F.__name__: functional, nn.__name__: changed_nn, torch.__name__: _changed(torch, {"nn": changed_nn})}


def _changed(module: types.ModuleType, changes: dict[str, Any]) -> types.ModuleType:
    made = types.ModuleType(module.__name__, module.__doc__)
    # everything else is looked up in the module itself, also names imported or patched later
    made.__dict__.update({"__getattr__": functools.partial(getattr, module), **changes})
    return made


def calling_ours(function: types.FunctionType) -> types.FunctionType | None:
    """The same code, whose names of torch lead to our attention; None if it does not call torch's function by such a name.

    It reaches one module of one model, where `saccade.replace_sdpa` reaches the process; and it holds where a checkpointed layer runs
    again in backward.
    """
    around = _around(function)
    if around is None:
        return None
    replaced = types.FunctionType(function.__code__, around, function.__name__, function.__defaults__, function.__closure__)
    replaced.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(replaced, function)
    return replaced


def _around(function: types.FunctionType) -> dict[str, Any] | None:
    """The globals of a function, with names of torch that lead to our attention; None if it does not call torch's function."""
    if _NAME not in function.__code__.co_names:
        return None
    copies = _torch_with_ours()
    pairs: list[tuple[Any, Any]] = [(F, copies[F.__name__]), (nn, copies[nn.__name__]), (torch, copies[torch.__name__])]
    pairs.append((torch_attention, scaled_dot_product_attention))
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found = {name: ours for name in names for theirs, ours in pairs if function.__globals__[name] is theirs}
    if not found:
        return None
    around = {**function.__globals__, **found}
    if "__name__" not in function.__code__.co_names:
        # torch.compile looks globals up in the module of this name, where it would find torch's own function again
        del around["__name__"]
    return around


def read_globals(patched: type) -> None:
    """Let the methods of a class of `patched_class`, which is made once, see the globals of their module as they are now."""
    for kind in patched.__mro__:
        for method in vars(kind).values() if kind.__module__ == __name__ else ():
            if original := getattr(method, "__wrapped__", None):
                method.__globals__.update(_around(original) or {})


def has_softmax(function: Any) -> bool:
    """Whether the code of a function names a softmax."""
    return isinstance(function, types.FunctionType) and not {"softmax", "Softmax"}.isdisjoint(function.__code__.co_names)


@functools.cache
def patched_class(base: type) -> type | None:
    """The class whose layers run our attention; None if it is not known how."""
    known = BY_HAND.get(f"{base.__module__}.{base.__qualname__}")
    if known is not None:
        return _subclass(base, {"forward": known.forward})
    if base.__module__.startswith("torch."):
        return None
    own = {name: calling_ours(function) for name, function in vars(base).items() if isinstance(function, types.FunctionType)}
    methods = {name: function for name, function in own.items() if function is not None}
    if any(has_softmax(vars(base)[name]) for name in own.keys() - methods.keys() - {"__init__"}):
        return None  # it overrides a parent's method by a computation of its own
    # patched parents come behind `base` and before its parents, where its own `super()` finds them
    parents = [patched for parent in base.__bases__ if (patched := patched_class(parent)) is not None]
    return _subclass(base, methods, *parents) if methods or parents else None


def _subclass(base: type, methods: dict[str, Any], *parents: type) -> type:
    return type(f"Saccade{base.__name__}", (base, *parents), {**methods, "__module__": __name__})
