"""How results lie in memory: as their inputs, in one of three orders."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.layout import empty_like_heads, on_16_bytes, shares_memory

B, H, T, D = 2, 3, 5, 8


def in_memory(tensor: torch.Tensor) -> str:
    """The axes longer than 1, from the outermost to the innermost."""
    axes = [(stride, name) for name, stride, size in zip("BHTD", tensor.stride(), tensor.shape, strict=True) if size > 1]
    return "".join(name for _, name in sorted(axes, reverse=True))


@pytest.mark.parametrize("order", ["BTHD", "BHTD", "TBHD"])
@pytest.mark.parametrize("one", ["", "B", "H", "T", "BH", "HT"])
def test_three_orders_stay(order, one):
    sizes = {name: 1 if name in one else size for name, size in zip("BHTD", (B, H, T, D), strict=True)}
    tensor = torch.empty([sizes[name] for name in order]).permute([order.index(name) for name in "BHTD"])
    made = empty_like_heads(tensor)
    assert made.shape == tensor.shape
    assert in_memory(made) == in_memory(tensor) == "".join(name for name in order if name not in one)
    assert made.untyped_storage().nbytes() == 4 * made.numel()
    assert empty_like_heads(tensor, 4).shape == (*tensor.shape[:3], 4)


@pytest.mark.parametrize(("order", "expected"), [("THBD", "BTHD"), ("HBTD", "BHTD"), ("HTBD", "BHTD")])
def test_other_orders_become_one_of_them(order, expected):
    sizes = dict(zip("BHTD", (B, H, T, D), strict=True))
    tensor = torch.empty([sizes[name] for name in order]).permute([order.index(name) for name in "BHTD"])
    assert in_memory(empty_like_heads(tensor)) == expected


def test_the_stride_of_one_head_says_nothing():
    """As `nn.MultiheadAttention(num_heads=1)` and `unsqueeze` leave it."""
    tokens = torch.empty(T, B, D).transpose(0, 1)
    assert in_memory(empty_like_heads(tokens.unsqueeze(1))) == "TBD"
    for stride in (1, D, B * D, T * B * D):
        assert in_memory(empty_like_heads(tokens.unsqueeze(1).as_strided((B, 1, T, D), (D, stride, B * D, 1)))) == "TBD"
        dense = torch.empty(B, 1, T, D).as_strided((B, 1, T, D), (T * D, stride, D, 1))
        assert in_memory(empty_like_heads(dense)) == "BTD"


def test_rows_that_share_memory_are_apart():
    made = empty_like_heads(torch.empty(T, 1, H, D).permute(1, 2, 0, 3).expand(B, -1, -1, -1))
    assert in_memory(made) == "BTHD"
    assert made.untyped_storage().nbytes() == 4 * made.numel()


def test_what_shares_memory():
    assert shares_memory(torch.empty(1, 3).expand(2, 3))
    assert not shares_memory(torch.empty(2, 3))
    assert not shares_memory(torch.empty(1, 3).as_strided((1, 3), (0, 1)))  # the stride of one row says nothing


def test_what_begins_on_16_bytes_stays_and_all_else_is_copied():
    rows = torch.randn(2 * 3 * 5 * 16)  # as float32, of which 4 are 16 bytes
    stays = [
        rows.view(2, 3, 5, 16),
        rows.view(2, 5, 3, 16).transpose(1, 2),
        rows[4:].as_strided((2, 3, 5, 8), (240, 80, 16, 1)),
        rows.as_strided((1, 3, 5, 16), (7, 80, 16, 1)),  # the stride of one batch row is never used
    ]
    assert all(on_16_bytes(x) is x for x in stays)
    for odd in (
        rows[1:].as_strided((2, 3, 5, 8), (240, 80, 16, 1)),
        rows.as_strided((2, 3, 5, 8), (240, 80, 9, 1)),
        rows.as_strided((2, 3, 5, 8), (239, 80, 16, 1)),
        rows.as_strided((2, 3, 5, 8), (240, 80, 16, 2)),
        torch.randn(2, 3, 5, 4).half(),
    ):
        made = on_16_bytes(odd)
        assert made.is_contiguous()
        assert made.data_ptr() != odd.data_ptr()
        assert torch.equal(made, odd)
