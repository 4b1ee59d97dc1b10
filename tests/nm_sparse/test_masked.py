"""The masking kernels against float64: first what they select, then every output and gradient under that selection."""

from __future__ import annotations

import pytest
import torch
from contracts.exact import DEVICE
from contracts.nm_sparse import QUICK, NMSparseContract, pack

import saccade
from saccade.nm_sparse.masked import launchers
from saccade.nm_sparse.masked.config import Config
from saccade.nm_sparse.reference import pack_selection, unpack_selection
from saccade.nm_sparse.testing.check import check_nm_sparse
from saccade.testing.judge import report


@pytest.mark.parametrize("group", [2, 3, 4, 5, 16])
def test_bits_unpack_to_what_was_packed(group):
    kept = torch.rand(2, 3, 77) < 0.5
    assert torch.equal(unpack_selection(pack(kept, group), group, 77), kept)
    assert torch.equal(pack_selection(kept, group), pack(kept, group))


class TestMasked(NMSparseContract):
    backend = "masked"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("tile", [(16, 32), (32, 64), (16, 128)], ids=str)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_tiles_of_any_size(monkeypatch, case, tile):
    monkeypatch.setattr(launchers, "pick", lambda direction, dim, dtype: Config(*tile, 4, 1))
    results = check_nm_sparse(case, torch.float32, DEVICE, "masked")
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("pattern", ["2:4", "2:3"])
@pytest.mark.parametrize("kv_len", [21, 24])
def test_a_seed_drops_the_weights_that_the_reference_drops(kv_len, pattern):
    """Forward and backward, also where the last four keys that share a draw are not all there."""
    leaves = [torch.randn(1, 2, length, 16, device=DEVICE, requires_grad=True) for length in (9, kv_len, kv_len)]
    found = []
    for backend in ("masked", "reference"):
        torch.manual_seed(3)
        out = saccade.nm_sparse_attention(*leaves, dropout_p=0.3, pattern=pattern, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.double(), r"needs bfloat16, float16 or float32, got torch\.float64"),
        (lambda x: torch.zeros(1, 1, 4, 300), "needs a head dim of 1 to 256, got 300"),
        (lambda x: torch.zeros(1, 1, 16, 4).mT, r"needs a last stride of 1, got \(4, 4, 4\)"),
    ],
)
def test_what_the_kernels_decline(change, reason):
    x = change(torch.randn(1, 1, 4, 16)).to(DEVICE)
    with pytest.raises(saccade.UnsupportedProblem, match=reason):
        saccade.nm_sparse_attention(x, x, x, backend="masked")
    y = torch.randn(1, 1, 4, 16, device=DEVICE)
    with pytest.raises(saccade.UnsupportedProblem, match="Dv = 8"):
        saccade.nm_sparse_attention(y, y, y[..., :8], backend="masked")
