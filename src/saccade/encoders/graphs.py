"""A captured forward, and the memory from which graphs read.

A graph reads fixed memory: `Inputs`, or any object with a `load(batch)`. It writes fixed memory too, so its outputs are copied before the next replay.
All graphs are captured on one side stream, whose cuBLAS workspace is allocated before the first capture and so belongs to no graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.encoders.packing import IDS, PLACES, POSITIONS, TYPES, Packed, unpack

Run = Callable[[Any], tuple[Tensor, ...]]  # the outputs of a model for its inputs, each with a first dimension of their size
Make = Callable[[], Any]  # the memory from which a graph reads, with a `load(batch)`


class Inputs:
    """The memory from which a graph reads a batch of up to `capacity` tokens, with a pinned twin on the host.

    One allocation holds all numbers, so that one copy brings a batch.

    Attributes:
        numbers: ids, positions, types and places, int64 `[4, capacity]`.
        ends: the ends of the sequences, int32 `[capacity + 1]`; behind the last sequence, the number of tokens.
        longest: a bound of the tokens of each sequence.
    """

    def __init__(self, capacity: int, device: torch.device, longest: int):
        self.capacity, self.longest = capacity, longest
        length = 4 * capacity + (capacity + 2) // 2
        with torch.inference_mode(False):
            self.memory = torch.zeros(length, dtype=torch.int64, device=device)
            pins = device.type == "cuda"
            self.pinned = [torch.zeros(length, dtype=torch.int64, device="cpu", pin_memory=pins) for _ in range(2)]
            self.numbers, self.ends = self._parts(self.memory)
            self._places = self.numbers[PLACES]
        self.host = [tuple([x.numpy() for x in self._parts(memory)]) for memory in self.pinned]
        self.sent = [torch.cuda.Event(), torch.cuda.Event()]
        self.turn = 0
        self.fill_with_sequences()

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        numbers = memory[: 4 * self.capacity].view(4, self.capacity)
        return numbers, memory[4 * self.capacity :].view(torch.int32)[: self.capacity + 1]

    def fill_with_sequences(self, length: int = 16) -> None:
        """Valid sequences, for warming up: every id, position and type is 0, which each model has."""
        places = torch.arange(self.capacity + 1, device=self.memory.device)
        self.ends.copy_((places * length).clamp(max=self.capacity))

    def load(self, batch: Packed, stream: torch.cuda.Stream | None = None) -> None:
        """Copy a batch there, on the current stream."""
        tokens = batch.tokens
        if isinstance(batch.numbers, Tensor):
            numbers, ends = self.numbers, self.ends
            numbers[:, :tokens].copy_(batch.numbers)
            numbers[:, tokens:].zero_()
            ends[: batch.ends.shape[0]].copy_(batch.ends)
            ends[batch.ends.shape[0] :].fill_(tokens)
            return
        # the copy from this half may still run
        self.turn ^= 1
        self.sent[self.turn].synchronize()
        if native.module is not None:
            native.module.fill(self.pinned[self.turn], self.capacity, batch.numbers, batch.ends)
        else:
            table, borders = self.host[self.turn]
            table[:, :tokens], table[:, tokens:] = batch.numbers, 0
            borders[: len(batch.ends)], borders[len(batch.ends) :] = batch.ends, tokens
        self.memory.copy_(self.pinned[self.turn], non_blocking=True)
        self.sent[self.turn].record(stream)

    def places(self, tokens: int) -> Tensor:
        """The places of the tokens in the padded batch."""
        return self._places[:tokens]

    def unpacked(self, rows: Tensor, batch: Packed) -> Tensor:
        """The rows of a batch in its padded places, in memory of their own."""
        if native.module is None:
            return unpack(rows[: batch.tokens], self.places(batch.tokens), batch.shape)
        found: Tensor = native.module.unpack(rows, self._places, batch.tokens, *batch.shape)
        return found

    def arguments(self, types: bool) -> dict[str, Tensor]:
        """The arguments of a model: one row of packed tokens."""
        numbers = self.numbers
        found = {"input_ids": numbers[IDS][None], "position_ids": numbers[POSITIONS][None]}
        return found | ({"token_type_ids": numbers[TYPES][None]} if types else {})


class Turns:
    """Memory that streams use in turn: a thread with another stream waits for the work that the last stream has launched."""

    def __init__(self) -> None:
        self.last: torch.cuda.Stream | None = None
        self._raw = -1  # the driver's number of `last`

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """The current stream, which uses the memory from here on."""
        # torch's stream object takes ten times as long
        raw = torch._C._cuda_getCurrentRawStream(device.index or 0)  # type: ignore[attr-defined]
        if self.last is None or raw != self._raw:
            current = torch.cuda.current_stream(device)
            if self.last is not None:
                current.wait_stream(self.last)
            self.last, self._raw = current, raw
        return self.last


class Sent:
    """Whether a batch of the host has been read by its copy to a device."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._waits = False

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """The copies of a batch have been launched on a stream, by default the current one."""
        if self._event is not None:
            self._event.record(stream)
            self._waits = True

    def wait(self) -> None:
        """Return once the batch has been read."""
        if self._event is not None and self._waits:
            self._event.synchronize()
            self._waits = False


_failures: list[None] = []  # one for each failed capture; appending needs no lock


def failures() -> int:
    """How many captures have failed. torch's random numbers have another state since the last, which graphs made before it do not follow."""
    return len(_failures)


@contextmanager
def _quiet(device: torch.device, pool: Any) -> Iterator[None]:
    """Restores torch's random state, also after a failed capture into `pool`, and keeps Python's garbage collector from breaking a capture."""
    state, stream = torch.cuda.get_rng_state(device), torch.cuda.current_stream(device)
    collects, done = gc.isenabled(), False
    gc.disable()
    try:
        yield
        done = True
    finally:
        if collects:
            gc.enable()
        if not done:
            torch.cuda.set_stream(stream)  # after a capture that cannot be ended, torch stays on its stream
            # a failed capture leaves the generator in capture mode: it gets a new state with the same numbers
            torch.cuda.default_generators[device.index or 0].graphsafe_set_state(torch.Generator(device))
            _leave(pool, device)
            _failures.append(None)
        torch.cuda.set_rng_state(state, device)


def _leave(pool: Any, device: torch.device) -> None:
    """Abandon the pool of a capture that could not be ended. torch's allocator believes that the capture still runs, and frees no memory."""
    with suppress(RuntimeError):  # of a capture that was ended
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device.index or 0, pool)  # type: ignore[attr-defined]


class Forward:
    """A captured forward without a gradient."""

    def __init__(self, run: Run, make: Make, device: torch.device, stream: torch.cuda.Stream, pool: Any):
        before = torch.cuda.memory_reserved(device)
        self.inputs = make()
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with _quiet(device, pool), torch.inference_mode(False), torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run(self.inputs)
            stream.synchronize()
            with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.outputs = run(self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.bytes = max(0, torch.cuda.memory_reserved(device) - before)

    def __call__(self, batch: Any, stream: torch.cuda.Stream) -> tuple[Tensor, ...]:
        """The outputs of a batch and of what fills it up, in memory that the next replay overwrites. stream: the current one."""
        self.inputs.load(batch, stream)
        self.graph.replay()
        return self.outputs
