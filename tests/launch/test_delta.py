"""The row sums of backward, of tensors in any layout."""

from __future__ import annotations

import pytest
import torch

from saccade.launch.delta import delta_of

# more rows than a program has, and fewer columns than a tile
SHAPE = (2, 3, 33, 5)


def laid_out(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers of the shape, whose dims lie in memory in this order."""
    memory = torch.randn([SHAPE[dim] for dim in order], device=device)
    return memory.permute([order.index(dim) for dim in range(len(order))])


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("has_dlse", [False, True])
def test_rows_of_any_layout(device, order, has_dlse):
    dout, out = laid_out((*order, 3), device), laid_out((2, 0, 1, 3), device)
    dlse = laid_out(order, device) if has_dlse else None
    wanted = (dout.double() * out.double()).sum(-1) - (0 if dlse is None else dlse.double())
    found = delta_of(dout, out, dlse)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
