"""C++ packs a batch on the host as numpy does."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from saccade import native
from saccade.encoders import packing
from saccade.encoders.capacity import size_of, sizes_of
from saccade.encoders.families import Family
from saccade.encoders.graphs import Inputs
from saccade.native.build import Build


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setenv("SACCADE_NATIVE", "1")
    found = Build().wait()
    if found is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(native, "module", found)
    return found


def _batch(seed: int):
    made = torch.Generator().manual_seed(seed)
    rows, columns = (int(torch.randint(1, most, (), generator=made)) for most in (6, 12))
    ids = torch.randint(0, 5, (rows, columns), generator=made)
    mask = torch.randint(0, 2, (rows, columns), generator=made) if seed % 4 else None
    types = torch.randint(0, 2, (rows, columns), generator=made) if seed % 3 else None
    positions = torch.randint(0, 9, (1 if seed % 2 else rows, columns), generator=made) if seed % 5 == 0 else None
    if mask is not None and seed % 3:  # padding where nothing is real, so that the first column alone may be used
        ids = ids.masked_fill(mask == 0, seed % 2)
    if seed % 7 == 0:  # views with other strides
        ids = torch.stack([ids, ids + 1], 2)[..., 0]
        mask = None if mask is None else mask.t().contiguous().t()
    return packing.Given(ids, mask, types, positions)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("counts", ["columns", "counted"])
@pytest.mark.parametrize("reads_first", [False, True])
def test_as_numpy(module, seed, counts, reads_first):
    given, family, padding = _batch(seed), Family(counts), seed % 2
    ours, used = packing._on_the_host(given, family, padding, reads_first)
    want, expected = packing._by_numpy(given, family, padding, reads_first)
    assert (ours.shape, ours.tokens, ours.longest, used) == (want.shape, want.tokens, want.longest, expected)
    np.testing.assert_array_equal(ours.numbers, want.numbers)
    np.testing.assert_array_equal(ours.ends, want.ends)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("counts", ["columns", "counted"])
@pytest.mark.parametrize("reads_first", [False, True])
def test_a_device_packs_as_numpy(seed, counts, reads_first):
    given, family, padding = _batch(seed), Family(counts), seed % 2
    ours, used = packing._on_the_device(given, family, padding, reads_first)
    want, expected = packing._by_numpy(given, family, padding, reads_first)
    assert (ours.shape, ours.tokens, used.item()) == (want.shape, want.tokens, expected)
    assert want.longest <= ours.longest
    np.testing.assert_array_equal(ours.numbers.numpy(), want.numbers)
    np.testing.assert_array_equal(ours.ends.numpy(), want.ends)


def test_rows_go_back_to_their_places():
    rows = torch.arange(1.0, 7.0).view(3, 2)
    found = packing.unpack(rows, torch.tensor([1, 2, 5]), (2, 3))
    assert found.tolist() == [[[0, 0], [1, 2], [3, 4]], [[0, 0], [0, 0], [5, 6]]]


@pytest.mark.parametrize("where", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_go_back_as_torch_brings_them(module, dtype, where):
    rows, places = torch.randn(9, 5).to(dtype), torch.randperm(12)[:8].sort().values
    with where():
        ours, theirs = module.unpack(rows, places, 7, 3, 4), packing.unpack(rows[:7], places[:7], (3, 4))
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride(), ours.is_inference()) == (dtype, theirs.stride(), theirs.is_inference())
    with pytest.raises(RuntimeError):
        module.unpack(rows, places, 9, 3, 4)


@pytest.mark.parametrize("tokens", [0, 1, 7, 8])
def test_memory_is_filled_as_by_numpy(module, monkeypatch, tokens):
    batch = packing.Packed((2, 9), tokens, np.arange(4 * tokens).reshape(4, tokens), np.array([0, 0, tokens], np.int32), 7)
    by_both = []
    for one in (module, None):
        monkeypatch.setattr(native, "module", one)
        monkeypatch.setattr(torch.cuda, "Event", MagicMock())
        inputs = Inputs(8, torch.device("cpu"), 8)
        inputs.memory.fill_(-1)
        for x in inputs.pinned:
            x.fill_(-1)
        inputs.load(batch)
        by_both.append((inputs.numbers.clone(), inputs.ends.clone()))
    assert all(map(torch.equal, *by_both))
    assert by_both[0][1].tolist() == [0, 0, *[tokens] * 7]


def test_what_does_not_fit_is_not_filled_in(module):
    memory, ends = torch.zeros(4 * 8 + 5, dtype=torch.int64), np.zeros(3, np.int32)
    for wrong in ((memory, 8, np.zeros((4, 9), np.int64), ends), (memory, 8, np.zeros((4, 3), np.int32), ends),
                  (memory, 9, np.zeros((4, 9), np.int64), ends), (memory, 8, np.zeros((4, 8), np.int64), np.zeros(10, np.int32)),
                  (memory.int(), 8, np.zeros((4, 8), np.int64), ends)):  # fmt: skip
        with pytest.raises(RuntimeError, match="fill"):
            module.fill(*wrong)
    with pytest.raises((BufferError, ValueError)):
        module.fill(memory, 8, np.zeros((8, 4), np.int64).T, ends)


def test_numbers_that_are_refused_are_let_go(module):
    memory, numbers, ends = torch.zeros(4 * 8 + 5, dtype=torch.int64), bytearray(4 * 3), np.zeros(3, np.int32)
    with pytest.raises(RuntimeError, match="fill takes numbers of 8 bytes"):
        module.fill(memory, 8, numbers, ends)
    numbers.clear()  # a BufferError while somebody reads them


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_other_dtypes_are_packed_by_numpy(module, dtype):
    given = packing.Given(torch.tensor([[1, 2, 0]]), torch.tensor([[1, 1, 0]], dtype=dtype), None, None)
    assert (module.pack(*given, 0, False, False) is None) == (dtype == torch.int32)
    assert packing._on_the_host(given, Family("columns"), 0, False)[0].numbers[0].tolist() == [1, 2]


def test_a_large_batch_is_packed_in_pieces(module):
    ids = torch.arange(1000 * 200).view(1000, 200)
    given = {"input_ids": ids, "attention_mask": ids % 3, "position_ids": torch.arange(200)[None], "token_type_ids": None}
    parts = packing.pieces_of(given)
    assert all(part["input_ids"].numel() <= packing.packed_on_host() for part in parts)
    assert len(parts) == 4
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(torch.cat([part[name] for part in parts]), given[name])
    assert all(part["position_ids"] is given["position_ids"] and part["token_type_ids"] is None for part in parts)
    assert len(packing.pieces_of({"input_ids": ids[:2]})) == 1


@pytest.mark.parametrize(
    ("longest", "most", "bound"),
    [
        (36, 514, 128),
        (128, 514, 128),
        (129, 514, 512),
        (512, 8192, 512),
        (513, 514, 514),
        (600, 8192, 8192),
        (3, 64, 128),
        (600, 514, 600),
    ],
)
def test_a_graph_expects_usual_lengths_whatever_a_model_may_take(longest, most, bound):
    assert size_of(1000, 7, longest, most) == (1024, bound)
    assert size_of(7, 1000, longest, most) == (1024, bound)  # empty sequences have an end each


def test_sizes_that_are_made_ahead():
    assert sizes_of(1000, 514) == [(1024, 128), (1024, 512)]
    assert sizes_of(1000, 128) == [(1024, 128)]


def test_rotary_positions_have_no_end():
    """Stock computes them beyond the number that the config names."""
    from encoders_made import made, padded

    import saccade

    ours, theirs = (x.eval() for x in made("modernbert", max_position_embeddings=16))
    ids, mask = padded((30, 5))
    with torch.no_grad(), saccade.optimize(ours) as handle:
        got, want = (x(input_ids=ids, attention_mask=mask)[0][mask.bool()] for x in (ours, theirs))
        assert handle.served[0].last.startswith("unpadded")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
