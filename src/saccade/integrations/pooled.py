"""`cls_only`: the last layer of an existing encoder of transformers computes only the pooled token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from saccade.engine.arguments import shown
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.hardware import package_version
from saccade.integrations import pooled_layers


@dataclass(frozen=True)
class _Family:
    """Layers of one structure: how they are computed, the parts they must have, and which parts make keys and values."""

    forward: Callable[..., Any]
    parts: dict[str, frozenset[str]]
    key_value: tuple[str, str]


_BERT = _Family(
    pooled_layers.bert_forward,
    {
        "": frozenset({"attention", "intermediate", "output"}),
        "attention": frozenset({"self", "output"}),
        "attention.self": frozenset({"query", "key", "value", "dropout"}),
        "attention.output": frozenset({"dense", "LayerNorm", "dropout"}),
        "output": frozenset({"dense", "LayerNorm", "dropout"}),
    },
    ("attention.self.key", "attention.self.value"),
)
_VIT = _Family(
    pooled_layers.vit_forward,
    {
        "": frozenset({"attention", "layernorm_before", "layernorm_after", "mlp", "dropout"}),
        "attention": frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
    },
    ("attention.k_proj", "attention.v_proj"),
)
_CLIP = _Family(
    pooled_layers.clip_forward,
    {
        "": frozenset({"self_attn", "layer_norm1", "layer_norm2", "mlp"}),
        "self_attn": frozenset({"q_proj", "k_proj", "v_proj", "out_proj"}),
    },
    ("self_attn.k_proj", "self_attn.v_proj"),
)

_TEXT = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "Ernie", "Data2VecText")
# the class of an encoder -> its list of layers, and their family
_ENCODERS: dict[str, tuple[str, _Family]] = {
    **{f"{name}Model": ("encoder.layer", _BERT) for name in _TEXT},
    **{f"{name}Model": ("layers", _VIT) for name in ("ViT", "DeiT")},
    "CLIPVisionModel": ("encoder.layers", _CLIP),
    "CLIPTextModel": ("encoder.layers", _CLIP),
}
# models whose heads read the pooled token of an encoder, and nothing else. ElectraForMultipleChoice pools as its config says
_READERS = {
    *(f"{name}ForSequenceClassification" for name in _TEXT),
    *(f"{name}ForMultipleChoice" for name in _TEXT if name != "Electra"),
    *("BertForNextSentencePrediction", "ErnieForNextSentencePrediction"),
    *("ViTForImageClassification", "DeiTForImageClassification"),
    *("CLIPModel", "CLIPVisionModelWithProjection", "CLIPTextModelWithProjection"),
}


class ClsOnly:
    """The handle that `cls_only` returns. As a context manager it restores at the end of the block."""

    def __init__(self, model: nn.Module) -> None:
        self._swapped: list[tuple[nn.Module, type, type]] = []
        self._hooks: list[Any] = []
        self._cost: dict[str, tuple[int, int, int]] = {}
        self._name = type(model).__name__
        found = [_inspect(name, encoder) for name, encoder in _encoders(model)]
        for name, encoder, layer, family in found:  # nothing is changed until everything has been checked
            self._cost[name] = _sizes(layer, family)
            self._swap(layer, family.forward)
            self._hooks.append(encoder.register_forward_pre_hook(_refuse_other_outputs, with_kwargs=True))
            if type(encoder).__name__ == "CLIPTextModel":
                self._hooks.append(encoder.register_forward_pre_hook(_tell_end_token, with_kwargs=True))
                self._hooks.append(encoder.register_forward_hook(_one_token))
                if type(encoder.final_layer_norm) is nn.LayerNorm:
                    self._swap(encoder.final_layer_norm, pooled_layers.norm_forward)
        self._active = True

    def _swap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before: type = type(module)
        after = pooled_layers.pooled_class(before, forward)
        module.__class__ = after
        self._swapped.append((module, before, after))

    @property
    def active(self) -> bool:
        """Whether the model still computes only the pooled token."""
        return self._active

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that do, one for each tower."""
        return tuple(self._cost)

    def saved(self, tokens: int) -> dict[str, float]:
        """The share of the multiplications that each of these layers saves, with `tokens` tokens in a sequence:
        between 0 and 1, by the layer's name. Norms, activations and the softmax are not counted.

        Raises:
            InvalidArgument: `tokens` is no whole number of at least 1.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidArgument(f"tokens is {shown(tokens)}; it must be a whole number of at least 1")
        shares = {}
        for name, (weights, of_key_value, width) in self._cost.items():
            before = tokens * weights + 2 * tokens * tokens * width
            after = tokens * of_key_value + (weights - of_key_value) + 2 * tokens * width
            shares[name] = 1 - after / before
        return shares

    def restore(self) -> None:
        """Make the model compute all tokens again. Later calls do nothing.

        Raises:
            SaccadeError: other code has changed the class of a layer meanwhile; nothing is restored then.
        """
        if not self._active:
            return
        for module, before, after in self._swapped:
            if type(module) is not after:
                raise SaccadeError(
                    f"the {before.__name__} that computes the pooled token alone is a {type(module).__name__} by now, by somebody else; "
                    "undo that first, then restore"
                )
        for module, before, _ in self._swapped:
            module.__class__ = before
        for hook in self._hooks:
            hook.remove()
        self._active = False

    def __enter__(self) -> ClsOnly:
        if not self._active:
            raise SaccadeError("this model was restored; call saccade.integrations.pooled.cls_only(model) again")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.restore()

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} does without {share:.0%} at 128 tokens" for name, share in self.saved(128).items())
        return f"<cls_only({self._name}): {shares if self._active else 'restored'}>"


def cls_only(model: nn.Module) -> ClsOnly:
    """Make the last layer of an encoder of transformers compute only the pooled token, because nothing else of it is read.

        with cls_only(model):
            embedding = model(input_ids, attention_mask=mask).pooler_output

        handle = cls_only(model)  # until handle.restore()

    The last layer makes keys and values of all tokens, `[B, T, C]`. The query, the output of attention, the MLP and the norms are those
    of one token, `[B, 1, C]`. The pooled output (`pooler_output`, `last_hidden_state[:, 0]`, logits, `image_embeds`, `text_embeds`) and
    all its gradients are those of the whole layer up to rounding. `handle.saved(tokens)` says what share of the layer is saved; so does
    the printed handle. Attention is the model's own function ("eager", "sdpa"), or `saccade.attention` with one query under
    `attn_implementation="saccade"`. Dropout has the same distribution, but other draws, because fewer numbers are drawn.

    Supported are BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE and Data2VecText, ViT and DeiT, and both towers of CLIP. So are
    their models for classification by the pooled token. In the text tower of CLIP the pooled token is the end token of each text.

    **`last_hidden_state` has one token**, the pooled one, `[B, 1, C]`. `last_hidden_state[:, 0]` is right for every model (in CLIP's
    text tower it is the end token), and another index is an error. Do not use this with your own mean pooling after a bare encoder, which needs all
    tokens: broadcasting would silently give the mean of that one token.

    Weights, their names, gradient checkpointing and `torch.compile` stay as they are. A deep copy computes as its original does;
    to pickle a whole model, restore it first.

    Args:
        model: the encoder or a model around it, as transformers makes it; of a wrapper (`nn.DataParallel`, adapters, your own module)
            give the part that is such a model.

    Returns:
        the handle, a context manager with `restore()`, `active`, `layers` and `saved(tokens)`.

    Raises:
        InvalidArgument: `model` is no module.
        UnsupportedProblem: the model reads other tokens (token classification, masked language models, question answering, heads
            over a mean), is a decoder, or is not known; from a call: `output_hidden_states`, `output_attentions`, a cache, packed
            sequences, or an attention function other than those above.
        SaccadeError: the model already computes only the pooled token.

    Source:
        "Fast Attention For Short Sequences" (paper 002), which remarks that the last layer needs only the CLS query.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {shown(model)}; it must be a torch.nn.Module")
    return ClsOnly(model)


