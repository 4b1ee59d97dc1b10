"""A mask of keys as bits, in the emulator: every bit, and the spans by which the fused kernels end early."""

from __future__ import annotations

import emulator
import pytest
import torch

from saccade.nm_sparse import key_bits

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(key_bits, "run", lambda make, tensors, *rest: emulator.launch(make, tensors, None))


def masks(kv_len: int) -> torch.Tensor:
    """`[rows, Tk]`: nothing, everything, prefixes, single keys, all but one, gaps."""
    places = torch.arange(kv_len)
    cuts = sorted({0, 1, 31 % kv_len, 32 % kv_len, 33 % kv_len, kv_len - 1, kv_len})
    rows = [places < cut for cut in cuts] + [places == cut for cut in cuts] + [places != cut for cut in cuts]
    return torch.stack([*rows, *(torch.rand(4, kv_len, generator=torch.Generator().manual_seed(kv_len)) > 0.5)])


@pytest.mark.parametrize("kv_len", [1, 31, 32, 33, 100, 300])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_bits_and_spans(emulated, kv_len, layout):
    seen = masks(kv_len)
    given = seen if layout == "rows" else seen.t().contiguous().t()
    found = key_bits.pack_keys(given[:, None, None], kv_len)
    assert found.bits.shape == (len(seen), key_bits.words_of_keys(kv_len))
    bits = (found.bits[:, :, None] >> torch.arange(32) & 1).flatten(1).bool()
    assert torch.equal(bits[:, :kv_len], seen)
    assert not bits[:, kv_len:].any()
    places = torch.arange(kv_len)
    ends = torch.where(seen, places + 1, 0).amax(1)
    wholes = torch.where(seen, kv_len, places).amin(1)
    assert torch.equal(found.spans, torch.stack([ends, wholes], 1).int())
