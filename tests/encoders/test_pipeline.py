"""Batches hold every text once, within their bound, and results come back in the order of the input."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from saccade.encoders.pipeline import Bound, Results, batches, padded
from saccade.encoders.tokens import Chunk, flat, slices


def chunks(lengths, size):
    for first in range(0, len(lengths), size):
        some = lengths[first : first + size]
        ids, counts = flat([[first + i] * n for i, n in enumerate(some)])
        yield Chunk(ids, counts, np.arange(first, first + len(some)), ids % 2)


@pytest.mark.parametrize(
    "bound",
    [
        Bound(None, 64, False),
        Bound(None, 1, False),
        Bound(3, 0, False),
        Bound(sys.maxsize, 0, False),
        Bound(None, 64, True),
        Bound(2, 0, True),
        Bound(sys.maxsize, 0, True),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_each_text_is_in_one_batch(bound, size):
    lengths = np.random.default_rng(0).integers(0, 20, 60).tolist()
    seen = []
    for batch in batches(chunks(lengths, size), bound):
        assert batch.lengths.tolist() == sorted(batch.lengths.tolist(), reverse=True)
        assert batch.ids.tolist() == [i for i in batch.places for _ in range(lengths[i])]
        assert batch.types.tolist() == [i % 2 for i in batch.ids]
        longest, rows = int(batch.lengths[0]), len(batch.lengths)
        held = longest * rows if bound.padded else int(batch.lengths.sum())
        assert rows == 1 or held <= (bound.tokens if bound.texts is None else bound.texts * longest)
        seen += batch.places.tolist()
    assert sorted(seen) == list(range(60))


def test_no_chunk_gives_no_batch():
    assert list(batches(iter(()), Bound(None, 64, False))) == []
    assert Results(0, True).finish() is None
    assert list(slices(0)) == []


def test_a_chunk_is_no_longer_than_half_of_those_before_it():
    assert [x.stop for x in slices(1000)] == [256, 512, 768, 1000]
    found = list(slices(20_000))
    assert [x.start for x in found] == [0, *[x.stop for x in found[:-1]]]
    assert [x.stop - x.start for x in found[:10]] == [256, 256, 256, 256, 512, 512, 1024, 1024, 2048, 2048]
    assert max(x.stop - x.start for x in found) == 2048
    assert found[-1].stop == 20_000


@pytest.mark.parametrize("to_host", [True, False])
def test_results_are_in_order(to_host):
    rows, results = torch.randn(40, 3), Results(40, to_host)
    for places in np.random.default_rng(0).permutation(40).reshape(8, 5):
        results.add(rows[places], places)
    assert torch.equal(results.finish(), rows)


@pytest.mark.parametrize("left", [False, True])
def test_a_padded_batch(left):
    ids, lengths = flat([[1, 2, 3], [4], []])
    found = padded(Chunk(ids, lengths, np.arange(3), ids), 9, 8, left)
    expected = [[1, 2, 3], [9, 9, 4] if left else [4, 9, 9], [9, 9, 9]]
    assert found["input_ids"].tolist() == expected
    assert found["attention_mask"].tolist() == [[int(x != 9) for x in row] for row in expected]
    assert found["token_type_ids"].tolist() == [[8 if x == 9 else x for x in row] for row in expected]
