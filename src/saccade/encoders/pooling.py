"""The embeddings of a `SentenceTransformer` from packed rows, inside of the graph that computed them: no padded batch is read again.

Its own Pooling reads `[B, T, E]` in eight operations, padding included. Here one kernel reads the packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.encoders import own
from saccade.encoders.own import Own

Pool = Callable[[Tensor, Tensor], Tensor]  # rows `[tokens, E]` and ends `[sequences + 1]` -> embeddings `[sequences, E]`


def _wide(rows: Tensor) -> Tensor:
    """In the dtype in which sums are made."""
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows


def _sum(rows: Tensor, ends: Tensor) -> Tensor:
    return torch.segment_reduce(rows, "sum", offsets=ends, axis=0, unsafe=True, initial=0.0)


def _mean(rows: Tensor, ends: Tensor) -> Tensor:
    """sum / number, in float32; 0 of an empty sequence, as sentence-transformers has it."""
    return torch.segment_reduce(_wide(rows), "mean", offsets=ends, axis=0, unsafe=True, initial=0.0).to(rows.dtype)


def _mean_by_root(rows: Tensor, ends: Tensor) -> Tensor:
    wide = _wide(rows)
    return (_sum(wide, ends) / ends.diff().clamp(min=1).to(wide.dtype).sqrt()[:, None]).to(rows.dtype)


def _weighted_mean(rows: Tensor, ends: Tensor) -> Tensor:
    """The first token of a sequence counts once, the second twice, and so on."""
    wide, places = _wide(rows), torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype)
    starts = ends[(torch.searchsorted(ends, places, right=True) - 1).clamp(min=0)]
    lengths = ends.diff().to(wide.dtype)
    sums = _sum(wide * (places - starts + 1).to(wide.dtype)[:, None], ends)
    return (sums / (lengths * (lengths + 1) / 2).clamp(min=1)[:, None]).to(rows.dtype)


def _max(rows: Tensor, ends: Tensor) -> Tensor:
    return torch.segment_reduce(rows, "max", offsets=ends, axis=0, unsafe=True, initial=float("-inf"))


def _first(rows: Tensor, ends: Tensor) -> Tensor:
    return _of_the_filled(rows[ends[:-1].clamp(max=rows.shape[0] - 1)], ends)


def _last(rows: Tensor, ends: Tensor) -> Tensor:
    return _of_the_filled(rows[(ends[1:] - 1).clamp(min=0)], ends)


def _of_the_filled(rows: Tensor, ends: Tensor) -> Tensor:
    """0 for an empty sequence, whose padded places are 0."""
    return torch.where((ends.diff() > 0)[:, None], rows, 0)


POOLS: dict[str, Pool] = {
    "mean": _mean,
    "cls": _first,
    "lasttoken": _last,
    "max": _max,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
}


def pool_of(mode: Any) -> Pool | None:
    """The function that pools rows as a Pooling module of a mode, or of several, does; None if one is not known."""
    if isinstance(mode, str):
        return POOLS.get(mode)
    parts = [POOLS.get(x) for x in mode or ()]
    if not parts or None in parts:
        return None
    return lambda rows, ends: torch.cat([part(rows, ends) for part in parts if part is not None], dim=-1)


_pooled = WeakTensorKeyDictionary()  # of live batches: not an attribute, which torch.save would write too


def keep(padded: Tensor, mask: Tensor | None, embeddings: Tensor) -> None:
    """Record, for a padded output batch, its pooled embeddings and the mask; the record lives as long as the batch."""
    _pooled[padded] = mask, embeddings, [*map(_version, (padded, mask))]


def _version(x: Tensor | None) -> int:
    """The number of changes in place; tensors of inference mode count none."""
    return 0 if x is None or x.is_inference() else x._version


def _kept(padded: Tensor, mask: Tensor | None) -> Tensor | None:
    """The embeddings that were pooled from a batch under its mask; None if the batch came from elsewhere, or was changed."""
    found: tuple[Tensor | None, Tensor, list[int]] | None = _pooled.get(padded)
    if found is None or mask is None or found[0] is not mask or found[2] != [*map(_version, (padded, mask))]:
        return None
    return found[1]


class Pooling(Own):
    """The forward of a Pooling module: what the graph has pooled, if the features are what the encoder put out; else the module's own."""

    def __init__(self, module: Any):
        super().__init__(module)
        self.mode = module.pooling_mode

    def __call__(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        mask, rows = features.get("attention_mask"), features["token_embeddings"]
        pooled = None if options or self._others(features) else _kept(rows, mask)
        if pooled is not None:
            features["sentence_embedding"] = pooled
            return features
        # the encoder takes a batch of the host to the GPU
        if isinstance(mask, Tensor) and mask.device != rows.device:
            features["attention_mask"] = mask.to(rows.device)
        found: dict[str, Any] = self.stock(features, **options)
        return found

    def _others(self, features: dict[str, Any]) -> bool:
        """Whether the module would read more than rows and mask."""
        changed = self.module.pooling_mode != self.mode or ("prompt_length" in features and not self.module.include_prompt)
        return changed or not features.keys().isdisjoint(("cls_token_embeddings", "token_weights_sum", "cu_seq_lens_q"))


def attach(model: nn.Module, served: Any) -> None:
    """Make the Pooling of a `SentenceTransformer` use the embeddings that graphs pool, if its mode is known and it follows the encoder."""
    parts = list(model.children()) if type(model).__name__ == "SentenceTransformer" else []
    if len(parts) < 2 or type(parts[1]).__name__ != "Pooling" or all(x is not served.model for x in parts[0].modules()):
        return
    module: Any = parts[1]
    mode = getattr(module, "pooling_mode", None)
    if isinstance(mode, str) and mode in POOLS and own.clear(module):
        served.pool, served.pooling, served.mode = POOLS[mode], module, mode
        Pooling(module).put()


def detach(served: Any) -> None:
    """Restore the Pooling."""
    if served.pooling is not None:
        own.remove(served.pooling)
    served.pool = served.pooling = None
