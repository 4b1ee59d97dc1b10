"""Launch shapes of the family, and a way to force others while measuring. Imports only torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

MAX_HEAD_DIM = 128
_WIDE_ACCUMULATORS = (90, 100, 103)
# the widest tile of keys, and the longest tile of queries
WIDEST = 128


@dataclass(frozen=True)
class Shape:
    """Queries and keys of a tile, warps of a program, stages of its loop."""

    tile_q: int
    tile_k: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Config:
    """The shapes of a call, of each kernel.

    programs: that a multiprocessor is given of the kernel that sums the gradient of the bias; they share the rows.
    turns: whether dK and dV read a copy of a shared bias with the queries of a key side by side, like their scores.
    """

    forward: Shape
    keys: Shape
    queries: Shape
    bias: Shape
    programs: int = 2
    turns: bool = False

    def __str__(self) -> str:
        turned = ", bias turned for dK and dV" if self.turns else ""
        return f"forward {self.forward}, dK and dV {self.keys}, dQ {self.queries}, dbias {self.bias}{turned}"


# D up to -> shapes in 16 bits. Those of D = 32 and 64 are the best of some thirty on one H100, 128 to 1,024 tokens (docs/notes/shared_bias.md). The others
# were chosen by the compiler's register counts.
TABLE = {
    32: Config(Shape(64, 64, 4, 3), Shape(32, 64, 4, 3), Shape(64, 64, 4, 3), Shape(64, 64, 4, 3), programs=8, turns=True),
    64: Config(Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 4, 3), Shape(64, 64, 4, 3)),
    128: Config(Shape(128, 64, 8, 2), Shape(64, 64, 8, 2), Shape(64, 32, 4, 2), Shape(64, 64, 8, 1)),
}
# without wgmma, whose accumulators leave more registers: sm_80, and with 99 KiB of shared memory sm_86, sm_89 and sm_120
TABLE_MMA = {
    32: Config(Shape(64, 64, 4, 3), Shape(32, 64, 4, 2), Shape(64, 64, 4, 2), Shape(64, 64, 4, 2)),
    64: Config(Shape(64, 64, 4, 2), Shape(32, 64, 4, 2), Shape(64, 32, 4, 2), Shape(64, 32, 4, 2)),
    128: Config(Shape(64, 32, 4, 2), Shape(32, 32, 4, 2), Shape(32, 32, 4, 2), Shape(32, 32, 4, 1)),
}
# computed without matrix units
FLOAT32 = Config(*(Shape(32, 32, 4, 1),) * 4)
FLOAT32_WIDE = Config(*(Shape(16, 32, 4, 1),) * 4)

_forced: list[Config] = []


def config_of(block_d: int, element_size: int, arch: int) -> Config:
    """The shapes of a call. block_d: D, rounded up to a power of two."""
    if _forced:
        return _forced[-1]
    if element_size == 4:
        return FLOAT32 if block_d <= 32 else FLOAT32_WIDE
    return (TABLE if arch in _WIDE_ACCUMULATORS else TABLE_MMA)[max(block_d, 32)]


@contextlib.contextmanager
def forced(config: Config) -> Iterator[None]:
    """Every call within takes this configuration, in all threads: for measuring."""
    _forced.append(config)
    try:
        yield
    finally:
        _forced.remove(config)