def _encoders(model: nn.Module) -> list[tuple[str, Any]]:
    """The encoders whose pooled token `model` reads, by name; raises unless it reads nothing else."""
    name = type(model).__name__
    ours = type(model).__module__.startswith("transformers.models.")
    if ours and name in _ENCODERS:
        return [("", model)]
    if ours and name in _READERS:
        return [(path, part) for path, part in model.named_modules() if type(part).__name__ in _ENCODERS]
    raise UnsupportedProblem(
        f"{name} reads other tokens than the pooled one, or is not known; cls_only takes the models of transformers "
        f"{', '.join(sorted(_ENCODERS))} and {', '.join(sorted(_READERS))}"
    )


def _inspect(path: str, encoder: Any) -> tuple[str, Any, nn.Module, _Family]:
    """An encoder's last layer with its name and family; raises unless it is a supported one."""
    where, family = _ENCODERS[type(encoder).__name__]
    name = type(encoder).__name__
    if getattr(encoder.config, "is_decoder", False):
        raise UnsupportedProblem(f"this {name} is a decoder (config.is_decoder=True), whose every token is read")
    try:
        layers: Any = encoder.get_submodule(where)
    except AttributeError:
        layers = ()
    if not len(layers):
        raise UnsupportedProblem(f"this {name} has no layers at {where!r}")
    layer, label = layers[-1], ".".join(filter(None, (path, where, str(len(layers) - 1))))
    if type(layer).__module__ == pooled_layers.__name__:
        raise SaccadeError(f"{label} computes the pooled token alone already; restore it first")
    for part, expected in family.parts.items():
        try:
            children = {child for child, _ in layer.get_submodule(part).named_children()}
        except AttributeError:
            children = set()
        if children != expected:
            raise UnsupportedProblem(
                f"{label} is a {type(layer).__name__} whose part {part or 'itself'!r} consists of {sorted(children)}, not of "
                f"{sorted(expected)} as in transformers 5.23; this is transformers {package_version('transformers')}"
            )
    return label, encoder, layer, family


