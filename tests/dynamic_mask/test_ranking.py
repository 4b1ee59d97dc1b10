"""The two ways of finding the kept keys agree."""

from __future__ import annotations

from random import Random

import pytest
import torch

from saccade.dynamic_mask.reference import kept
from saccade.dynamic_mask.testing.ranking import kept_by_counting


@pytest.mark.parametrize("seed", range(60))
def test_counting_keeps_what_ranking_keeps(seed):
    draw, source = Random(seed), torch.Generator().manual_seed(seed)
    batch, heads, kv_len = draw.randint(0, 3), draw.randint(1, 2), draw.choice((1, 2, 7, 20))
    is_causal, documents = draw.random() < 0.5, draw.random() < 0.5
    q_len = draw.randint(1, kv_len) if is_causal or documents else draw.randint(1, 24)
    scores = torch.randn(batch, heads, kv_len, generator=source)
    if draw.random() < 0.5:
        scores = scores.round()
    if draw.random() < 0.3:
        scores[..., ::3] = float("-inf")
    lengths = torch.randint(0, kv_len + 1, (batch,), generator=source) if draw.random() < 0.5 else None
    # not in order: what a document is does not ask for it
    ids = torch.randint(0, 3, (batch, kv_len), generator=source) if documents else None
    rule = (draw.choice((1, 2, 5, 100)), q_len, is_causal, lengths, ids, draw.choice((0, 1, 3)), draw.choice((0, 1, 4)))
    assert torch.equal(kept_by_counting(scores, *rule), kept(scores, *rule))
