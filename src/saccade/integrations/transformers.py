"""Hugging Face transformers: `register()`, then `attn_implementation="saccade"` in `from_pretrained` or `set_attn_implementation`.

`register_nm_sparse()` does the same for `attn_implementation="saccade_nm"`, which computes another result: N:M sparse attention.

A mask function is registered under the same name: without one transformers passes no mask at all, and padded batches give
wrong results without any error. Models that ignore the attention function, but not its mask, are refused or run torch's layers:
`saccade.integrations.refusal`. Doge's dynamic masks have a registration of their own: `saccade.integrations.doge`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine.arguments import check_choice, shown
from saccade.engine.calls import autocast
from saccade.engine.problem import captured
from saccade.engine.window import Window
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.exact.api import attention
from saccade.exact.backends import BACKENDS as ATTENTION_BACKENDS
from saccade.exact.varlen.api import attend as attend_packed
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL
from saccade.exact.varlen.backends import BACKENDS as VARLEN_BACKENDS
from saccade.hardware import has_package
from saccade.integrations.borders import bordered, by_positions, ends_of_keys
from saccade.integrations.mask_forms import key_padding, visible_keys, with_bias
from saccade.integrations.packed_mask import PackedMask, packed_mask
from saccade.integrations.packed_qkv import packed_qkv
from saccade.integrations.registration import Registration
from saccade.integrations.unformed import formed
from saccade.integrations.window_mask import window_for, window_mask
from saccade.nm_sparse.api import nm_sparse_attention
from saccade.nm_sparse.backends import BACKENDS as NM_SPARSE_BACKENDS
from saccade.nm_sparse.problem import check_dense, parse_pattern

_logger = logging.getLogger("saccade")

_REGISTERED: set[str] = set()
_TAKE_WINDOWS = frozenset(("auto", "long", "ragged", "sdpa", "reference"))
_PACKS = frozenset(("auto", *(backend.name for backend in VARLEN_BACKENDS)))

# arguments that change the result in a way that is not supported here; any value except None must stop the call
_UNSUPPORTED = {
    "softcap": "a soft cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "a sparse choice of keys",
    "block_indices": "a sparse choice of blocks of keys",
    "cache": "a paged cache (continuous batching)",
}


def register(name: str = "saccade", *, backend: str = "auto") -> Registration:
    """Make `attn_implementation=name` run `saccade.attention` in every model of transformers. Safe to call again.

    A model with a table of its own layers (Falcon, SAM's vision tower) runs those for "sdpa" and warns once. Others that ignore the function raise when made.

    Args:
        name: the name by which models select it. transformers interprets "flash", "/" and "|" in a name, so these are refused, as are its own.
        backend: as in `saccade.attention`; register a second name to force one backend, under which models with such a table raise too.

    Returns:
        the handle of this registration, a context manager with `restore()`, which takes the name back, `active` and `name`.

    Raises:
        InvalidArgument: a name or backend that cannot be registered.
        SaccadeError: transformers is not installed.
    """
    forward = functools.partial(attention_forward, backend=backend)
    return _register(name, forward, backend, [b.name for b in ATTENTION_BACKENDS], exact=True)


def register_nm_sparse(
    name: str = "saccade_nm", *, pattern: str = "2:4", dense_first: int = 0, dense_recent: int = 0, backend: str = "auto"
) -> Registration:
    """Make `attn_implementation=name` run `saccade.nm_sparse_attention`: results of a pretrained model are close. Safe to call again.

    Args:
        name: as in `register`; register several for several patterns.
        pattern: as in `saccade.nm_sparse_attention`.
        dense_first: as in `saccade.nm_sparse_attention`.
        dense_recent: as there; a layer that is given fewer queries than keys, as in decoding with a cache, raises `UnsupportedProblem`.
        backend: as in `saccade.nm_sparse_attention`.

    Returns:
        a handle, as `register`.

    Raises:
        InvalidArgument: a name, pattern, number of dense keys or backend that cannot be registered.
        SaccadeError: transformers is not installed.

    Source: Dfss (paper 003), sections 3 and A.1.
    """
    dense_first, dense_recent = check_dense(dense_first, dense_recent, parse_pattern(pattern)[1])
    return _register(
        name,
        functools.partial(
            nm_sparse_forward, pattern=pattern, dense_first=dense_first, dense_recent=dense_recent, backend=backend
        ),
        backend,
        [b.name for b in NM_SPARSE_BACKENDS],
    )


def _register(name: str, forward: Callable[..., Any], backend: str, backends: list[str], exact: bool = False) -> Registration:
    if not has_package("transformers"):
        raise SaccadeError("transformers is not installed; pip install 'saccade-attention[hf]'")
    check_choice("backend", backend, ("auto", *backends))
    check_name(name, _REGISTERED)
    return Registration(name, forward, boolean_mask, _REGISTERED, lambda name: None, exact and backend == "auto")


def check_name(name: str, registered: set[str]) -> None:
    """Raise unless `name` may be registered; `registered` are names that may be registered again."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not isinstance(name, str):
        raise InvalidArgument(f"name is {shown(name)}; it must be a str")
    if not name or any(part in name for part in ("flash", "/", "|")):
        raise InvalidArgument(f"name is {name!r}; it must not be empty nor contain 'flash', '/' or '|'")
    if name not in registered and (name == "eager" or name in ALL_ATTENTION_FUNCTIONS):
        raise InvalidArgument(f"name is {name!r}, which transformers already uses; choose another")


def is_registered(name: str | None) -> bool:
    """Whether `register` or `register_nm_sparse` made this name."""
    return name in _REGISTERED


def boolean_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of transformers for "sdpa", bool `[B, 1, Tq, Tk]` or None, with five differences.

    A mask that hides nothing is None while a graph is captured or exported too. A pure key-padding mask is one row, expanded over the queries without memory, which `attention_forward` recognises by its
    stride. The causal mask of packed sequences is a `PackedMask`, that of a sliding window a `WindowMask`, which have no memory either. And a causal mask is omitted only where
    the layer will know that it is causal.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    # delegated to transformers, because the signature of mask functions changes between releases, while the meaning of this one does not; by
    # its own name, since "sdpa" may be registered as this function
    build = functools.partial(sdpa_mask, kv_length=kv_length, mask_function=mask_function, config=config)
    plain = mask_function is bidirectional_mask_function and not use_vmap
    if plain and attention_mask is None and kwargs.get("allow_is_bidirectional_skip", True):
        return None  # it would hide nothing; during a capture or export transformers still makes it
    if plain and attention_mask is not None:
        row = build(q_length=1, attention_mask=attention_mask, allow_is_causal_skip=False, **kwargs)
        return None if row is None else row.expand(-1, -1, q_length, -1)
    packed = packed_mask(mask_function, attention_mask, q_length, kv_length)
    if packed is not None:
        return packed
    windowed = window_mask(mask_function, attention_mask, q_length, kv_length, kwargs)
    if windowed is not None:
        return windowed
    # layers of such a model claim not to be causal, and leave causality to the mask
    by_mask = bool(getattr(config, "use_bidirectional_attention", False))
    # more keys than queries without a mask: an empty static cache, or only the last tokens; a layer could not tell which
    by_mask = by_mask or kv_length > q_length > 1
    skips = allow_is_causal_skip and not by_mask and attention_mask is None and not use_vmap
    if skips and mask_function is causal_mask_function and kv_length == q_length and captured():
        return None  # as in eager calls; borders of packed sequences then need no mask either
    return build(
        q_length=q_length,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        allow_is_causal_skip=allow_is_causal_skip and not by_mask,
        **kwargs,
    )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool | None = None,
    backend: str = "auto",
    **kwargs: object,
) -> tuple[Tensor, None]:
    """`saccade.attention` in the protocol of transformers, and `saccade.attention_varlen` if sequences are packed into one row.

    Args:
        module: the layer. If the argument is_causal is None, its `is_causal` is used, or that of its config, or `is_decoder`.
        query: `[B, H, Tq, D]`. key, value: `[B, Hkv, Tk, D]`, Hkv a divisor of H.
        attention_mask: 4-D bool (True = attend) or floating (added to the scores), or 2-D `[B, Tk]` key padding; a causal layer stays causal.
        position_bias: added to the scaled scores, broadcastable to `[B, H, Tq, Tk]`, with gradient.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of the sequences packed into the only row of a batch, as
            `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives them. A causal mask is then aligned with the last key of each
            sequence, as in flash-attn. A mask or bias beside them is combined with the borders. The ends of a `PackedMask` are its own.
        position_ids: if they restart and a causal layer has no mask, each restart begins a sequence of its own.
        kwargs: further arguments that models pass to every implementation; those that would change the result are refused.

    Returns:
        `[B, Tq, H, D]`, contiguous, and None for the weights.

    Raises:
        UnsupportedProblem: soft cap, sinks, a sparse choice of keys, a paged cache; or a window, packing or direction that neither layer nor mask states.
    """
    refuse_unsupported(kwargs)
    if output_attentions:
        warn_weights()
    mask = attention_mask
    if mask is None and cu_seq_lens_q is None and _is_causal(module, query, key, None, is_causal):
        mask = by_positions(module, position_ids, query, key)
    if isinstance(mask, PackedMask) and position_bias is None and backend in _PACKS and mask.holds_for(query, key):
        both = (mask.ends, mask.ends), (mask.longest, mask.longest)
        return _packed_attention(query, key, value, *both, dropout, True, scaling, backend, mask.window), None
    takes_window = position_bias is None and backend in _TAKE_WINDOWS
    window = window_for(mask, query, key, cu_seq_lens_q, cu_seq_lens_k) if takes_window else None
    attention_mask = formed(mask) if window is None else None
    packed = _is_packed(query, key, attention_mask, position_bias, cu_seq_lens_q)
    # without a given bound, the complete row is the bound, and every bucket of lengths is launched
    longest = query.shape[2] if max_length_q is None else max_length_q, key.shape[2] if max_length_k is None else max_length_k
    carried = sliding_window if window is None else None
    _check_carried_by_mask(attention_mask, int(longest[1]) if packed else key.shape[2], carried)
    causal = window is None and _is_causal(module, query, key, attention_mask, is_causal)
    if packed:
        assert cu_seq_lens_q is not None, "packed says so"
        ends = (cu_seq_lens_q, ends_of_keys(query, key, cu_seq_lens_q, cu_seq_lens_k))
        return _packed_attention(query, key, value, ends, longest, dropout, causal, scaling, backend, window), None
    if cu_seq_lens_q is not None and cu_seq_lens_q.numel() > 2:
        attention_mask, causal = bordered(attention_mask, query, key, cu_seq_lens_q, cu_seq_lens_k, causal), False
    seen = None if position_bias is None or causal else visible_keys(attention_mask, query, key)
    call = _arguments(query, key, value, attention_mask if seen is None else None, position_bias, causal)
    options = dropout, call[4], scaling, query.shape[1] != key.shape[1]
    return _tokens(attention(*call[:4], *options, window=window, key_mask=seen, backend=backend)), None


