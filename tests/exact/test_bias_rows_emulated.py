"""The kernel that copies a bias to rows that the copy engine can address, on a CPU: what it writes, and that it reads nothing beside the bias."""

from __future__ import annotations

import ctypes
import math

import emulator
import pytest
import torch
from guarded import ends_well, guarded

from saccade.exact.long.bias import UNIT, bias_rows_call
from saccade.launch.cuda import CudaLaunch, run

WINDOWS, HEADS, QUERIES = 3, 2, 35


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(CudaLaunch, "ready", emulator.ready)


def check(bias):
    bias.copy_(torch.randn(bias.shape))
    made = torch.full((*bias.shape[:3], -(-bias.shape[3] // UNIT) * UNIT), math.nan).half()
    run(bias_rows_call, (bias, made), (), lambda device: 1)
    assert torch.equal(made[..., : bias.shape[3]], bias)
    assert not made[..., bias.shape[3] :].any()


@pytest.mark.parametrize("keys", [1, 7, 8, 9, 15, 16, 17, 255, 257])
@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("laid", ["rows", "rows of a wider matrix", "transposed", "every other key"])
def test_a_copied_bias(keys, begins, laid):
    """No NaN that lies beside the bias is copied. The numbers behind the end of a row are 0."""
    rows, wide = WINDOWS * HEADS * QUERIES, keys + (0 if laid == "rows" else 5)
    memory = torch.full((begins + 2 * rows * wide,), math.nan).half()
    bias = memory[begins : begins + rows * wide].view(WINDOWS, HEADS, QUERIES, wide)[..., :keys]
    if laid == "transposed":
        bias = memory[begins : begins + rows * keys].view(WINDOWS, keys, HEADS, QUERIES).permute(0, 2, 3, 1)
    elif laid == "every other key":
        bias = memory[begins:].view(WINDOWS, HEADS, QUERIES, 2 * wide)[..., : 2 * keys : 2]
    check(bias)


@pytest.mark.parametrize("heads", [1, 2])  # one: the first number lies at an odd place if it lies behind
@pytest.mark.parametrize("laid", ["rows", "transposed"])
@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize("keys", [1, 7, 8, 9, 15, 16, 17, 40, 41])
def test_nothing_beside_the_bias_is_read(keys, side, laid, heads):
    """Neither a number before the first row nor one behind the last, even one that would not be used: its page may not be there."""
    shape = (WINDOWS, heads, QUERIES, keys) if laid == "rows" else (WINDOWS, keys, heads, QUERIES)
    bias = guarded(math.prod(shape), torch.float16, side).view(shape)
    bias = bias if laid == "rows" else bias.permute(0, 2, 3, 1)
    check(torch.zeros(bias.shape).half())  # compiles the kernel before the fork
    assert ends_well(lambda: check(bias))


def test_a_read_beside_is_noticed():
    for side in ("before", "behind"):
        memory = guarded(100, torch.float16, side)
        place = memory.data_ptr() + (-2 if side == "before" else 200)
        assert not ends_well(lambda place=place: ctypes.c_uint16.from_address(place).value)
        assert ends_well(lambda memory=memory: memory.add_(1))
