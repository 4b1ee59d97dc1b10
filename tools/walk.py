"""The walk of a first call: `python -m tools.walk`.

A walk is the chain of functions of the package from the public one to the first launch of a kernel. Each is a station. A walk climbs if it comes
back to a file that it left. Sides are functions of other files that a station calls before that launch: they check, describe, choose and allocate.
Kernels run in Triton's interpreter on a CPU, so the walks are those of the Triton kernels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

if __name__ == "__main__":  # Triton reads it at import. A test that imports this file may run on a GPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

import saccade

ROOT = f"{Path(saccade.__file__).parent}{os.sep}"
LAUNCH = "launch/triton.py", "first_launch"


class Station(NamedTuple):
    """A function of the package."""

    file: str
    function: str

    @classmethod
    def of(cls, code: CodeType) -> Station:
        """The station of a function's code."""
        return cls(code.co_filename.removeprefix(ROOT), code.co_qualname)


class Walk(NamedTuple):
    """stations: from the public function to the launch. sides: what stations call in other files, before it."""

    stations: list[Station]
    sides: list[Station]

    @property
    def climbs(self) -> int:
        """How often the walk comes back to a file that it left."""
        files = [s.file for s in self.stations]
        return sum(files[i] != files[i - 1] and files[i] in files[: i - 1] for i in range(1, len(files)))


def walk(call: Callable[[], Any]) -> Walk:
    """The walk of a call that launches a Triton kernel."""
    chain: list[FrameType] = []
    calls: list[tuple[FrameType, FrameType | None]] = []

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if chain or event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        calls.append((frame, frame.f_back))
        if Station.of(frame.f_code) == LAUNCH:
            chain.extend(reversed(_above(frame)))

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert chain, "the call launches no Triton kernel"
    sides = [(Station.of(f.f_code), above) for f, above in calls if above in chain and f not in chain]
    others = [s for s, above in sides if above is not None and s.file != Station.of(above.f_code).file]
    return Walk([Station.of(f.f_code) for f in chain], list(dict.fromkeys(others)))


def _above(frame: FrameType | None) -> list[FrameType]:
    """The frames of the package from one upwards."""
    found = []
    while frame is not None:
        found += [frame] * frame.f_code.co_filename.startswith(ROOT)
        frame = frame.f_back
    return found


def calls() -> dict[str, Callable[[], Any]]:
    """A small call of each operation that Triton kernels compute on a CPU."""
    query, key, value = torch.randn(3, 1, 2, 32, 32, dtype=torch.float16)
    packed_query, packed_key, packed_value = torch.randn(3, 40, 2, 32, dtype=torch.float16)
    long_query, long_key, long_value, scores = *torch.randn(3, 1, 2, 64, 64, dtype=torch.float16), torch.randn(1, 2, 64)
    ends = torch.tensor([0, 16, 40], dtype=torch.int32)
    return {
        "attention": lambda: saccade.attention(query, key, value, backend="short"),
        "attention_varlen": lambda: saccade.attention_varlen(
            packed_query, packed_key, packed_value, ends, ends, 24, 24, backend="ragged"
        ),
        "dynamic_mask_attention": lambda: saccade.dynamic_mask_attention(
            long_query, long_key, long_value, scores, keep=16, is_causal=True, backend="gather"
        ),
        "nm_sparse_attention": lambda: saccade.nm_sparse_attention(
            long_query, long_key, long_value, pattern="2:4", backend="masked"
        ),
    }


def main() -> None:
    """Print the walk of each operation."""
    for name, call in calls().items():
        found = walk(call)
        files = {s.file for s in (*found.stations, *found.sides)}
        print(f"{name}: {len(found.stations)} stations, {found.climbs} climbs, {len(found.sides)} sides; {len(files)} files")
        for title, listed in (("", found.stations), ("  sides: ", found.sides)):
            print(f"  {title}{' -> '.join(f'{s.file}:{s.function}' for s in listed)}")


if __name__ == "__main__":
    main()
