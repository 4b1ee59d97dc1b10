"""Doge (dynamic mask attention) in Hugging Face transformers: `register()`, then `attn_implementation="saccade_dynamic_mask"`.

    from saccade.integrations.doge import register

    register()
    model = DogeForCausalLM.from_pretrained(..., attn_implementation="saccade_dynamic_mask")

transformers passes a mask to an attention function, and Doge's is dense: `[B, H, Tq, Tk]`, built by
`DogeAttention.prepare_dynamic_mask`. So `register` also replaces `DogeAttention.forward`. If a model uses this implementation, the new
version makes the key scores with `saccade.dynamic_mask_scores`; otherwise it calls the original method. A mask function is registered
too, which turns padding and packed sequences into one document number per key. No tensor has size `[Tq, Tk]`.

Scores `exp(A * softplus(W_dt v))`, kept keys and bias are those of Doge's eager mode. All keys are kept while there are at most
`config.keep_window_size`. Scores are float32 here and have the dtype of the model in eager mode, so bfloat16 often ties there. Ties
differ too: here the newer key wins, and eager mode leaves them to `torch.topk`. Equal tokens tie in the first layer, because its values
do not depend on the position. If `A` is 0, as at initialisation, everything ties: here that is a sliding window, in eager mode any keys
that `topk` takes.
Refused: attention dropout, `config.sliding_window`, 4-D masks, padding between tokens. Source: paper 004, Eq. 3 and 5 to 10.

`saccade.integrations.doge_cache.DogeCache` decodes with `keep_window_size` entries per head instead of the whole history.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask.api import dynamic_mask_attention
from saccade.dynamic_mask.backends import BACKENDS
from saccade.dynamic_mask.scores.api import layer_scores
from saccade.engine.arguments import check_choice
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.hardware import has_package, package_version
from saccade.integrations.borders import by_positions, numbers_of
from saccade.integrations.registration import Registration
from saccade.integrations.transformers import check_name, refuse_unsupported, warn_weights

_REGISTERED: set[str] = set()
# the replaced methods of the layer class, shared by all copies of this package in the process
_REPLACED = "_saccade_replaced_forward"
# document numbers: padding before, tokens, padding after
_BEFORE, _FIRST, _AFTER = 0, 1, torch.iinfo(torch.int32).max


class DogeCall(NamedTuple):
    """The arguments that a layer passes besides the scores: documents `[B, Tk]` or None, the number of keys to keep, a bounded cache or None."""

    documents: Tensor | None
    keep: int
    bounded: Any


def register(name: str = "saccade_dynamic_mask", *, backend: str = "auto") -> Registration:
    """Make `attn_implementation=name` run `saccade.dynamic_mask_attention` in Doge models. Safe to call again.

    Args:
        name: the name by which models select it; the rules are those of `saccade.integrations.transformers.register`.
        backend: as in `saccade.dynamic_mask_attention`; register a second name to force one backend.

    Returns:
        a handle, as `saccade.integrations.transformers.register`. With the last one `DogeAttention.forward` is restored too.

    Raises:
        InvalidArgument: a name or backend that cannot be registered.
        SaccadeError: transformers is not installed, or its `DogeAttention` is not compatible.

    Source:
        "Trainable Dynamic Mask Sparse Attention" (paper 004), Eq. 3 and 5 to 10.
    """
    if not has_package("transformers"):
        raise SaccadeError("transformers is not installed; pip install 'saccade-attention[hf]'")
    known = ("auto", *(b.name for b in BACKENDS))
    check_choice("backend", backend, known)
    check_name(name, _REGISTERED)
    layer_class = _attention_class()
    _replace_forward(layer_class).add(name)
    forward = functools.partial(attention_forward, backend=backend)
    return Registration(name, forward, document_mask, _REGISTERED, functools.partial(_put_forward_back, layer_class))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    dynamic_mask: DogeCall | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool | None = None,
    backend: str = "auto",
    **kwargs: object,
) -> tuple[Tensor, None]:
    """`saccade.dynamic_mask_attention` in the protocol of transformers.

    Args:
        module: the layer. query: `[B, H, Tq, D]`. key, value: `[B, Hkv, Tk, D]`.
        attention_mask: the key scores, `[B, Hkv, Tk]`, with gradient.
        dynamic_mask: what `DogeAttention.forward` adds, see `DogeCall`.
        cu_seq_lens_q, position_ids: borders of sequences that are packed into the row, if the mask has none.
        kwargs: further arguments that models pass to every implementation; those that would change the result are refused.

    Returns:
        `[B, Tq, H, D]`, contiguous, and None for the weights.

    Raises:
        UnsupportedProblem: the layer passes no scores; or dropout, a bias, a soft cap, sinks, a paged cache or a direction other than
            causal are used.
    """
    refuse_unsupported(kwargs)
    if dynamic_mask is None or attention_mask is None:
        raise UnsupportedProblem(
            f"{type(module).__name__} passes no key scores; this attn_implementation serves DogeAttention of transformers "
            "(not copies of it from a model repository), for other models use 'saccade'"
        )
    if dropout:
        raise UnsupportedProblem(
            f"attention dropout is {dropout}; dynamic mask attention has none, set config.attention_dropout=0.0"
        )
    if position_bias is not None or is_causal is False:
        asked = "a position_bias" if position_bias is not None else "is_causal=False"
        raise UnsupportedProblem(f"{asked} is given; dynamic mask attention is causal and adds key scores alone")
    if output_attentions:
        warn_weights()
    dynamic_mask = _with_borders(dynamic_mask, module, query, key, cu_seq_lens_q, position_ids)
    out = _attend(query, key, value, attention_mask, dynamic_mask, scaling, backend)
    return out.transpose(1, 2).contiguous(), None


def _with_borders(
    call: DogeCall, module: torch.nn.Module, query: Tensor, key: Tensor, ends: Tensor | None, positions: Tensor | None
) -> DogeCall:
    """The call with the documents that ends or restarting positions give."""
    if ends is not None and ends.numel() > 2:
        if call.documents is not None or call.bounded is not None or query.shape[2] != key.shape[2] or query.shape[0] != 1:
            raise UnsupportedProblem(
                f"cu_seq_lens_q packs {ends.numel() - 1} sequences beside a mask, a cache or several rows; pass position_ids that restart"
            )
        return call._replace(documents=numbers_of(ends, query.shape[2])[None] + _FIRST)
    if call.documents is None and call.bounded is None:
        packed = by_positions(module, positions, query, key)
        if packed is not None:
            return call._replace(documents=packed.numbers + _FIRST)
    return call


def document_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **kwargs: object,
) -> Tensor | None:
    """The mask of transformers as one document number per key, int64 `[B, 1, 1, T]` for the T keys so far. None if there is only one
    document.

    It is 4-D so that transformers recognises it as a finished mask if it meets it again. The numbers are 0 for padding before the
    tokens, 1 and up for the sequences packed into the row, and 2**31 - 1 for padding after them.

    Args:
        attention_mask: bool `[B, T]`, True for tokens.
        mask_function: says by indices which keys are visible; evaluated only for each key and the key before it, to find packed
            sequences.

    Raises:
        UnsupportedProblem: padding between the tokens of a row, or a mask function of the caller's own.
    """
    if use_vmap:
        raise UnsupportedProblem(
            "an or_mask_function or and_mask_function is given; dynamic mask attention is causal, with key padding"
        )
    # a static cache has more keys, the last of them empty
    seen = int(q_offset) + q_length
    if attention_mask is not None:
        real = attention_mask[:, :seen].to(torch.bool)
        documents = None if bool(real.all()) else _documents_of_padding(real)
    else:
        documents = _documents_of_packing(mask_function, batch_size, seen, device)
    if documents is None and seen < kv_length:
        documents = torch.full((batch_size, seen), _FIRST, dtype=torch.int64, device=device)
    return None if documents is None else documents[:, None, None, :]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, call: DogeCall, scale: float | None, backend: str
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    documents = call.documents
    if call.bounded is not None:
        real = None if documents is None else documents[:, -query.shape[2] :] == _FIRST
        return call.bounded.attend(query, key, value, scores, real, scale=scale, enable_gqa=grouped, backend=backend)
    if documents is not None:
        key, value, scores = (x[:, :, : documents.shape[1]] for x in (key, value, scores))
    out = dynamic_mask_attention(
        query, key, value, scores, keep=call.keep, document_ids=documents, scale=scale, enable_gqa=grouped, backend=backend
    )
    return out if isinstance(out, Tensor) else out[0]


def _documents_of_padding(real: Tensor) -> Tensor:
    begun = real.cumsum(1) > 0
    goes_on = real.flip(1).cumsum(1).flip(1) > 0
    holes = begun & goes_on & ~real
    if bool(holes.any()):
        row, at = holes.nonzero()[0].tolist()
        raise UnsupportedProblem(
            f"attention_mask hides token {at} of row {row}, between tokens it shows; allowed is padding before the tokens or after "
            "them (to generate, pad on the left)"
        )
    return torch.where(begun & goes_on, _FIRST, torch.where(begun, _AFTER, _BEFORE))


def _documents_of_packing(mask_function: Callable | None, batch: int, count: int, device: torch.device | None) -> Tensor | None:
    from transformers.masking_utils import causal_mask_function

    if mask_function is None or mask_function is causal_mask_function or count < 2:
        return None
    rows, later = torch.arange(batch, device=device)[:, None], torch.arange(1, count, device=device)[None]
    begins = ~mask_function(rows, 0, later, later - 1).expand(batch, count - 1)
    return torch.nn.functional.pad(begins, (1, 0)).cumsum(1) + _FIRST


def _describe(module: Any, mask: Tensor | None, cache: Any) -> DogeCall:
    if module.config.sliding_window is not None:
        raise UnsupportedProblem(
            f"config.sliding_window is {module.config.sliding_window}; dynamic mask attention allows None only"
        )
    if not getattr(module.config, "is_causal", True):
        raise UnsupportedProblem("config.is_causal is False; this integration is causal")
    if mask is not None and (mask.dim() != 4 or mask.dtype != torch.int64 or tuple(mask.shape[1:3]) != (1, 1)):
        raise UnsupportedProblem(
            f"attention_mask is {mask.dtype} {list(mask.shape)} in the layer; the model takes [B, Tk] key padding, or none"
        )
    layers = getattr(cache, "layers", ())
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    bounded = layer if hasattr(layer, "kept") else None
    if bounded is not None and bounded.kept.keep != module.keep_window_size:
        raise InvalidArgument(
            f"the cache keeps {bounded.kept.keep} entries, config.keep_window_size is {module.keep_window_size}"
        )
    return DogeCall(None if mask is None else mask[:, 0, 0], module.keep_window_size, bounded)


def _attention_class() -> Any:
    try:
        from transformers.models.doge.modeling_doge import DogeAttention
    except ImportError as error:
        raise SaccadeError(f"transformers {package_version('transformers')} has no Doge: {error}") from None
    wanted = {"hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"}
    given = inspect.signature(DogeAttention.forward).parameters
    if not wanted <= set(given):
        raise SaccadeError(
            f"DogeAttention.forward of transformers {package_version('transformers')} takes ({', '.join(given)}); "
            f"needed are {', '.join(sorted(wanted))}"
        )
    return DogeAttention


class _Replaced(NamedTuple):
    """The names for which the forward of a class was replaced, its own, and that in its place."""

    names: set[str]
    before: Any
    after: Any


def _replace_forward(layer_class: Any) -> set[str]:
    """The names for which the forward of the class makes key scores; it is replaced the first time."""
    replaced = getattr(layer_class, _REPLACED, None)
    if replaced is not None:
        return replaced[0]
    names: set[str] = set()
    theirs = layer_class.forward

    @functools.wraps(theirs)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        run = _forward if self.config._attn_implementation in names else theirs
        return run(
            self, hidden_states, position_embeddings, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
        )

    layer_class.forward = forward
    setattr(layer_class, _REPLACED, _Replaced(names, theirs, forward))
    return names


def _forward(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A layer of Doge by its own modules, with scores and attention of ours. cache_position: of the first releases of transformers 5, whose caches ask
    for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

    call = _describe(layer, attention_mask, past_key_values)
    rows = (*hidden_states.shape[:-1], -1, layer.head_dim)
    query = layer.q_norm(layer.q_proj(hidden_states).view(rows)).transpose(1, 2)
    key = layer.k_norm(layer.k_proj(hidden_states).view(rows)).transpose(1, 2)
    value = layer.v_proj(hidden_states).view(rows).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        more = () if cache_position is None else ({"cache_position": cache_position},)
        key, value = past_key_values.update(key, value, layer.layer_idx, *more)
    attend = ALL_ATTENTION_FUNCTIONS[layer.config._attn_implementation]
    dropout = layer.attention_dropout if layer.training else 0.0
    scores = layer_scores(value, layer.dt_proj, layer.A)
    out, _ = attend(layer, query, key, value, scores, dropout=dropout, scaling=layer.scaling, dynamic_mask=call, **kwargs)
    return layer.o_proj(out.flatten(2)), None


def _put_forward_back(layer_class: Any, name: str) -> None:
    """Unregister a name, and with the last one restore the forward, unless other code has replaced ours since."""
    names, before, after = getattr(layer_class, _REPLACED)
    names.discard(name)
    if names or layer_class.forward is not after:
        return
    layer_class.forward = before
    delattr(layer_class, _REPLACED)
