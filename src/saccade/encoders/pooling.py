"""The embeddings of a `SentenceTransformer` from packed rows, inside of the graph that computed them: no padded batch is read again.

Its own Pooling reads `[B, T, E]` in eight operations, padding included. Here one kernel reads the packed rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from saccade.encoders.served import Served

Pool = Callable[[Tensor, Tensor], Tensor]  # rows `[tokens, E]` and ends `[sequences + 1]` -> embeddings `[sequences, E]`


def _mean(rows: Tensor, ends: Tensor) -> Tensor:
    """sum / number, in float32; 0 of an empty sequence, as sentence-transformers has it."""
    return torch.segment_reduce(rows.float(), "mean", offsets=ends, axis=0, unsafe=True, initial=0.0).to(rows.dtype)


def _first(rows: Tensor, ends: Tensor) -> Tensor:
    return rows[ends[:-1].clamp(max=rows.shape[0] - 1)]


def _last(rows: Tensor, ends: Tensor) -> Tensor:
    return rows[(ends[1:] - 1).clamp(min=0)]


POOLS: dict[str, Pool] = {"mean": _mean, "cls": _first, "lasttoken": _last}


class Latest:
    """The last padded batch that was put out, its mask, and its embeddings."""

    def __init__(self, padded: Tensor, mask: Tensor | None, embeddings: Tensor):
        self.padded, self.mask = weakref.ref(padded), None if mask is None else weakref.ref(mask)
        self.embeddings = embeddings


class Pooling:
    """The forward of a Pooling module: what the graph has pooled, if the features are what the encoder put out; else the module's own."""

    def __init__(self, served: Served, module: Any):
        self.served, self.module, self.stock = served, module, module.forward

    def __call__(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        latest = self.served.latest
        if latest is None or options or self.module.pooling_mode not in POOLS or not self._is(latest, features):
            return self.stock(features, **options)
        features["sentence_embedding"] = latest.embeddings
        return features

    def _is(self, latest: Latest, features: dict[str, Any]) -> bool:
        if latest.mask is None or latest.padded() is not features["token_embeddings"]:
            return False
        others = {"cls_token_embeddings", "token_weights_sum", "cu_seq_lens_q"} | (
            {"prompt_length"} if not self.module.include_prompt else set()
        )
        return latest.mask() is features.get("attention_mask") and not others & features.keys()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.module))
        return MethodType(type(copy).forward, copy) if copy is not None else self.stock

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")


def pooling_of(model: nn.Module, base: nn.Module) -> Any:
    """The Pooling that reads the output of an encoder in a `SentenceTransformer`; None if there is none that is known."""
    parts = list(model.children()) if type(model).__name__ == "SentenceTransformer" else []
    if len(parts) < 2 or base not in parts[0].modules() or type(parts[1]).__name__ != "Pooling":
        return None
    mode = getattr(parts[1], "pooling_mode", None)
    return parts[1] if isinstance(mode, str) and mode in POOLS else None
