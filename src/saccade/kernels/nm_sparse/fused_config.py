"""Shapes of the fused kernels on sparse tensor cores: tiles, warpgroups, and which of the equal selections they compile."""

from __future__ import annotations

from dataclasses import asdict, dataclass

SELECT_PLAIN, SELECT_MIXED, SELECT_OVERRIDE = range(3)  # cuda/selection.cuh


@dataclass(frozen=True)
class HopperConfig:
    """`fused_sm90.cu`: consumer warpgroups of 64 queries, keys of a tile, tiles of a ring (a power of two).

    query_registers: Q as a register operand. persistent: one thread block a multiprocessor, which takes work from a counter.
    overlap: select while the products P V of the same warpgroup run; costs registers for a second operand.
    """

    warpgroups: int = 3
    block_kv: int = 96
    stages: int = 2
    query_registers: bool = False
    persistent: bool = False
    overlap: bool = False
    selection: int = SELECT_OVERRIDE

    def defines(self) -> dict[str, int | str | bool]:
        """As macros."""
        return {name.upper(): value for name, value in asdict(self).items()}

    def shared_bytes(self, head_dim: int, key_tiles: int = 0) -> int:
        """Dynamic shared memory: tiles, barriers and, for a block mask, a byte a key tile."""
        tiles = 2 * head_dim * (64 * self.warpgroups + 2 * self.stages * self.block_kv)
        barriers = 4 * self.stages + 2 * self.warpgroups + 3
        return 1024 + tiles + 8 * (barriers + 1) + key_tiles


def padded_dim(head_dim: int) -> int:
    """Head dim that a kernel is compiled for: column blocks of 64, the rest zeros."""
    return -(-head_dim // 64) * 64


def pick_hopper(head_dim: int, blocks: bool, dropout: bool) -> HopperConfig:
    """Not measured: what spills nothing; docs/notes/nm_sparse.md has the instruction counts. A block mask needs tiles of its 64 keys."""
    dim = padded_dim(head_dim)
    if blocks:
        return HopperConfig(3 if dim <= 128 else 2, 64, 4 if dim <= 128 else 2)
    if dropout:
        return HopperConfig(2, 64, 2)
    if dim == 64:
        return HopperConfig(3, 128, 4)
    if dim == 128:
        return HopperConfig()
    return HopperConfig(2, 96 if dim == 192 else 64, 2)
