"""The calls of `encode` and `predict` that run from strings to results by themselves, and why the others are stock's."""

from __future__ import annotations

from typing import Any

import torch

from saccade.encoders import tokens
from saccade.encoders.pooling import Pooling, pool_of
from saccade.encoders.sentences import Sentences
from saccade.engine.problem import captured
from saccade.engine.tracing import observer

# modules of sentence-transformers that read only the embedding
_AFTER = ("Dense", "Normalize", "LayerNorm", "Dropout")
_OWN = ("forward", "preprocess", "tokenize", "_inference", "is_singular_input", "_resolve_prompt")
_TRANSFORMER = {
    "SentenceTransformer": ("feature-extraction", "last_hidden_state"),
    "CrossEncoder": ("sequence-classification", "logits"),
}
_IDS = torch.zeros(1, 1, dtype=torch.int64)


def why_not_model(model: Any, served: Any) -> str:
    """Why strings are stock's for a model, as it is now; empty if they are not."""
    kind, transformer = type(model).__name__, model[0]
    reason = _foreign([model, transformer, *list(model)[1:]])
    if reason:
        return reason
    if type(transformer).__name__ != "Transformer" or getattr(transformer.model, "base_model", None) is not served.model:
        return "its first module is no Transformer around the encoder"
    if kind == "SentenceTransformer" and transformer.model is not served.model:
        return "a head of transformers reads the encoder"
    config = transformer.modality_config
    task, output = _TRANSFORMER[kind]
    if set(config) != {"text"} or transformer.transformer_task != task:
        return "its Transformer takes more than text, or a chat template"
    if config["text"]["method"] != "forward" or config["text"]["method_output_name"] != output:
        return f"its Transformer reads {config['text']['method_output_name']!r} of the encoder"
    if transformer.processing_kwargs:
        return "its Transformer has processing_kwargs"
    if getattr(transformer, "backend", "torch") != "torch":
        return f"its backend is {transformer.backend!r}"
    return _why_not_parts(model, transformer) or _why_not_tokenizer(transformer, served)


def _why_not_parts(model: Any, transformer: Any) -> str:
    if type(model).__name__ == "CrossEncoder":
        return "modules follow the head" if len(model) > 1 else ""
    if len(model) < 2 or type(model[1]).__name__ != "Pooling":
        return "no Pooling follows the encoder"
    if pool_of(model[1].pooling_mode) is None:
        return f"pooling_mode is {model[1].pooling_mode!r}"
    if transformer.module_output_name != "token_embeddings":
        return f"its Transformer puts out {transformer.module_output_name!r}"
    for module in list(model)[2:]:
        names = {getattr(module, x, None) or "sentence_embedding" for x in ("module_input_name", "module_output_name")}
        if type(module).__name__ not in _AFTER or names != {"sentence_embedding"}:
            return f"{type(module).__name__} may read more than the embedding"
    return ""


def _foreign(modules: list[Any]) -> str:
    """Methods of others, hooks and compiled calls, which are not to be passed by."""
    for module in modules:
        name = type(module).__name__
        if not type(module).__module__.startswith("sentence_transformers."):
            return f"{name} is no module of sentence-transformers"
        own = [x for x in _OWN if x in vars(module) and not isinstance(vars(module)[x], (Pooling, Sentences))]
        if own:
            return f"{name} has a {own[0]} of its own"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has a hook"
        if getattr(module, "_compiled_call_impl", None) is not None:
            return f"{name} is compiled"
        if hasattr(module, "_hf_hook") or getattr(module, "hf_device_map", None):
            return f"accelerate places {name}"
    return ""


def _why_not_tokenizer(transformer: Any, served: Any) -> str:
    tokenizer = transformer.processor
    reason = tokens.why_not(tokenizer)
    if reason:
        return reason
    turns = served.family.causal or any("rope" in name for name in vars(served.model.config))
    if tokenizer.padding_side == "left" and served.family.positions == "columns" and not turns:
        return "padding on the left changes the positions of a batch"
    if tokenizer.padding_side == "left" and served.has_head and not served.family.causal:
        return "padding on the left is read by its head"
    return ""


def why_not_call(model: Any, served: Any, kwargs: dict[str, Any]) -> str:
    """Why a call with these arguments, and the encoder as it is now, is stock's; empty if it is not."""
    others = sorted(set(kwargs) - {"task"})
    if others:
        return f"{others[0]} is given"
    transformer = model[0]
    if kwargs.get("task") == "query" and getattr(transformer, "query_expansion", None) is not None:
        return "queries are expanded"
    if getattr(model, "_distributed_inference", None) is not None:
        return "inference is distributed"
    if seen := observer():
        return seen
    if captured():
        return "a CUDA graph of the caller is captured"
    forward: Any = vars(served.model).get("forward")
    if getattr(forward, "served", forward) is not served:
        return "the encoder has another forward"
    with served.lock:  # another thread may read the state under another autocast, or run layers that it has replaced
        served.state.read()
    if any(served.model.__dict__.get(x) for x in ("_forward_hooks", "_forward_pre_hooks")):
        return "the encoder has a hook"
    return str(served._refused({"input_ids": _IDS}))


def is_elsewhere(device: Any, served: Any) -> bool:
    """Whether a device is not the one on which the model lies."""
    if device is None:
        return False
    wanted, here = torch.device(device), served.state.tensors[0].device
    return wanted.type != here.type or wanted.index not in (None, here.index)


def limit_of(transformer: Any, task: str | None) -> tuple[int | None, str]:
    """(tokens at which stock cuts a text, None for nowhere; why that is not known)."""
    found = getattr(transformer, f"{task}_length", None) if task in ("query", "document") else None
    found = transformer.processor.model_max_length if found is None else found
    if isinstance(found, bool) or not isinstance(found, (int, float)) or found < 1:
        return None, f"max_seq_length is {found!r}"
    return (None if found > 10**20 else int(found)), ""