def nm_sparse_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool | None = None,
    pattern: str = "2:4",
    dense_first: int = 0,
    dense_recent: int = 0,
    backend: str = "auto",
    **kwargs: object,
) -> tuple[Tensor, None]:
    """`saccade.nm_sparse_attention` in the protocol of transformers; everything else as in `attention_forward`.

    Masked keys never displace visible ones, so padding takes no place in a group. On the left it takes the place of the first keys,
    which `dense_first` counts with it.
    """
    refuse_unsupported(kwargs)
    if dense_recent and query.shape[2] != key.shape[2]:
        raise UnsupportedProblem(
            f"dense_recent is {dense_recent} for {query.shape[2]} queries and {key.shape[2]} keys; it counts from the index of a query, "
            "which is that of its token only if there are as many queries as keys; register a name without it"
        )
    if attention_mask is None and cu_seq_lens_q is None and _is_causal(module, query, key, None, is_causal):
        attention_mask = by_positions(module, position_ids, query, key)
    attention_mask = formed(attention_mask)
    _check_carried_by_mask(attention_mask, key.shape[2], sliding_window)
    if output_attentions:
        warn_weights()
    causal = _is_causal(module, query, key, attention_mask, is_causal)
    if cu_seq_lens_q is not None and cu_seq_lens_q.numel() > 2:
        attention_mask, causal = bordered(attention_mask, query, key, cu_seq_lens_q, cu_seq_lens_k, causal), False
    call, grouped = _arguments(query, key, value, attention_mask, position_bias, causal), query.shape[1] != key.shape[1]
    out = nm_sparse_attention(
        *call[:4], dropout, call[4], scaling, grouped, pattern=pattern, dense_first=dense_first, dense_recent=dense_recent,
        backend=backend,
    )  # fmt: skip
    return _tokens(out), None


