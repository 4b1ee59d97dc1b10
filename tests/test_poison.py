"""The poison works: otherwise every test that relies on it proves nothing."""

import torch

from saccade.engine.layout import empty_like_heads


def test_allocations_are_poisoned():
    x = torch.zeros(1, 2, 3, 4)
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(x).isnan().all()
    assert x.new_empty(5).isnan().all()
    assert empty_like_heads(x).isnan().all()
    assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
