"""A cache for transformers that holds `keep_window_size` entries per head: exact decoding of Doge in memory that does not grow.

    model.generate(**inputs, past_key_values=DogeCache(model.config))

Needs `attn_implementation="saccade_dynamic_mask"` (`saccade.integrations.doge.register`). Source of the rule:
`saccade.dynamic_mask.decode.cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from saccade.dynamic_mask.decode.cache import DynamicMaskCache
from saccade.errors import InvalidArgument, UnsupportedProblem


class DogeCache(Cache):
    """`past_key_values` of a Doge model: the best-scored tokens of each layer and key head, exactly those that later tokens can see.

    Prompts may be padded on the left or on the right; padding is not stored. Beam search can reorder the cache. Tokens cannot be removed
    (`crop`, assisted generation), because an evicted token cannot be restored.

    Args:
        config: the config of the model. Each of its `num_hidden_layers` layers keeps `keep_window_size` entries for each key head.

    Raises:
        InvalidArgument: `config` is not that of a Doge model.
    """

    def __init__(self, config: Any) -> None:
        keep, layers = (getattr(config, name, None) for name in ("keep_window_size", "num_hidden_layers"))
        if keep is None or layers is None:
            raise InvalidArgument(f"config is a {type(config).__name__}; it must have keep_window_size and num_hidden_layers")
        super().__init__(layers=[KeptLayer(keep) for _ in range(layers)])

    @property
    def nbytes(self) -> int:
        """The size of the entries of all layers in bytes."""
        return sum(layer.kept.nbytes for layer in self.layers)


class KeptLayer(CacheLayerMixin):
    """One layer of `DogeCache`; `kept` is the cache itself.

    `update` returns the new keys and values unchanged, so that the model computes only the scores of the new tokens; `attend`
    then stores them.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, keep: int) -> None:
        super().__init__()
        self.kept = DynamicMaskCache(keep)
        # tokens of each row so far, padding included, as transformers counts them
        self._tokens = 0
        self._handed_over = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do before the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values themselves."""
        if self._handed_over:
            raise UnsupportedProblem(
                f"{self._handed_over} tokens were handed to this cache and never attended to: DogeCache needs a Doge model with "
                "attn_implementation='saccade_dynamic_mask'"
            )
        self._handed_over = key_states.shape[2]
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, real: Tensor | None, **options: Any) -> Tensor:
        """Attention of new tokens to all so far; `real` bool `[B, T]` tells tokens from padding. Options:
        `DynamicMaskCache.attend`."""
        self._handed_over = 0
        self._tokens += query.shape[2]
        if real is None or bool(real.all()):
            return self.kept.attend(query, key, value, scores, **options)
        order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)  # tokens first, padding last
        moved = [_along(x, order) for x in (query, key, value, scores)]
        out = self.kept.attend(*moved, lengths=real.sum(1), **options)
        return _along(out, torch.argsort(order, dim=1))

    def get_seq_length(self) -> int:
        """The number of tokens so far, not only of those kept."""
        return self._tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of the padding mask, which covers all tokens."""
        return self._tokens + query_length, 0

    def get_max_length(self) -> int:
        """-1, which means any number of tokens."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def reset(self) -> None:
        """Forget everything."""
        self.kept, self._tokens, self._handed_over = DynamicMaskCache(self.kept.keep), 0, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row `beam_idx[i]`."""
        self.kept.take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.kept.take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.kept.seen is not None:
            rows = torch.arange(len(self.kept.seen), device=self.kept.seen.device)
            self.kept.take_rows(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises, because evicted tokens cannot be restored."""
        raise UnsupportedProblem(
            f"crop({tokens_to_remove}): a bounded cache cannot take tokens back, what they evicted is gone; use DynamicCache"
        )


def _along(x: Tensor, order: Tensor) -> Tensor:
    """`x [B, H, T, ...]` with the tokens of each row in `order [B, T]`."""
    index = order.view(order.shape[0], 1, order.shape[1], *([1] * (x.dim() - 3)))
    return x.gather(2, index.expand_as(x))