def _is_causal(module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, given: bool | None) -> bool:
    # the rule of transformers: a whole mask contains the causal pattern already, and a single query is a decoding step that sees all keys
    if query.shape[2] <= 1 or _is_whole(mask):
        return False
    if not (_declared_causal(module) if given is None else given):
        return False
    if key.shape[2] > query.shape[2]:
        raise UnsupportedProblem(
            f"{type(module).__name__} is causal, with {query.shape[2]} queries, {key.shape[2]} keys and no mask for each query; without one "
            "nothing says which keys the first query sees"
        )
    return True


def _is_whole(mask: Tensor | None) -> bool:
    """Whether there is a mask of query and key pairs; a key padding mask, `[B, Tk]`, is none."""
    return mask is not None and mask.dim() != 2


def _declared_causal(module: torch.nn.Module) -> bool:
    """Whether a layer without a whole mask is causal: not if the config denies it, else as the layer says, else as the config says."""
    config = getattr(module, "config", None)
    if getattr(config, "is_causal", None) is False:
        return False
    for declared in (getattr(module, "is_causal", None), getattr(config, "is_causal", None), getattr(config, "is_decoder", None)):
        if declared is not None:
            return bool(declared)
    raise UnsupportedProblem(
        f"{type(module).__name__} and its config say neither is_causal nor is_decoder, and it passes no mask for each query, so its direction is "
        "unknown; set is_causal on the layer, or use attn_implementation='eager'"
    )


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, position_bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """query, key, value, attn_mask and is_causal in the form that our functions take."""
    mask = key_padding(attention_mask)
    if causal and (mask is not None or position_bias is not None):  # torch accepts only one of mask and is_causal
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        mask, causal = visible if mask is None else mask & visible, False
    return query, key, value, mask if position_bias is None else with_bias(mask, position_bias), causal


