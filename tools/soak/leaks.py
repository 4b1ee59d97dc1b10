"""`python -m tools.soak --leaks`: calls of ever new shapes, while the memory of the process and the size of every cache are watched."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade.cli.device import describe, device_of
from saccade.errors import InvalidArgument
from saccade.launch.cache import LaunchCache
from tools.soak.settings import for_tiny_problems

_USUAL_COUNT = 100_000
_LEAST_COUNT = 20_000
_SAMPLES = 64
# launches that are remembered beside prepared calls
_COUNT_BESIDE, _LARGEST_BESIDE = "launch caches of calls", "the largest launch cache of a call"
# what the allocator keeps for itself; a leak of a kilobyte a call is 50 MB in the second half of 100,000 calls
ALLOWED_BYTES = 16 * 2**20


@dataclass
class Watched:
    """The largest that memory and each cache were, in the first half of the calls and in the second."""

    memory: list[int] = field(default_factory=lambda: [0, 0])
    device_memory: list[int] = field(default_factory=lambda: [0, 0])
    caches: dict[str, list[int]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)

    def sample(self, half: int, device: torch.device) -> None:
        """Look once."""
        self.memory[half] = max(self.memory[half], resident_bytes())
        if device.type == "cuda":
            self.device_memory[half] = max(self.device_memory[half], torch.cuda.memory_allocated(device))
        for name, size in sizes().items():
            seen = self.caches.setdefault(name, [0, 0])
            seen[half] = max(seen[half], size)
        self.limits |= limits()

    def faults(self) -> list[str]:
        """Sentences on what grew; empty if nothing did."""
        found = []
        for name, (before, after) in (("host", self.memory), ("device", self.device_memory)):
            if after - before > ALLOWED_BYTES:
                found.append(
                    f"{name} memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB in the second half of the calls"
                )
        for name, limit in self.limits.items():
            if max(self.caches[name]) > limit:
                found.append(f"{name} holds {max(self.caches[name])} entries, which its limit of {limit} does not allow")
        # one that grows without end grows by three quarters; a bounded one may fill up slowly
        free = {name: seen for name, seen in self.caches.items() if name not in self.limits}
        grown = [(name, *seen) for name, seen in free.items() if seen[1] > 1.25 * seen[0] + 8]
        return [*found, *(f"{name} grew from {a} to {b} entries in the second half of the calls" for name, a, b in grown)]


def run(count: int | None, device: str | None, as_json: bool) -> int:
    """Make the calls and print; 0 if nothing grew in the second half of them, 1 if something did."""
    count = _USUAL_COUNT if count is None else count
    if count < _LEAST_COUNT:
        raise InvalidArgument(
            f"count is {count}; with --leaks it must be at least {_LEAST_COUNT}, as caches fill up before they stay as they are"
        )
    place = device_of(device)
    with for_tiny_problems():
        watched = watch(count, place)
    faults = watched.faults()
    if as_json:
        answer = {"device": describe(place), "ok": not faults, "calls": count, "faults": faults, **vars(watched)}
        print(json.dumps(answer, indent=2))
    else:
        largest = sorted(watched.caches.items(), key=lambda item: -item[1][1])[:10]
        print("\n".join(f"{after:>8} {name}" for name, (_, after) in largest))
        first, second = (f"{n / 2**20:.0f} MiB" for n in watched.memory)
        print(f"{count} calls of ever new shapes: host memory {first} in the first half, {second} in the second")
        print("\n".join(faults) if faults else "nothing grew")
    return 1 if faults else 0


def watch(count: int, device: torch.device, calls: Iterator[Callable[[], object]] | None = None) -> Watched:
    """Make `count` calls, of ever new shapes unless given. The first eighth is not looked at: code is loaded there."""
    watched, warm_up = Watched(), count // 8
    step = max(1, count // _SAMPLES)
    for n, call in enumerate(itertools.islice(calls or new_calls(device), count)):
        call()
        if n >= warm_up and (n + 1) % step == 0:
            watched.sample(0 if n < (count + warm_up) // 2 else 1, device)
    return watched


def _held() -> Iterator[tuple[str, Any]]:
    """Every container and function cache that a module of saccade holds, with its name."""
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "saccade":
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, (dict, list, set, functools._lru_cache_wrapper)) and not name.startswith("__"):
                yield f"{module_name}.{name}", value


def limits() -> dict[str, int]:
    """How many entries those may have that are emptied, or forget the oldest, when they are full."""
    found = {_LARGEST_BESIDE: LaunchCache.limit}
    for name, value in _held():
        limit = value.cache_info().maxsize if isinstance(value, functools._lru_cache_wrapper) else getattr(value, "limit", None)
        if limit is not None:
            found[name] = limit
    return found


def sizes() -> dict[str, int]:
    """Entries of every container and function cache that a module of saccade holds, and the caches of launches beside prepared calls."""
    found = {
        name: value.cache_info().currsize if isinstance(value, functools._lru_cache_wrapper) else len(value)
        for name, value in _held()
    }
    named = {id(value) for _, value in _held()}
    beside = [len(x) for x in gc.get_objects() if type(x) is LaunchCache and id(x) not in named]
    found |= {_COUNT_BESIDE: len(beside), _LARGEST_BESIDE: max(beside, default=0)}
    return found


def resident_bytes() -> int:
    """Memory of this process that lies in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def new_calls(device: torch.device) -> Iterator[Callable[[], object]]:
    """Calls of every operation in turn, each of another shape than all before, every fourth with backward."""
    shape_of = _shape_on_gpu if device.type == "cuda" else _shape
    for n in itertools.count():
        turn, which = divmod(n, len(_CALLS))
        yield functools.partial(_CALLS[which], shape_of(turn), turn % 4 == 0, device)


