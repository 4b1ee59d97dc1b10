"""Numbers that kernels set in the host's memory, with stand-ins where a GPU would be (tests/dynamic_mask/test_expiry.py has one)."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from saccade.errors import SaccadeError
from saccade.launch import flag

driver = pytest.importorskip("cuda.bindings.driver")


@pytest.fixture
def device(monkeypatch):
    """A device without a GPU: memory is not pinned, events are there at once."""
    monkeypatch.setattr(flag, "_free", {})
    monkeypatch.setattr(flag, "_made", [])
    zeros = torch.zeros
    monkeypatch.setattr(flag.torch, "zeros", lambda *shape, pin_memory, **options: zeros(*shape, **options))
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, cuda_event=7)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(driver, "cuEventRecord", lambda event, stream: (driver.CUresult(0 if stream == 100 else 400),))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"stream of {index}")
    return torch.device("cuda", 1)


def test_a_flag_is_read_once_and_used_again(device):
    first = flag.borrow(device)
    first.record(100)
    faulty = first.read
    ctypes.c_int32.from_address(first.address).value = 1  # what a kernel does
    assert faulty()
    second = flag.borrow(device)
    assert second is first
    second.record(100)
    assert not second.read()
    with pytest.raises(SaccadeError, match="refuses to record an event: CUDA_ERROR_INVALID_HANDLE"):
        flag.borrow(device).record(0)


def test_two_calls_at_once_have_flags_of_their_own(device):
    first, second = flag.borrow(device), flag.borrow(device)
    assert first.address != second.address
    second.give_back()
    assert flag.borrow(device) is second


def test_a_flag_that_an_error_loses_keeps_its_memory(device):
    address = flag.borrow(device).address
    assert [f.address for f in flag._made] == [address]
    assert flag.borrow(device).address != address