def _tokens(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    heads = out if isinstance(out, Tensor) else out[0]
    return heads.transpose(1, 2).contiguous()


def refuse_unsupported(arguments: dict[str, object]) -> None:
    """Raise if a model passes an argument that changes the result and is not supported here."""
    for name, meaning in _UNSUPPORTED.items():
        if arguments.get(name) is not None:
            raise UnsupportedProblem(
                f"{name} asks for {meaning}, which saccade does not compute; use attn_implementation='eager'"
            )


def _check_carried_by_mask(mask: Tensor | None, longest: int, window: int | None) -> None:
    """Raise if a window would be lost: it reaches us only in the mask that transformers builds. longest: keys of the longest sequence."""
    if not _is_whole(mask) and window is not None and longest > window:
        raise UnsupportedProblem(f"sliding_window is {window} for {longest} keys and there is no mask to carry it")


def _is_packed(query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, cu_seq_lens: Tensor | None) -> bool:
    """Whether the only row of a batch holds several sequences that only their ends separate."""
    return cu_seq_lens is not None and mask is None and bias is None and query.shape[0] == key.shape[0] == 1


def _packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    dropout: float,
    causal: bool,
    scaling: float | None,
    backend: str,
    window: Window | None = None,
) -> Tensor:
    query, key, value = autocast(query, key, value)
    qkv = packed_qkv(query, key, value)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)] if qkv is None else qkv.unbind(1)
    ends_q, ends_k = (ends[0].to(torch.int32),) * 2 if ends[1] is ends[0] else (x.to(torch.int32) for x in ends)
    options = BOTTOM_RIGHT if causal else FULL, scaling, query.shape[1] != key.shape[1], None, window, False, backend
    found = attend_packed((*rows, ends_q, ends_k, int(longest[0]), int(longest[1]), dropout, *options), qkv)
    assert isinstance(found, Tensor), "the log-sum-exp was not asked for"
    return found.unflatten(0, (query.shape[0], query.shape[2]))


@functools.cache
def warn_weights() -> None:
    """Warn once that there are no attention weights."""
    _logger.warning("saccade never forms the attention weights, so output_attentions=True gives None; use 'eager' for them")
