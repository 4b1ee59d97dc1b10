"""The GPU that each of several processes uses, if a machine has several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.soak.settings import begin

# the device of this process, where it is one of several
_own: list[str] = []


def devices_of(name: str | None, first: torch.device) -> tuple[str, ...]:
    """The devices that processes share: `first` alone, or every GPU of its kind if `name` says no number. The covering lists are of one kind."""
    if first.type != "cuda" or ":" in (name or ""):
        return (str(first),)
    kind = torch.cuda.get_device_name(first)
    return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()) if torch.cuda.get_device_name(i) == kind)


def begin_on(devices: tuple[str, ...], begun: Any) -> None:
    """`begin`, in one of several processes: each keeps to the next of the devices, since a context on every one would take memory there. begun: a
    shared number, of the processes that began before."""
    begin()
    with begun.get_lock():
        number = begun.value
        begun.value += 1
    _own[:] = [devices[number % len(devices)]]
    if _own[0].startswith("cuda"):
        torch.cuda.set_device(_own[0])


def on_own_device(run: Callable[..., Any], batch: Any, ends: float | None) -> Any:
    """`run(batch, device, ends)` on the device of this process."""
    return run(batch, _own[0], ends)
