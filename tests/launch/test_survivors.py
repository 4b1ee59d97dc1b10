"""The keys of four adjacent ones that survive dropout, in tiles of few keys and of many."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from saccade.launch.survivors import of_four_keys  # noqa: E402

ROWS = 16


@triton.jit
def survivors_kernel(words, kept, dropout_p, ROWS: tl.constexpr, KEYS: tl.constexpr):
    rows, groups = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS // 4)[None, :]
    first = words + rows * KEYS + groups * 4
    four = of_four_keys((tl.load(first), tl.load(first + 1), tl.load(first + 2), tl.load(first + 3)), dropout_p, KEYS)
    tl.store(kept + rows * KEYS + tl.arange(0, KEYS)[None, :], tl.reshape(four, (ROWS, KEYS)))


@pytest.mark.parametrize("keys", [16, 32, 64])
@pytest.mark.parametrize("dropout_p", [0.5, 0.1])
def test_each_key_has_the_word_of_its_place(device, keys, dropout_p):
    words = torch.randint(0, 2**32, (ROWS, keys), device=device)
    threshold = torch.tensor(dropout_p, dtype=torch.float32).item() * 2**24
    # a draw that equals the probability survives
    words[0, :4] = int(-(-threshold // 1)) << 8
    words[1, :4] = (int(-(-threshold // 1)) << 8) - 1
    kept = torch.empty(ROWS, keys, dtype=torch.int8, device=device)
    # the bits of a number of 32 bits without a sign
    survivors_kernel[(1,)](words.to(torch.uint32), kept, dropout_p, ROWS, keys)
    assert torch.equal(kept.bool(), (words >> 8) >= threshold)
    assert kept[0, :4].all()
    assert not kept[1, :4].any()