def _shape(n: int) -> tuple[int, int, int, int]:
    """The n-th shape `[B, H, T, D]`: 20 lengths, 5 numbers of heads, 7 batches and 16 head dims; from number 11,200 on longer."""
    n, t = divmod(n, 20)
    n, h = divmod(n, 5)
    n, b = divmod(n, 7)
    n, d = divmod(n, 16)
    return b + 1, h + 1, 20 * n + t + 1, d + 1


def _shape_on_gpu(n: int) -> tuple[int, int, int, int]:
    """The same where kernels are compiled for the strides of rows: ever new batches, and a few lengths."""
    length, batch = divmod(n, 4096)
    return batch + 1, 2, 8 * (length + 1), 16


def _some(shape: tuple[int, ...], grad: bool, device: torch.device) -> Tensor:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return torch.ones(shape, device=device, dtype=dtype, requires_grad=grad)


def _finish(out: Tensor, grad: bool) -> None:
    if grad:
        out.sum().backward()


def _dense(shape: tuple[int, int, int, int], grad: bool, device: torch.device) -> None:
    query = _some(shape, grad, device)
    lengths = torch.full((shape[0],), shape[2], device=device)
    _finish(saccade.attention(query, query, query, lengths=lengths, return_lse=True)[0], grad)


def _packed(shape: tuple[int, int, int, int], grad: bool, device: torch.device) -> None:
    batch, heads, length, dim = shape
    _finish(saccade.attention_qkvpacked(_some((batch, length, 3, heads, dim), grad, device)), grad)


def _varlen(shape: tuple[int, int, int, int], grad: bool, device: torch.device) -> None:
    batch, heads, length, dim = shape
    tokens = _some((batch * length, heads, dim), grad, device)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    _finish(saccade.attention_varlen(tokens, tokens, tokens, ends, ends, length, length), grad)


def _dynamic_mask(shape: tuple[int, int, int, int], grad: bool, device: torch.device) -> None:
    query = _some(shape, grad, device)
    scores = torch.zeros(shape[:3], device=device)
    _finish(saccade.dynamic_mask_attention(query, query, query, scores, keep=3), grad)


def _scores(shape: tuple[int, int, int, int], grad: bool, device: torch.device) -> None:
    values = _some(shape, grad, device)
    weight = torch.zeros((shape[1], shape[1] * shape[3]), dtype=values.dtype, device=device)
    _finish(saccade.dynamic_mask_scores(values, weight, weight[:, 0]), grad)


def _expiry(shape: tuple[int, int, int, int], grad: bool, device: torch.device) -> None:
    saccade.expiry(torch.zeros(shape[:3], device=device), shape[3])


def _nm_sparse(shape: tuple[int, int, int, int], grad: bool, device: torch.device) -> None:
    query = _some(shape, grad, device)
    _finish(saccade.nm_sparse_attention(query, query, query), grad)


_CALLS: tuple[Callable[[tuple[int, int, int, int], bool, torch.device], None], ...] = (
    _dense, _packed, _varlen, _dynamic_mask, _scores, _expiry, _nm_sparse,
)  # fmt: skip
