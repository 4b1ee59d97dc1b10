"""A flag in host memory that kernels set. The host reads it without a copy and without waiting for the whole call."""

from __future__ import annotations

import ctypes

import torch

from saccade.errors import SaccadeError

_free: dict[int, list[Flag]] = {}
# all flags, never freed: a kernel may still store to freed memory after it was reused
_made: list[Flag] = []


class Flag:
    """An int32 in pinned memory, 0 until a kernel stores to `address`, and an event recorded after that kernel. Get one from
    `borrow`."""

    def __init__(self, index: int):
        self.index = index
        self._memory = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.address = self._memory.data_ptr()  # valid on host and device
        self._number = ctypes.c_int32.from_address(self.address)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(index))  # the first record creates the event
        from cuda.bindings import driver

        self._record, self._handle = driver.cuEventRecord, driver.CUevent(self._event.cuda_event)
        _made.append(self)

    def record(self, stream: int | None = None) -> None:
        """Record the event; to be called after the last launch that may set the flag. stream: the address of its stream, by
        default torch's current one. The driver records it, because torch's event takes three times as long."""
        (status,) = self._record(self._handle, torch._C._cuda_getCurrentRawStream(self.index) if stream is None else stream)
        if status:
            raise SaccadeError(f"the driver refuses to record an event: {status.name}")

    def read(self) -> bool:
        """Wait for that launch, return whether the flag was set, and give the flag back. Call it once."""
        self._event.synchronize()
        found = bool(self._number.value)
        self.give_back()
        return found

    def give_back(self) -> None:
        """Let others borrow the flag; only to be called when no launch that may set it is pending."""
        self._number.value = 0
        _free[self.index].append(self)


def borrow(device: torch.device) -> Flag:
    """A flag that is not in use. A flag that is never read, because of an error, is not used again, so a late store to it does no
    harm."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free = _free.setdefault(index, [])
    try:
        return free.pop()
    except IndexError:
        return Flag(index)