def _sizes(layer: nn.Module, family: _Family) -> tuple[int, int, int]:
    """Numbers of the layer's matrices, of those for keys and values, and the width of all its heads together."""

    def numbers(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.dim() == 2)

    key, value = (layer.get_submodule(name) for name in family.key_value)
    bias_or_weight = next(iter(key.parameters()))
    return numbers(layer), numbers(key) + numbers(value), bias_or_weight.shape[0]


def _refuse_other_outputs(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name in ("output_hidden_states", "output_attentions"):
        asked = kwargs.get(name)
        if getattr(encoder.config, name, False) if asked is None else asked:
            raise UnsupportedProblem(
                f"{name} is asked for, but the last layer of this {type(encoder).__name__} computes one token alone"
            )


def _tell_end_token(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the layers the position that CLIP's text tower will pick: the first end token; for configurations with
    eos_token_id = 2, which predate a correction in transformers, the first of the highest ids."""
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        return args, kwargs  # the model itself raises an error for that
    ids = ids.reshape(-1, ids.shape[-1])
    end = encoder.eos_token_id
    chosen = ids.to(torch.int) if end == 2 else (ids == end).to(torch.int)
    return args, {**kwargs, pooled_layers.POSITION: chosen.argmax(-1)}


def _one_token(encoder: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Reduce `last_hidden_state` to the one token that CLIP's text tower has picked from its expanded copies."""
    if isinstance(output, tuple):
        return (output[1].unsqueeze(1), *output[1:])
    pooled: Tensor = output.pooler_output
    output.last_hidden_state = pooled.unsqueeze(1)
    return output
