"""The compressed format against torch's own conversions, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from saccade.nm_sparse import compressed as nm_format
from saccade.nm_sparse import reference as nm_sparse

KINDS = [(torch.bfloat16, 2, 4), (torch.float16, 2, 4), (torch.bfloat16, 1, 2), (torch.float16, 1, 2), (torch.float32, 1, 2)]


@pytest.mark.parametrize(("dtype", "keep", "group"), KINDS)
@pytest.mark.parametrize("size", [(32, 64), (64, 256), (160, 128)], ids=str)
def test_bytes_are_those_of_torch(dtype, keep, group, size):
    # all above 0, because torch recognises kept numbers by being different from 0
    dense = (torch.rand(size) + 0.5).to(dtype)
    values, metadata = nm_format.compress(dense, keep, group, 0.0)
    pruned = nm_format.expand(values, metadata, 0.0)
    theirs, their_metadata = sparse_semi_structured_from_dense_cutlass(pruned)
    assert torch.equal(values, theirs)
    assert torch.equal(metadata, their_metadata)
    # and backwards; torch moves float32 as halves, of which the CPU changes some that look like NaN
    decoded = sparse_semi_structured_to_dense_cutlass(values, metadata)
    torch.testing.assert_close(decoded, pruned, rtol=1e-3 if dtype == torch.float32 else 0, atol=0)


@pytest.mark.parametrize(("dtype", "keep", "group"), KINDS)
@pytest.mark.parametrize("size", [(2, 3, 37, 50), (1, 33), (5, 1, 1)], ids=str)
def test_what_is_kept_is_what_the_operation_selects(dtype, keep, group, size):
    dense = torch.randn(size).to(dtype)
    expanded = nm_format.expand(*nm_format.compress(dense, keep, group, 0.0), 0.0)[..., : size[-2], : size[-1]]
    selected = nm_sparse.select(dense.float(), keep, group)
    assert torch.equal(expanded, dense.masked_fill(~selected, 0.0))


@pytest.mark.parametrize(("dtype", "keep", "group"), KINDS)
def test_ties_and_masked_numbers(dtype, keep, group):
    inf = float("inf")
    rows = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [-inf, -inf, -inf, 3], [-inf] * 4, [-inf, 2, 2, -inf], [3, 2, 2, 3]])
    dense = rows.repeat(1, 16).to(dtype)
    expanded = nm_format.expand(*nm_format.compress(dense, keep, group, -inf), -inf)[:6]
    selected = nm_sparse.select(dense.float(), keep, group)
    assert torch.equal(expanded, dense.masked_fill(~selected, -inf))


def test_codes_are_ordered_and_legal():
    chosen = torch.combinations(torch.arange(4))
    codes = nm_format.codes(chosen, torch.bfloat16)
    assert codes.tolist() == [0x4, 0x8, 0xC, 0x9, 0xD, 0xE]
    assert torch.equal(nm_format.chosen_of(codes, torch.bfloat16), chosen)
    assert nm_format.codes(torch.tensor([[0], [1]]), torch.float32).tolist() == [0x4, 0xE]


def test_metadata_of_a_block_is_what_lanes_of_mma_sp_hold():
    """PTX ISA: lane 4 g + 2 s + h of the quad g holds row g of keys 16 h to 16 h + 15 low, row g + 8 high; s: rows 0-15 or
    16-31."""
    chosen = torch.zeros(32, 16, 2, dtype=torch.int64)
    pairs = torch.combinations(torch.arange(4))
    chosen = pairs[torch.randint(6, (32, 16))]
    words = nm_format.pack(chosen, torch.bfloat16).view(torch.int32).flatten()[:32].long() & 0xFFFFFFFF
    elements = (nm_format.codes(chosen, torch.bfloat16).unflatten(-1, (-1, 4)) << 4 * torch.arange(4)).sum(-1)
    for lane in range(32):
        g, s, h = lane // 4, lane % 4 // 2, lane % 2
        assert words[lane] == elements[16 * s + g, h] | elements[16 * s + g + 8, h] << 16
