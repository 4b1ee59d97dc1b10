"""Borders of packed sequences that come with a mask, with a bias, or only as position ids.

`attention_varlen` takes the ends of sequences and no mask. A layer may pass ends together with a mask, such as that of a sliding window. The
two are then combined, because a mask of transformers need not know of the packing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.engine.prepare import traced
from saccade.engine.problem import compiled_or_captured
from saccade.errors import UnsupportedProblem
from saccade.integrations.packed_mask import PackedMask

# position ids -> their version and the rows of the batch; the layer that read them; and the mask if they restart. Weak: nothing here keeps a tensor of a batch alive
_FOUND: Any = WeakTensorKeyDictionary()


def bordered(mask: Tensor | None, query: Tensor, key: Tensor, ends_q: Tensor, ends_k: Tensor | None, causal: bool) -> Tensor:
    """A mask `[1, .., Tq, Tk]` that shows no key of another sequence, beside what `mask` hides.

    Args:
        mask: bool or floating and 4-D, `[B, Tk]` key padding, or None.
        ends_q, ends_k: `[sequences + 1]`, 0 and the end of each sequence in the only row of the batch.
        causal: whether to hide later keys too, which a whole mask does itself.

    Raises:
        UnsupportedProblem: a batch of several rows; or a causal call whose queries end elsewhere than its keys.
    """
    _check_ends(query, key, ends_q, ends_k, causal)
    of_queries = numbers_of(ends_q, query.shape[2])
    of_keys = of_queries if ends_k is None or ends_k is ends_q else numbers_of(ends_k, key.shape[2])
    same = (of_queries[:, None] == of_keys[None, :])[None, None]
    if causal:
        same = same.tril()
    if mask is None:
        return same
    if mask.dim() == 2:
        return same & mask[:, None, None, :].to(torch.bool)
    return mask & same if mask.dtype == torch.bool else torch.where(same, mask, float("-inf"))


def by_positions(module: torch.nn.Module, positions: object, query: Tensor, key: Tensor) -> PackedMask | None:
    """The borders that restarting position ids give to a causal layer; None if they do not restart.

    The host reads the positions once for a batch. It cannot during tracing or a capture; `cu_seq_lens_q` gives the borders there.
    """
    if (
        not isinstance(positions, Tensor)
        or positions.dim() != 2
        or positions.shape[1] != query.shape[2]
        or query.shape[2] != key.shape[2]
    ):
        return None
    if (
        positions.shape[0] not in (1, query.shape[0])
        or traced()
        or type(positions) is not Tensor
        or compiled_or_captured(positions)
    ):
        return None
    version = None if positions.is_inference() else positions._version
    layer = getattr(module, "layer_idx", None) or 0
    known = _FOUND.get(positions)
    # a tensor of inference mode has no version, so the layer that read it first reads it again in each batch
    if known is not None and known[0] == (version, query.shape[0]) and (version is not None or layer > known[1]):
        return known[2]
    found = _restarts(positions, query.shape[0])
    _FOUND[positions] = ((version, query.shape[0]), layer, found)
    return found


def _restarts(positions: Tensor, batch: int) -> PackedMask | None:
    # the rule of transformers, which reads positions itself if there is no cache: a step other than 1 begins a sequence
    begins = positions.diff(dim=1) != 1
    if not bool(begins.any()):
        return None
    numbers = torch.nn.functional.pad(begins.cumsum(1), (1, 0))
    return PackedMask(numbers.expand(batch, -1))


def numbers_of(ends: Tensor, tokens: int) -> Tensor:
    """The number of each token's sequence, `[tokens]`; that of tokens behind the last end is the number of sequences."""
    places = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), places, right=True)


def ends_of_keys(query: Tensor, key: Tensor, ends_q: Tensor, ends_k: Tensor | None) -> Tensor:
    """The ends of keys, by default those of queries.

    Raises:
        UnsupportedProblem: there are other numbers of queries and keys, and `ends_k` is None.
    """
    if ends_k is None and query.shape[2] != key.shape[2]:
        raise UnsupportedProblem(
            f"cu_seq_lens_q packs {query.shape[2]} queries, but there are {key.shape[2]} keys; pass cu_seq_lens_k for them"
        )
    return ends_q if ends_k is None else ends_k


def _check_ends(query: Tensor, key: Tensor, ends_q: Tensor, ends_k: Tensor | None, causal: bool) -> None:
    if not query.shape[0] == key.shape[0] == 1:
        raise UnsupportedProblem(
            f"cu_seq_lens_q packs {ends_q.numel() - 1} sequences into a batch of {query.shape[0]} rows; packed sequences lie in one row"
        )
    ends_of_keys(query, key, ends_q, ends_k)
    if causal and ends_k is not None and ends_k is not ends_q and query.shape[2] != key.shape[2]:
        raise UnsupportedProblem(
            f"a causal layer packs {query.shape[2]} queries beside {key.shape[2]} keys and passes a bias or key padding; "
            "pass a mask that says which keys each query sees"
        )
