"""Lists of parts of packed sequences, for kernels that take a window."""

import re
from pathlib import Path

import pytest
import torch
from contracts.exact import DEVICE

from saccade.exact.long import sm90
from saccade.exact.ragged import window_parts

UNIT = 128


def ends_of(lengths):
    return torch.cat((torch.zeros(1, dtype=torch.long), torch.tensor(lengths).cumsum(0))).int().to(DEVICE)


def offsets_of(lengths, fewest=0):
    return window_parts.Offsets(ends_of(lengths), sum(lengths), fewest)


def drawn(number):
    return torch.randint(0, 700, (number,), generator=torch.Generator().manual_seed(number)).tolist()


def parts_of(lengths, fewest):
    return [(s, part) for s, tokens in enumerate(lengths) for part in range(max(fewest, -(-tokens // UNIT)))]


def found(listed):
    parts, count = listed
    return [(x % 2**22, x >> 22) for x in parts[: int(count)].tolist()]


@pytest.mark.parametrize("number", [1, 3, 255, 256, 257, 1000])
def test_parts_in_the_order_of_the_batch(number):
    lengths = drawn(number)
    assert found(window_parts.in_order(offsets_of(lengths), UNIT)) == parts_of(lengths, 0)


@pytest.mark.parametrize("number", [1, 3, 256, 600])
def test_the_largest_parts_first(number):
    lengths = drawn(number)
    wanted = sorted(parts_of(lengths, 1), key=lambda part: (part[1], -lengths[part[0]], part[0]))
    assert found(window_parts.longest_first(offsets_of(lengths, 1), UNIT)) == wanted


def test_many_sequences_keep_their_order(monkeypatch):
    monkeypatch.setattr(window_parts, "_MOST_SORTED", 4)
    lengths = [0, 300, 0, 5, 129]
    assert found(window_parts.longest_first(offsets_of(lengths, 1), UNIT)) == parts_of(lengths, 1)


@pytest.mark.parametrize("listed", [window_parts.in_order, window_parts.longest_first])
def test_lengths_that_nobody_has_checked_stay_within_the_memory(listed):
    """They add up to 4,000 tokens, where the batch has 20."""
    parts, count = listed(window_parts.Offsets(ends_of([4000, -3900, 100, 100]), 20, 1), UNIT)
    assert int(count) == len(parts) == 24


def test_lists_are_made_once_for_a_batch(monkeypatch):
    made = []
    launch = window_parts.launch_any
    monkeypatch.setattr(window_parts, "launch_any", lambda *given, **options: made.append(given[0]) or launch(*given, **options))
    offsets = offsets_of([300, 5])
    first = window_parts.in_order(offsets, UNIT)
    assert window_parts.in_order(offsets, UNIT) is first
    window_parts.longest_first(offsets, UNIT)
    offsets.ends[2] = 304
    window_parts.in_order(offsets._replace(tokens=304), UNIT)
    assert made == [window_parts.in_order_kernel, window_parts.longest_first_kernel, window_parts.in_order_kernel]


def test_the_kernels_take_a_part_from_the_bit_at_which_lists_put_it():
    source = Path(sm90.__file__).parent / "cuda" / "chunks_sm90.cuh"
    assert re.search(r"PART_AT = (\d+);", source.read_text())[1] == str(window_parts.PART_AT)
