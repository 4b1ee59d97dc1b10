"""The poisoning of memory works, without which the tests that rely on it would prove nothing."""

import torch

from saccade.engine.layout import empty_like_heads


def test_allocations_are_poisoned():
    x = torch.zeros(1, 2, 3, 4)
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(x).isnan().all()
    assert x.new_empty(5).isnan().all()
    assert empty_like_heads(x).isnan().all()
    assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
