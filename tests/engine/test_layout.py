"""How results lie in memory: as their inputs."""

from __future__ import annotations

import itertools

import pytest
import torch

import saccade
from saccade.engine.layout import empty_like_heads, on_16_bytes, shares_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


@pytest.mark.parametrize("order", ["THBD", "HBTD", "HTBD"])
def test_other_orders_stay_too(order):
    sizes = dict(zip("BHTD", (B, H, T, D), strict=True))
    tensor = torch.empty([sizes[name] for name in order]).permute([order.index(name) for name in "BHTD"])
    assert in_memory(empty_like_heads(tensor)) == order


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


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("backend", ["auto", "short", "ragged"])
def test_results_lie_as_the_query_does(order, backend):
    """Out and dq lie as query, dk and dv as key and value, in any order of batch, heads and time."""
    sizes, back = [(2, 3, 5)[axis] for axis in order], [order.index(axis) for axis in range(3)]
    q, k, v = (torch.randn(*sizes, 16, device=DEVICE).permute(*back, 3).requires_grad_() for _ in range(3))
    assert q.shape == (2, 3, 5, 16)
    out = saccade.attention(q, k, v, backend=backend)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    if backend != "auto":  # torch's own function, which lays results out by itself
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(x.stride() == q.stride() for x in (out, *gradients))
