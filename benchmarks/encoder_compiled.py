"""Stock encoders under torch.compile: the best of its ways for one pass over given batches, each with a limit of time to compile in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
from encoder_captured import Padded
from steps import NOT_RUN, first_line
from torch import Tensor

# name -> arguments of torch.compile
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "dynamic": {"dynamic": True},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "reduce-overhead, dynamic": {"mode": "reduce-overhead", "dynamic": True},
}
OF_SHAPES = ("dynamic",)  # for batches of many shapes, of which every other way compiles or records each
LIMIT = 60.0  # seconds to compile in; a way that takes longer is left out, and the note says so
Embed = Callable[[Padded], Tensor]


class Compiled(NamedTuple):
    """The fastest way. note: the compile time of each way and the time of a pass, or why there is none."""

    embed: Embed | None
    note: str


@torch.inference_mode()
def fastest(
    make: Callable[[dict[str, Any]], Embed],
    batches: Sequence[Padded],
    wait: Callable[[], object],
    ways: Iterable[str] = tuple(WAYS),
    limit: float = LIMIT,
) -> Compiled:
    """Compile stock in these ways. make: the function of a batch for the arguments of torch.compile. wait: for the device."""
    found: dict[str, tuple[float, Embed]] = {}
    said = []
    for name in ways:
        torch.compiler.reset()
        try:
            embed = make(WAYS[name])
            seconds = _warm(embed, batches, wait, limit)
            took = None if seconds is None else _pass(embed, batches, wait)
        except NOT_RUN as error:
            said.append(f"{name} does not run ({first_line(error)})")
            continue
        if seconds is None or took is None:
            said.append(f"{name} compiles for more than {limit:.0f} s")
            continue
        found[name] = took, embed
        said.append(f"{name} compiled in {seconds:.0f} s, {1e3 * took:.4g} ms")
    if not found:
        return Compiled(None, "; ".join(said))
    best = min(found, key=lambda name: found[name][0])
    return Compiled(found[best][1], f"{best} of: {'; '.join(said)}")


def _warm(embed: Embed, batches: Sequence[Padded], wait: Callable[[], object], limit: float) -> float | None:
    """Seconds of two passes over all batches, in which each shape is compiled, or recorded; None beyond the limit.

    Raises:
        RuntimeError: nothing was compiled.
    """
    began, before = time.monotonic(), _compiled_frames()
    for batch in [*batches, *batches]:
        embed(batch)
        if time.monotonic() - began > limit:
            return None
    wait()
    if _compiled_frames() == before:
        raise RuntimeError("torch.compile found nothing to compile")
    return time.monotonic() - began


def _compiled_frames() -> int:
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def _pass(embed: Embed, batches: Sequence[Padded], wait: Callable[[], object]) -> float:
    began = time.monotonic()
    for batch in batches:
        embed(batch)
    wait()
    return time.monotonic() - began
