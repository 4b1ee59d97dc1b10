"""The differences between encoders of transformers, as data: how they count positions, and what runs after the last layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Family(NamedTuple):
    """positions: "columns" numbers the columns of the padded batch, "counted" the real tokens from `pad_token_id + 1` on. causal: a decoder, which
    is served inside of an embedding model alone."""

    positions: str
    causal: bool = False


_COLUMNS, _COUNTED, _CAUSAL = Family("columns"), Family("counted"), Family("columns", True)
# `model_type` of a config -> family. A model that is not listed may mix tokens elsewhere than in its attention, so it runs as it is
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "electra", "distilbert", "albert", "ernie", "modernbert", "nomic_bert", "eurobert"), _COLUMNS),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "data2vec-text", "roberta-prelayernorm"), _COUNTED),
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3_text"), _CAUSAL),
}


def layers_of(config: Any) -> int:
    """Calls of the attention function in one forward."""
    layers = int(config.num_hidden_layers)
    return layers * int(getattr(config, "inner_group_num", 1))


def why_not(model: Any, embeds: bool, head: Any = None) -> str:
    """Why a model cannot be packed; empty if it can. embeds: it is part of an embedding model or a reranker. head: what reads its output."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    family = FAMILIES.get(kind)
    if family is None:
        return f"{kind} is not known to mix tokens in its attention alone; known are {', '.join(sorted(FAMILIES))}"
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters or "attention_mask" not in parameters:
        return f"the forward of {type(model).__name__} takes no position_ids and attention_mask"
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return f"{type(model).__name__} is configured as a decoder"
    if family.causal and not embeds and not getattr(config, "use_bidirectional_attention", False):
        return f"{type(model).__name__} is a causal model that may generate; it is served inside of a SentenceTransformer or CrossEncoder"
    if type(head).__name__.endswith("ForQuestionAnswering"):
        return f"{type(head).__name__} compares all columns of a row, padding too, whose outputs are 0 in a packed model"
    derived = derived_forward(model)
    if derived:
        return derived
    embedding = getattr(config, "position_embedding_type", None) or "absolute"
    if embedding != "absolute":
        return f"position_embedding_type is {embedding!r}; relative positions are those of the padded batch"
    if grows(config):
        return "its rotary embedding depends on the longest sequence of a batch"
    return ""


def derived_forward(model: Any) -> str:
    """A sentence on a class inside a model that derives from one of transformers and replaces its forward; empty if there is none."""
    for kind in {type(m): None for m in model.modules()}:
        derives = any(base.__module__.startswith("transformers.") for base in kind.__mro__)
        if derives and not str(getattr(kind.forward, "__module__", "")).startswith(("transformers.", "torch.")):
            return f"{kind.__name__} has a forward of its own, which may mix the tokens or rows of a batch"
    return ""


def has_window(config: Any) -> bool:
    """Whether a layer attends within a sliding window, which counts columns of the padded batch."""
    return bool(getattr(config, "sliding_window", None) or getattr(config, "local_attention", None))


def grows(config: Any) -> bool:
    """Whether the rotary embedding depends on the longest sequence of a batch."""
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    return "dynamic" in rope or "longrope" in rope


def positions_in_table(model: Any) -> int | None:
    """The positions that a model has embeddings of; None for one that computes them, whose texts may be longer than its config says."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return int(getattr(model.config, "max_position_embeddings", None) or module.num_embeddings)
    return None


def pooler_of(model: Any) -> Callable[[Tensor], Tensor] | None:
    """The function that the model's own forward applies to the padded last layer; None if it applies none."""
    pooler = getattr(model, "pooler", None)
    if pooler is None:
        return None
    if hasattr(model, "pooler_activation"):  # ALBERT
        return lambda hidden: model.pooler_activation(pooler(hidden[:, 0]))
    return pooler


@contextmanager
def without_pooler(model: Any, stock: Any) -> Iterator[Any]:
    """A forward whose pooler, which would read the first token of a row, is None. Another thread may run stock or save the model meanwhile, so a second
    object with the same parts runs. A forward that somebody else has put there knows the model alone."""
    is_own = getattr(stock, "__self__", None) is model
    if not hasattr(model, "pooler"):
        yield stock
    elif is_own:
        bare = object.__new__(type(model))
        bare.__dict__ = {**model.__dict__, "_modules": {**model._modules, "pooler": None}}
        yield MethodType(stock.__func__, bare)
    else:
        pooler = model.pooler
        model.pooler = None
        try:
            yield stock
        finally:
            model.pooler = pooler


def positions_of(family: Family, ids: Tensor, padding: int) -> Tensor:
    """Position ids of a padded batch `[B, T]`, as the model itself would count them."""
    if family.positions == "columns":
        return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    real = ids != padding
    return real.cumsum(1) * real + padding
