"""The steps before a call is described."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import saccade


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_what_torch_casts(device, dtype):
    query, key, value = (torch.randn(1, 2, 5, 8, device=device, dtype=dtype) for _ in range(3))
    with torch.autocast(device.type, torch.bfloat16):
        expected = F.scaled_dot_product_attention(query, key, value)
        for backend in ("auto", "reference"):
            assert saccade.attention(query, key, value, backend=backend).dtype == expected.dtype
